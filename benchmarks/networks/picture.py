"""The curves of a task as a picture: a line per seed, and the published plateau."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from benchmarks.networks.curve import Curve
from benchmarks.networks.tasks import Task

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 640, 280, 60, 16, 40, 30
_COLOURS: Final = ("#3366aa", "#dd7733", "#8855aa")


def draw(task: Task, curves: Sequence[Curve]) -> str:
    """An SVG document."""
    values = [value for curve in curves for value in curve.returns] + [task.published]
    low, high = min(values), max(values)
    # The first points, of an untrained greedy policy, would flatten all others.
    low = max(low, high - 3 * (high - sorted(values)[len(values) // 4]) - 1e-9)
    most = max(curve.steps[-1] for curve in curves)

    def x(steps: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * steps / most

    def y(value: float) -> float:
        inside = _HEIGHT - _BOTTOM - _TOP
        return _HEIGHT - _BOTTOM - inside * (max(value, low) - low) / max(high - low, 1e-9)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(task.name)} on '
        f"{escape(task.environment)}: return of an agent, {len(curves)} seeds</text>",
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" '
        'stroke="#333"/>',
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"steps of the environment (to {most:,})</text>",
        f'<path d="M{_LEFT} {y(task.published):.1f}H{_WIDTH - _RIGHT}" stroke="#888" '
        'stroke-dasharray="4 4"/>',
        f'<text x="{_WIDTH - _RIGHT}" y="{y(task.published) + 14:.1f}" text-anchor="end" '
        f'fill="#555">published: {task.published:g}</text>',
    ]
    parts += [
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
        for value in (low, high)
    ]
    for curve, colour in zip(curves, _COLOURS, strict=False):
        points = " ".join(
            f"{x(steps):.1f},{y(value):.1f}"
            for steps, value in zip(curve.steps, curve.returns, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    return "\n".join([*parts, "</svg>", ""])
