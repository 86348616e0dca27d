"""The timeline of a row as a picture: engines' running turns, trainers' work by policy."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final

from benchmarks.papers.pipeline.figures import blocks, levels
from benchmarks.papers.pipeline.measure import Run
from benchmarks.papers.pipeline.research_team import AGENTS

LEFT: Final = 92
WIDTH: Final = 800
_LANE: Final = 18
_ROW: Final = 22
_HEAD: Final = 30
_FOOT: Final = 34
# Distinct without a contrast of red and green, and readable on white and on dark grey.
COLOURS: Final = dict(
    zip(AGENTS, ("#3366aa", "#dd7733", "#8855aa", "#22997a", "#bb9911"), strict=False)
)
STYLE: Final = (
    "text{font:12px sans-serif;fill:#444}.t{font-weight:bold}.g{stroke:#bbb}.l{fill:#88888818}"
    ".e{stroke:#222;stroke-dasharray:3 3}@media(prefers-color-scheme:dark){text{fill:#ddd}"
    ".e{stroke:#eee}}"
)


@dataclass(frozen=True)
class Panel:
    """A row and the displayed window in wall-clock seconds."""

    title: str
    run: Run
    start: float
    end: float


def draw(panels: list[Panel]) -> str:
    """Return an SVG document with the panels below one another."""
    height = 0
    parts = []
    for panel in panels:
        parts.append(f'<g transform="translate(0,{height})">{_panel(panel)}</g>')
        height += _height(panel)
    return document(parts, height)


def document(parts: list[str], height: int) -> str:
    """Return the drawing between LEFT and LEFT + WIDTH as an SVG document."""
    width = LEFT + WIDTH + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _height(panel: Panel) -> int:
    return _HEAD + _ROW * (len(panel.run.engines) + len(panel.run.trainers)) + _FOOT


def _panel(panel: Panel) -> str:
    run, start, end = panel.run, panel.start, panel.end
    scale = WIDTH / (end - start)
    parts = [f'<text class="t" x="{LEFT}" y="18">{escape(panel.title)}</text>']
    y = _HEAD
    most = 1.0
    curves = {}
    for policy in (name for name in AGENTS if name in run.engines):
        turns = [span for span in run.engines[policy] if span.what == "generate"]
        curves[policy] = levels(turns, start, end, WIDTH // 4)
        most = max(most, *curves[policy])
    for policy, curve in curves.items():
        parts.append(_lane(f"{policy}", y))
        points = [f"{LEFT},{y + _LANE}"]
        for bucket, level in enumerate(curve):
            points.append(f"{LEFT + 4 * bucket},{y + _LANE - _LANE * level / most:.1f}")
        points.append(f"{LEFT + 4 * len(curve)},{y + _LANE}")
        parts.append(f'<polygon points="{" ".join(points)}" fill="{COLOURS[policy]}"/>')
        y += _ROW
    for name, spans in run.trainers.items():
        parts.append(_lane(name, y))
        for block in blocks(spans, start, end, 1.5 / scale):
            x, wide = LEFT + (block.start - start) * scale, (block.end - block.start) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="{_LANE}" '
                f'fill="{COLOURS.get(block.policy, "#888")}"/>'
            )
        y += _ROW
    for step in run.steps:
        if start <= step.at <= end:
            x = LEFT + (step.at - start) * scale
            parts.append(f'<path class="e" d="M{x:.1f} {_HEAD - 6}V{y}"/>')
    parts.append(axis(y, end - start, scale))
    return "".join(parts)


def _lane(name: str, y: int) -> str:
    return (
        f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="l" x="{LEFT}" y="{y}" width="{WIDTH}" height="{_LANE}"/>'
    )


def axis(y: int, seconds: float, scale: float) -> str:
    """Draw the ticks below a panel; `scale`: pixels per second."""
    tick = next(t for t in (0.5, 1, 2, 5, 10, 20, 50, 100, 1e9) if seconds / t <= 12)
    parts = []
    for number in range(int(seconds / tick) + 1):
        x = LEFT + number * tick * scale
        parts.append(f'<path class="g" d="M{x:.1f} {y}v4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{number * tick:g} s</text>'
        )
    return "".join(parts)
