"""The curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.selfplay.measure import Curve

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 340, 52, 40, 50
_COLOURS: Final = ("#1f77b4", "#d95f02", "#2ca02c")


def draw(curves: Mapping[str, Curve]) -> str:
    """SVG: exploitability over steps, of what `Curve.points` says."""
    steps = max(curve.points[-1][0] for curve in curves.values()) or 1
    highest = max(value for curve in curves.values() for _, value in curve.points)

    def at(step: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 10) * step / steps
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / highest
        return f"{x:.1f},{y:.1f}"

    def line(points: Sequence[tuple[int, float]], colour: str, width: float) -> str:
        drawn = " ".join(at(step, value) for step, value in points)
        return f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    third = next(iter(curves.values())).untrained / 3
    goal, end = at(0, third), at(steps, third)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - 10}" fill="none" stroke="#333"/>',
        f'<path d="M{goal}L{end}" stroke="#999" stroke-dasharray="4 3"/>',
        f'<text x="{_WIDTH - 12}" y="{float(goal.split(",")[1]) - 4}" text-anchor="end" '
        'fill="#666">a third of the untrained</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">optimizer steps (of '
        f"{steps})</text>",
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{highest:.2f}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="16">exploitability on Kuhn poker; thick: the pool mixture, '
        "or the newest where there is none</text>",
    ]
    for number, ((name, curve), colour) in enumerate(zip(curves.items(), _COLOURS, strict=False)):
        parts.append(line(curve.points, colour, 2))
        parts.append(f'<text x="{_LEFT + 20 + 130 * number}" y="36" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
