"""Turns that ended in the same pass are told of it in groups.

What follows an ending (the workflow's next step, rewards, rows for the store) is a dozen steps of
an event loop. Were all told at once, each step would be taken for all of them, and the first
trajectory would end with the last one: trainers would have nothing to do until then. In groups the
first rows are on their way while the others are still being made (2 % more samples/s of a whole
job of 256 trajectories a step: docs/benchmarks/end-to-end.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from services.rollout.engines.continuous import Ended
from services.rollout.engines.turns import Turn

GROUP: Final = 64
# Of the event loop, between two groups: about what a trajectory takes from its last token to the
# store's next call.
STEPS: Final = 12


def tell(ended: Sequence[tuple[Ended, Turn]]) -> None:
    """Call every `ended` for its turn, in their order: the first `GROUP` now, others soon."""
    for call, turn in ended[:GROUP]:
        call(turn, None)
    if len(ended) > GROUP:
        _after(STEPS, ended[GROUP:])


def _after(steps: int, ended: Sequence[tuple[Ended, Turn]]) -> None:
    """`tell` in `steps` steps of the running loop."""
    loop = asyncio.get_running_loop()
    if steps > 1:
        loop.call_soon(_after, steps - 1, ended)
    else:
        loop.call_soon(tell, ended)
