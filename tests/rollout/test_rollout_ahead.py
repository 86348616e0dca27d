"""Trajectories that are begun ahead of their step: no turn, no end, no trace before it opens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.trajectories.clock import TrajectoryClock
from tests.rollout import plays
from tests.rollout.house import House, open_house, training
from tests.rollout.processes import ServiceProcess
from tests.rollout.test_rollout_aborting import abort
from tests.support.waiting import PATIENCE, until
from troupe.v1 import common_pb2 as common_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
FAILED = common_pb.TRAJECTORY_STATE_FAILED


@pytest.fixture
async def house(tmp_path: Path, store_process: ServiceProcess) -> AsyncIterator[House]:
    plays.RESETS.clear()
    async with open_house(tmp_path, store=store_process.address) as house:
        await house.prepare("resets", limits={"trajectory_seconds": 60, "trajectory_retries": 0})
        yield house


@asynccontextmanager
async def begun_ahead(house: House, queries: int = 2) -> AsyncIterator[asyncio.Task[int]]:
    """All of them wait at their first turn, or for their end."""
    plays.RESETS.clear()

    async def follow() -> int:
        call = house.stream(training(queries), ahead=True, endings_only=True)
        return len([event async for event in call])

    following = asyncio.create_task(follow())
    await until(lambda: len(plays.RESETS) == 2 * queries)
    await asyncio.sleep(0.1)  # time to draw in; none may, however long this takes
    yield following
    following.cancel()


def drawn(house: House) -> int:
    (engine,) = house.service._jobs.get(house.job_id).policy("big").statuses("job", "w0")
    return int(engine.generated_tokens)


async def test_early_trajectories_go_on_when_their_step_opens(house: House) -> None:
    async with begun_ahead(house) as following:
        assert drawn(house) == 0
        assert not await abort(house, "q0-s0-t0"), "the store does not know of it yet"
        await house.open_step()
        assert not (await house.step()).ended_trajectory_ids
        ended = await house.run(training())
        # The call that began them is notified too, and ends.
        assert await asyncio.wait_for(following, PATIENCE) == 4
    states = {name: event.state for name, event in ended.items()}
    assert states == {
        "q0-s0-t0": COMPLETED,
        "q0-s0-t1": COMPLETED,
        "q1-s0-t0": FAILED,
        "q1-s0-t1": FAILED,
    }
    assert len(plays.RESETS) == 4, "none was begun twice"
    assert len((await house.step()).ended_trajectory_ids) == 4


@pytest.mark.slow
async def test_waiting_does_not_count(house: House) -> None:
    """More than `trajectory_seconds` until the step opens."""
    await house.prepare("resets", limits={"trajectory_seconds": 2, "trajectory_retries": 0})
    async with begun_ahead(house, 1):
        await house.open_step(1)
        await asyncio.sleep(2.2)
        ended = await house.run(training(1))
    assert [event.state for event in ended.values()] == [COMPLETED] * 2
    assert all(event.seconds < 2 for event in ended.values())


async def test_a_turn_may_be_drawn_with_the_new_weights_and_ends_with_its_step(
    house: House,
) -> None:
    async with begun_ahead(house, 1):
        await house.update(house.publish("big", 0))
        await asyncio.sleep(0.1)  # time to draw in; none may, however long this takes
        assert drawn(house) == 0, "these are the old ones"
        await house.update(house.publish("big", 1))
        await until(lambda: drawn(house) > 0)
        await house.open_step(1)
        await asyncio.sleep(0.1)  # time to end in; none may, however long this takes
        assert not (await house.step()).ended_trajectory_ids
        ended = await house.run(training(1))
    assert [event.state for event in ended.values()] == [COMPLETED] * 2
    rows = await house.samples("big")
    assert {span.version for row in rows for span in row.versions} == {1}


async def test_early_trajectories_that_nobody_awaits_leave_no_trace(house: House) -> None:
    await house.open_step()
    async with begun_ahead(house) as following:
        following.cancel()
        await until(lambda: not len(house.service._runner))
    assert not (await house.step()).ended_trajectory_ids
    assert drawn(house) == 0
    ended = await house.run(training())
    assert len(ended) == 4
    assert len(plays.RESETS) == 8


@pytest.mark.slow
async def test_a_clock_stands_still_for_branches_too() -> None:
    clock = TrajectoryClock(0.2, longest=0.2, patient=False)
    with clock.paused():
        await asyncio.sleep(0.15)
        with clock.paused():
            await asyncio.sleep(0.15)
        assert clock.left > 0.1
        assert clock.bound(60) == pytest.approx(clock.left, abs=0.01)
    assert 0.1 < clock.left <= 0.2
    await asyncio.sleep(0.25)
    assert clock.left <= 0
