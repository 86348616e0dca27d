"""A trajectory leaves nothing behind that only the garbage collector could free.

A cycle keeps the conversation until the collector runs, which then walks the conversations of
thousands of trajectories, for tenths of a second in which no turn continues.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rollout.house import PLAYS, House, evaluation, training
from tests.support.waiting import until

OURS = ("troupe.workflow", "services.rollout")
TRAJECTORIES = 8


@contextmanager
def leftovers() -> Iterator[Counter[str]]:
    """Return the unreachable objects that trajectories left unfreed, by type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds: list[Any] = [type(each) for each in gc.garbage]
        counts = Counter(
            f"{kind.__module__}.{kind.__qualname__}"
            for kind in kinds
            if kind.__module__.startswith(OURS)
        )
        # Calls and the services of earlier tests leave cycles, too, but few.
        found.update({name: n for name, n in counts.items() if n >= TRAJECTORIES})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# Not those whose turn met its deadline: asyncio's own `timeout` keeps the task that it interrupted.
@pytest.mark.parametrize(
    "workflow",
    [
        "team",
        "branches",
        "one_turn",
        "parallel",
        "raises",
        "talks_too_long",
        "tree",
        "uses_tool",
    ],
)
async def test_a_trajectory_is_freed_when_it_ends(rewarded_house: House, workflow: str) -> None:
    tools = {"add": {"entrypoint": f"{PLAYS}:add"}} if workflow == "uses_tool" else {}
    await rewarded_house.prepare(workflow, tools=tools)
    await rewarded_house.run(evaluation(1, index=7))  # objects made once per job
    with leftovers() as found:
        endings = await rewarded_house.run(evaluation(TRAJECTORIES))
        await until(lambda: not len(rewarded_house.service._runner))
    assert len(endings) == TRAJECTORIES
    assert not found


async def test_so_is_one_that_is_stored(rewarded_house: House) -> None:
    await rewarded_house.prepare("team")
    await rewarded_house.open_step(queries=TRAJECTORIES // 2)
    with leftovers() as found:
        await rewarded_house.run(training(queries=TRAJECTORIES // 2))
        await until(lambda: not len(rewarded_house.service._runner))
    assert not found
