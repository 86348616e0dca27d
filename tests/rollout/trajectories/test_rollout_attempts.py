"""Environments that fail, hang and die: the trajectory is retried, and no other waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.records import RowDestination
from services.rollout.trajectories.trajectory import TrajectoryAttempts, is_environments
from tests.rollout import worlds
from tests.rollout.house import House, make_spec, training
from tests.rollout.test_rollout_aborting import abort
from tests.support.processes import runs
from tests.support.waiting import PATIENCE, until
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow import ToolError, TurnError, WorkflowError
from troupe.workflow.errors import EnvironmentContractError, EnvironmentFault

ABORTED = common_pb.TRAJECTORY_STATE_ABORTED
COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
FAILED = common_pb.TRAJECTORY_STATE_FAILED
WORLDS = "tests.rollout.worlds"


async def prepare(house: House, workflow: str, **limits: float) -> None:
    """A job of `worlds`, and its first step: two queries of two trajectories."""
    await house.prepare_raw(
        make_spec("one_turn", limits=limits) | {"workflow": f"{WORLDS}:{workflow}"}
    )
    await house.open_step()


async def test_a_trajectory_whose_environment_fails_is_begun_anew(house: House) -> None:
    await prepare(house, "fails_twice", trajectory_retries=2)
    ended = await house.run(training())
    assert {event.state for event in ended.values()} == {COMPLETED}
    for name, event in ended.items():
        assert event.metrics["environment_retries"] == 2
        assert len(event.turns) == 1, "nothing of the failed attempts"
        # With the trajectory's seed each time: the same words.
        assert len(worlds.SAID[name]) == 3
        assert len(set(worlds.SAID[name])) == 1
    rows = await house.samples("big")
    assert sorted(row.trajectory_id for row in rows) == sorted(ended)
    assert (await house.step()).sealed


async def test_a_trajectory_fails_with_the_reason_after_its_last_attempt(house: House) -> None:
    await prepare(house, "fails_twice", trajectory_retries=1)
    ended = await house.run(training())
    for event in ended.values():
        assert event.state == FAILED
        assert event.reason == "environment_died: its process is gone (tried 2 times)"
        assert event.metrics["environment_retries"] == 1
    assert await house.samples("big") == []
    counts = (await house.step()).counts[0]
    assert dict(counts.drop_reasons) == {"environment_died": 4}


async def test_without_the_setting_the_first_fault_is_the_end(house: House) -> None:
    await prepare(house, "fails_twice")
    [event] = (await house.run(training(1, 1))).values()
    assert (event.state, event.reason) == (FAILED, "environment_died: its process is gone")
    assert "environment_retries" not in event.metrics


async def test_stuck_environments_are_given_up_and_nobody_waits(house: House) -> None:
    """q0 blocks in a thread, q1 in a child process that ignores SIGTERM; q2 is as ever, and runs
    again and again meanwhile."""
    await prepare(house, "some_get_stuck", trajectory_seconds=10, trajectory_retries=3)
    stuck = asyncio.create_task(house.run(training()))
    await until(lambda: len(worlds.STUCK) >= 4)
    # While they are stuck, others continue, one after the other.
    for _ in range(3):
        event = await house.run_one(index=2)
        assert event.state == COMPLETED
    assert not stuck.done()
    ended = await stuck
    assert {event.state for event in ended.values()} == {FAILED}
    assert all(event.reason.startswith("deadline: ") for event in ended.values())
    assert all(event.metrics["environment_retries"] == 0 for event in ended.values())
    assert worlds.CHILDREN
    await until(lambda: not any(map(runs, worlds.CHILDREN)))


async def test_a_stale_trajectory_ends_at_once_wherever_it_hangs(house: House) -> None:
    await prepare(house, "some_get_stuck", trajectory_seconds=60)
    running = asyncio.create_task(house.run(training()))
    async with asyncio.timeout(PATIENCE):
        await until(lambda: len(worlds.STUCK) == 4)
        for query, left in (("q0", 2), ("q1", 0)):
            doomed = [f"{query}-s0-t0", f"{query}-s0-t1"]
            await abort(house, *doomed)
            await until(lambda: len(house.service._runner) <= left)  # noqa: B023 - within this turn
            assert left == 0 or not running.done(), "the others run on"
        ended = await running
    assert {event.reason for event in ended.values()} == {"stale: too old"}
    assert {len(event.turns) for event in ended.values()} == {1}, "as far as they came"


async def test_only_faults_of_the_environment_are_retried() -> None:
    clock = TrajectoryClock(10, longest=10, patient=False)
    attempts = TrajectoryAttempts(5, clock, seed=0)
    fault = EnvironmentFault("gone", reason="died")
    assert is_environments(fault)
    assert is_environments(ToolError("no", kind="tool_timeout"))
    for error in (
        ToolError("no such tool", kind="tool_unknown_tool"),
        TurnError("engines were lost"),
        WorkflowError("ValueError", kind="workflow_raised"),
        EnvironmentContractError("a reward is missing"),
    ):
        assert not await attempts.again(error)
    assert attempts.made == 0
    # No time for another attempt.
    late = TrajectoryClock(0.0, longest=0.0, patient=False)
    assert not await TrajectoryAttempts(5, late, 0).again(fault)


async def test_a_full_group_is_reported_with_the_end_of_a_trajectory(house: House) -> None:
    """Two trajectories count and one is redundant: the last to come is refused, and says why."""
    await house.prepare("one_turn")
    await house.open_step(queries=1, redundant=1)
    first = await house.run(training(1, 1))
    assert [(e.state, e.group_complete) for e in first.values()] == [(COMPLETED, False)]
    both = await house.run(training(1, 3)[1:])
    states = sorted((event.state, event.reason, event.group_complete) for event in both.values())
    assert states == [(COMPLETED, "", True), (ABORTED, "redundant", True)]
    assert (await house.step()).sealed
    assert len({row.trajectory_id for row in await house.samples("big")}) == 2


async def test_a_trajectory_aborted_while_its_end_is_stored_ends_as_stored(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.prepare("one_turn")
    await house.open_step(queries=1, group_size=1)
    log = house.service._runner._store
    end, stored = log._end, asyncio.Event()

    async def answers_late(at: RowDestination, state: int, *more: Any) -> Any:
        done = await end(at, state, *more)
        if state == COMPLETED:
            stored.set()
            await asyncio.sleep(3600)
        return done

    monkeypatch.setattr(log, "_end", answers_late)
    running = asyncio.create_task(house.run(training(1, 1)))
    async with asyncio.timeout(PATIENCE):
        await stored.wait()
        assert await abort(house, "q0-s0-t0") == ["q0-s0-t0"]
        [event] = (await running).values()
    assert (event.state, event.reason) == (COMPLETED, "")
    assert len(await house.samples("big")) == 1
