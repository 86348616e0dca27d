"""Pictures of learning curves: SVG documents with a thin line per seed and a thick one for their
mean."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 680, 340, 56, 14, 44, 42
_BETWEEN_NAMES: Final = 150
# Distinct without a contrast of red and green.
_COLOURS: Final = ("#1f77b4", "#d95f02", "#7a4fa3", "#22997a", "#bb9911", "#777777")
_SEED: Final = 'stroke-width="0.7" stroke-opacity="0.45"'
_THICK: Final = 'stroke-width="2.2"'

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """A dashed line to compare curves with: horizontal at `value`, or vertical at `place`."""

    text: str = ""
    value: float | None = None
    place: float | None = None


def draw_curves(
    curves: Mapping[str, Sequence[Points]],
    *,
    title: str,
    axis: str,
    mark: Mark | None = None,
    low: float | None = None,
) -> str:
    """Return an SVG document of curves by name, each the (place, value) points of its seeds.

    The mean ends with the shortest seed. `axis` names the places; the largest is written behind it.
    Values below `low` (default: the least value, or 0 if that is less) are drawn at `low`.
    """
    seeds = [points for each in curves.values() for points in each]
    most = max(place for points in seeds for place, _ in points) or 1.0
    values = [value for points in seeds for _, value in points]
    if mark is not None and mark.value is not None:
        values.append(mark.value)
    bottom = min(0.0, *values) if low is None else low
    top = max(*values, bottom + 1e-9)
    foot, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def at(place: float, value: float) -> str:
        x = _LEFT + (right - _LEFT) * place / most
        y = foot - (foot - _TOP) * (max(value, bottom) - bottom) / (top - bottom)
        return f"{x:.1f},{y:.1f}"

    def line(points: Points, colour: str, style: str) -> str:
        drawn = " ".join(at(*point) for point in points)
        return f'<polyline points="{drawn}" fill="none" stroke="{colour}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<path d="M{_LEFT} {_TOP}V{foot}H{right}" fill="none" stroke="#333"/>',
        f'<text x="{_LEFT}" y="16">{escape(title)}</text>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(axis)} '
        f"(of {most:,.0f})</text>",
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{top:.2f}</text>',
        f'<text x="{_LEFT - 6}" y="{foot}" text-anchor="end">{bottom:.2f}</text>',
    ]
    if mark is not None:
        value = mark.value or 0.0
        across = at(0, value), at(most, value)
        begin, end = across if mark.place is None else (at(mark.place, bottom), at(mark.place, top))
        parts.append(f'<path d="M{begin}L{end}" stroke="#999" stroke-dasharray="4 3"/>')
        # At the left, where curves are furthest from what they are to reach.
        y = float(across[0].split(",")[1]) - 4
        parts.append(f'<text x="{_LEFT + 8}" y="{y:.1f}" fill="#666">{escape(mark.text)}</text>')
    apart = min(_BETWEEN_NAMES, (right - _LEFT - 8) // len(curves))
    for number, (name, each) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if len(each) > 1:
            parts += [line(points, colour, _SEED) for points in each]
        parts.append(line(_mean(each), colour, _THICK))
        x = _LEFT + 8 + apart * number
        parts.append(f'<text x="{x}" y="34" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _mean(seeds: Sequence[Points]) -> Points:
    return [
        (statistics.fmean(place for place, _ in step), statistics.fmean(value for _, value in step))
        for step in zip(*seeds, strict=False)
    ]
