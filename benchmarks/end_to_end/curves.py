"""Learning curves of two systems as a picture: a line per seed, a thick one for their mean."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 50, 40, 30
_COLOURS: Final = ("#1f77b4", "#d95f02")


def draw(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """SVG of `{system: [curve of each seed]}`; all curves have equally many steps."""
    steps = len(next(iter(curves.values()))[0])
    highest = max(value for seeds in curves.values() for curve in seeds for value in curve)

    def line(curve: Sequence[float], colour: str, width: float, opacity: float) -> str:
        points = " ".join(
            f"{_LEFT + (_WIDTH - _LEFT - 10) * step / max(1, steps - 1):.1f},"
            f"{_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / highest:.1f}"
            for step, value in enumerate(curve)
        )
        return (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-opacity="{opacity}"/>'
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - 10}" fill="none" stroke="#333"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">steps (of {steps})</text>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{highest:.2f}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">0</text>',
    ]
    for number, ((name, seeds), colour) in enumerate(zip(curves.items(), _COLOURS, strict=True)):
        parts += [line(curve, colour, 1, 0.35) for curve in seeds]
        parts.append(line([statistics.fmean(at) for at in zip(*seeds, strict=True)], colour, 3, 1))
        x = _LEFT + 20 + 160 * number
        parts.append(f'<text x="{x}" y="{_TOP - 10}" fill="{colour}">{name}, mean of seeds</text>')
    return "\n".join([*parts, "</svg>", ""])
