"""How far apart the policies' backlogs are, over time: one panel per row."""

from __future__ import annotations

from html import escape
from typing import Final

from benchmarks.papers.balancing.measure import Run
from benchmarks.papers.pipeline.research_team import AGENTS
from benchmarks.papers.pipeline.svg import COLOURS, LEFT, WIDTH, axis, document

_HEAD: Final = 30
_HEIGHT: Final = 120
_FOOT: Final = 34
_LEGEND: Final = 24


def draw(runs: list[Run]) -> str:
    """Backlog per engine of each policy, the rows over the same seconds and to the same scale; the
    space between the highest and the lowest line is the disparity."""
    seconds = max(run.measured[-1].at - run.measured[0].at for run in runs)
    most = max(p for run in runs for look in run.measured for p in look.pressures.values())
    parts = [_legend()]
    y = _LEGEND
    for run in runs:
        parts.append(f'<g transform="translate(0,{y})">{_panel(run, seconds, most)}</g>')
        y += _HEAD + _HEIGHT + _FOOT
    return document(parts, y)


def _panel(run: Run, seconds: float, most: float) -> str:
    looks = run.measured
    scale, start, floor = WIDTH / seconds, looks[0].at, _HEAD + _HEIGHT
    title = f"{run.row.label}: {run.seconds:.1f} s per step (simulated)"
    parts = [
        f'<text class="t" x="{LEFT}" y="18">{escape(title)}</text>',
        f'<rect class="l" x="{LEFT}" y="{_HEAD}" width="{WIDTH}" height="{_HEIGHT}"/>',
        f'<text x="{LEFT - 8}" y="{_HEAD + 10}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{LEFT - 8}" y="{floor}" text-anchor="end">0</text>',
    ]
    for policy in AGENTS:
        points = " ".join(
            f"{LEFT + (look.at - start) * scale:.1f},"
            f"{floor - _HEIGHT * look.pressures.get(policy, 0.0) / most:.1f}"
            for look in looks
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" '
            'stroke-width="1.5"/>'
        )
    for step in run.steps:
        if start <= step.at <= looks[-1].at:
            x = LEFT + (step.at - start) * scale
            parts.append(f'<path class="e" d="M{x:.1f} {_HEAD - 6}V{floor}"/>')
    parts.append(axis(floor, seconds, scale))
    return "".join(parts)


def _legend() -> str:
    parts = [f'<text x="{LEFT - 8}" y="14" text-anchor="end">turns/engine</text>']
    for number, policy in enumerate(AGENTS):
        x = LEFT + 110 * number
        parts.append(f'<path d="M{x} 10h16" stroke="{COLOURS[policy]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 22}" y="14">{policy}</text>')
    return "".join(parts)
