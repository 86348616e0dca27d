"""Decision on how often training state becomes durable, from the measured cost of writing it.

A state that is written before its step's commit delays the step by the whole write. A state that is
written behind the next steps costs them a copy to host memory and, after a crash, the recomputation
of the steps since. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Writing is short, and done before every commit, up to so many seconds or this share of a step.
_SHORT_SECONDS: Final = 0.5
_SHORT_SHARE: Final = 0.05
# Share of the time in which the background may write: the disk serves others too.
_WRITING_SHARE: Final = 0.5
# Share of the steps' time that copies may take.
_COPYING_SHARE: Final = 0.02
# Steps that a crash may cost, at most.
MOST_STEPS: Final = 64


@dataclass(frozen=True)
class StateCosts:
    """Measured seconds of one policy; None: not measured yet."""

    # Writing a state to disk.
    writing: float | None = None
    # Copying it to the host's memory.
    copying: float | None = None
    # A step, from its first micro-batch to its weights, without the state.
    step: float | None = None


@dataclass(frozen=True)
class StatePlan:
    """How states of one policy become durable: every `every` steps, before the commit or behind."""

    every: int
    background: bool


def plan_states(every: int | None, background: bool, costs: StateCosts) -> StatePlan:
    """Return the plan for the next step; `every`, `background`: the job's `state` section."""
    if every is not None or not background:
        return StatePlan(every or 1, background)
    writing, copying, step = costs.writing, costs.copying, costs.step
    if writing is None or step is None or writing <= max(_SHORT_SECONDS, _SHORT_SHARE * step):
        return StatePlan(1, background=False)
    step = max(step, 1e-3)
    steps = max(writing / (_WRITING_SHARE * step), (copying or 0.0) / (_COPYING_SHARE * step))
    return StatePlan(min(MOST_STEPS, max(1, math.ceil(steps))), background=True)


def is_due(plan: StatePlan, behind: int, *, over_high_water: bool, writing: bool) -> bool:
    """Return whether the version just committed is copied and written now.

    `behind`: steps since the last version that is on disk or being written. `writing`: an earlier
    version is being written; then steps go on until twice as many are behind, and wait from there
    on, so that neither memory nor what a crash costs grows without bound. `over_high_water`: the
    store has no room for rows.
    """
    if writing:
        return behind >= 2 * plan.every
    return behind >= plan.every or over_high_water
