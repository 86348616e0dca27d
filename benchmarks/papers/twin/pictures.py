"""The pictures of docs/benchmarks/twin.md, from the figures of its tables.

    python -m benchmarks.papers.twin.pictures

Reads docs/twin/figures.json and writes docs/twin/NAME.svg, one picture per entry: grouped bars, or
lines over a logarithmic or linear axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.papers.pipeline.svg import COLOURS, LEFT, WIDTH, document

FOLDER: Final = Path(__file__).resolve().parents[3] / "docs" / "twin"
_COLOURS: Final = tuple(COLOURS.values())
_HEAD: Final = 58
_HEIGHT: Final = 200
_FOOT: Final = 46
_GAP: Final = 18


def drawn(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return an SVG document by name. Raises ValueError naming an entry that cannot be drawn."""
    return {name: picture(name, one) for name, one in figures.items()}


def picture(name: str, given: Mapping[str, Any]) -> str:
    """Return one picture, with its panels below one another."""
    parts = []
    for number, panel in enumerate(given["panels"]):
        series, x = panel["series"], panel["x"]
        for label, values in series.items():
            if len(values) != len(x):
                raise ValueError(
                    f"{name}.{label}: {len(values)} values for {len(x)} points; use null if a "
                    "series has none"
                )
        draw = _lines if given["kind"] == "lines" else _bars
        top = number * (_HEAD + _HEIGHT + _FOOT)
        parts.append(f'<g transform="translate(0,{top})">{draw(panel)}</g>')
    return document(parts, len(given["panels"]) * (_HEAD + _HEIGHT + _FOOT))


def _bars(panel: Mapping[str, Any]) -> str:
    series, groups = panel["series"], panel["x"]
    most = max(value for values in series.values() for value in values if value is not None)
    ticks = _ticks(most)
    parts = [_frame(panel), _grid([(one / ticks[-1], f"{one:g}") for one in ticks])]
    width = WIDTH / len(groups)
    each = (width - _GAP) / len(series)
    for number, values in enumerate(series.values()):
        for place, value in enumerate(values):
            if value is None:
                continue
            x = LEFT + place * width + _GAP / 2 + number * each
            height = _HEIGHT * value / ticks[-1]
            y = _HEAD + _HEIGHT - height
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{each - 2:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
                f'<text x="{x + each / 2 - 1:.1f}" y="{y - 3:.1f}" text-anchor="middle" '
                f'style="font-size:10px">{value:g}</text>'
            )
    for place, group in enumerate(groups):
        x = LEFT + (place + 0.5) * width
        # Long names on two lines.
        for line, words in enumerate(str(group).split("\n")):
            parts.append(
                f'<text x="{x:.1f}" y="{_HEAD + _HEIGHT + 16 + 14 * line}" '
                f'text-anchor="middle" style="font-size:11px">{escape(words)}</text>'
            )
    return "".join(parts)


def _lines(panel: Mapping[str, Any]) -> str:
    series, xs = panel["series"], panel["x"]
    shown = [value for values in series.values() for value in values if value is not None]
    logarithmic = bool(panel.get("logarithmic"))
    scale = math.log if logarithmic else float
    ticks = _powers(max(shown)) if logarithmic else _ticks(max(shown))
    low = scale(ticks[0])
    high = scale(ticks[-1]) - low
    parts = [_frame(panel)]
    parts.append(_grid([((scale(one) - low) / high, f"{one:,g}") for one in ticks]))
    first, last = scale(xs[0]), scale(xs[-1])

    def across(x: float) -> float:
        return LEFT + 12 + (WIDTH - 24) * (scale(x) - first) / (last - first)

    for number, values in enumerate(series.values()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [
            (across(x), _HEAD + _HEIGHT - _HEIGHT * (scale(value) - low) / high)
            for x, value in zip(xs, values, strict=True)
            if value is not None
        ]
        # Earlier series are drawn wider, so that they stay visible below later ones.
        width = 2 + 1.5 * (len(series) - 1 - number)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
            + "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
            )
        )
    floor = _HEAD + _HEIGHT
    parts += [
        f'<text x="{across(x):.1f}" y="{floor + 16}" text-anchor="middle">{x:,g}</text>' for x in xs
    ]
    named = escape(panel["axis"])
    parts.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{floor + 34}" text-anchor="middle">{named}</text>'
    )
    return "".join(parts)


def _frame(panel: Mapping[str, Any]) -> str:
    parts = [
        f'<text class="t" x="{LEFT}" y="18">{escape(panel["title"])}</text>',
        f'<rect class="l" x="{LEFT}" y="{_HEAD}" width="{WIDTH}" height="{_HEIGHT}"/>',
    ]
    x = float(LEFT)
    for number, label in enumerate(panel["series"]):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<path d="M{x:.0f} 34h16" stroke="{colour}" stroke-width="4"/>')
        parts.append(f'<text x="{x + 22:.0f}" y="38">{escape(label)}</text>')
        x += 44 + 6.6 * len(label)
    return "".join(parts)


def _grid(ticks: Sequence[tuple[float, str]]) -> str:
    """Draw grid lines at fractions of the height, with their labels."""
    parts = []
    for share, label in ticks:
        y = _HEAD + _HEIGHT * (1 - share)
        parts.append(
            f'<path class="g" d="M{LEFT} {y:.1f}h{WIDTH}" stroke-opacity="0.4"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return "".join(parts)


def _ticks(most: float) -> list[float]:
    """Return four to eight round numbers from 0 on, the last one above `most`."""
    step = 10.0 ** math.floor(math.log10(most))
    step = next(one for one in (step / 5, step / 2, step, 2 * step) if most / one < 7.5)
    return [step * n for n in range(math.floor(most / step) + 2)]


def _powers(most: float) -> list[float]:
    """Return powers of four from 1 on, the last one not below `most`."""
    return [4.0**n for n in range(math.ceil(math.log(most, 4)) + 1)]


def main() -> None:
    """Write all pictures."""
    figures = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    for name, svg in drawn(figures).items():
        (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
