"""Bad workflows: the trajectory fails with a reason, and everything else continues."""

from __future__ import annotations

import inspect
import pdb
import re
import sys
import time
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.trajectories import trajectory
from services.rollout.trajectories.watchdog import blocked_since
from tests.rollout.house import House, evaluation, open_house, training
from tests.rollout.processes import ServiceProcess
from troupe.user_code import DEBUG_REMEDY, refuse_breakpoints
from troupe.v1 import common_pb2 as common_pb

FAILED = common_pb.TRAJECTORY_STATE_FAILED
COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
QUICK = {"limits": {"trajectory_seconds": 0.5, "turn_seconds": 5}}


@pytest.mark.parametrize(
    ("workflow", "reason"),
    [
        ("raises", "workflow_raised: ValueError: no such luck (plays.py:"),
        ("exits", "workflow_raised: SystemExit: 3"),
        ("exits_in_a_branch", "workflow_raised: BranchExitedError: a branch raised SystemExit: 3"),
        ("cancels_itself", "workflow_raised: CancelledError"),
        (
            "returns_nan",
            "reward_not_finite: the reward of 'solver' from the workflow must be a finite",
        ),
        ("talks_too_long", "context_overflow: a prompt of "),
        ("writes_text_as_a_metric", "workflow_error: query.log(length=...) needs a finite number"),
        ("replaces_the_metrics", "workflow_error: query.metrics is a NoneType, not a dict"),
    ],
)
async def test_a_workflow_that_fails_names_the_reason(
    house: House, workflow: str, reason: str
) -> None:
    await house.prepare(workflow)
    event = await house.run_one()
    assert event.state == FAILED
    assert event.reason.startswith(reason)
    assert not event.HasField("problem")
    assert event.rewards == {}


@pytest.mark.parametrize(
    ("workflow", "kind", "remedy"),
    [
        ("returns_list", "reward_bad_type", "Return {"),
        ("rewards_stranger", "reward_unknown_agent", "Known: checker, solver, and team"),
        ("rewards_nobody", "reward_missing", "reply.reward"),
        ("asks_stranger", "unknown_agent", "agents.critic"),
    ],
)
async def test_faults_that_repetition_cannot_cure_carry_a_remedy(
    house: House, workflow: str, kind: str, remedy: str
) -> None:
    await house.prepare(workflow)
    event = await house.run_one()
    assert event.state == FAILED
    assert event.problem.kind == kind
    assert remedy in event.problem.remedy
    assert event.reason.startswith(f"{kind}: ")


async def test_what_a_workflow_assigned_to_its_replies_is_shown(house: House) -> None:
    await house.prepare("edits_its_replies")
    event = await house.run_one()
    assert event.state == COMPLETED, event.reason
    assert [turn.response for turn in event.turns] == ["half \ufffd", "None"]
    assert {turn.finish_reason for turn in event.turns} <= {"stop", "length"}


async def test_a_breakpoint_says_where_it_is_and_how_to_debug(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(pdb, "set_trace", pdb.set_trace)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    refuse_breakpoints(DEBUG_REMEDY)
    await house.prepare("stops")
    event = await house.run_one()
    assert (event.state, event.problem.kind, event.problem.field) == (
        FAILED,
        "breakpoint",
        "workflow",
    )
    assert re.search(r"a breakpoint at plays\.py:\d+ in stops, and no terminal", event.reason)
    assert "troupe workflow try" in event.problem.message


async def test_a_workflow_that_never_returns_ends_at_its_deadline(tmp_path: Path) -> None:
    for seconds in (0.5, 5, 50):  # a busy machine needs more until the first turn is over
        async with open_house(tmp_path / f"{seconds}") as house:
            limits = {"trajectory_seconds": seconds, "turn_seconds": 5}
            await house.prepare("never_returns", limits=limits)
            event = await house.run_one()
        if event.turns:
            break
    assert event.state == FAILED
    assert event.reason == (
        f"deadline: not done within limits.trajectory_seconds = {seconds} s; "
        "after 1 turns it was waiting for the workflow"
    )
    assert [t.agent for t in event.turns] == ["solver"]  # its turns until then are shown


async def test_a_workflow_that_refuses_to_be_cancelled_is_closed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.trajectories.trajectory.GRACE_SECONDS", 0.2)
    await house.prepare("refuses_to_end", **QUICK)
    event = await house.run_one()
    assert event.reason.startswith("deadline: ")
    assert not trajectory.abandoned


@pytest.mark.parametrize("workflow", ["blocks", "spins"])
async def test_a_workflow_that_blocks_the_event_loop_is_interrupted(
    tmp_path: Path, workflow: str
) -> None:
    began = time.monotonic()
    async with open_house(tmp_path, blocked_seconds=1.0) as house:
        await house.prepare(workflow)
        ended = await house.run(evaluation(3))
    assert ended["h0-e0-t0"].state == FAILED
    assert ended["h0-e0-t0"].reason.startswith("workflow_blocked: it held the event loop for ")
    assert "plays.py" in ended["h0-e0-t0"].reason
    assert blocked_since(began)[1] == "h0-e0-t0"
    assert blocked_since(began)[0] >= 1.0
    assert blocked_since(time.monotonic()) == (0, "")
    assert [ended[f"h{n}-e0-t0"].state for n in (1, 2)] == [COMPLETED, COMPLETED]


async def test_a_blocking_workflow_is_named_in_missed_deadlines(tmp_path: Path) -> None:
    # Both begin long before the deadline of the one, which passes while the other blocks.
    limits = {"trajectory_seconds": 4, "turn_seconds": 5}
    async with open_house(tmp_path, blocked_seconds=5.0) as house:
        await house.prepare("blocks", limits=limits)
        ended = await house.run(evaluation(2))
    assert ended["h0-e0-t0"].reason.startswith("workflow_blocked: ")
    assert ended["h1-e0-t0"].reason.startswith("deadline: ")
    told = r"for \d+\.\d s of it the workflow of h0-e0-t0 blocked the event loop"
    assert re.search(told, ended["h1-e0-t0"].reason)


async def test_branches_left_behind_are_ended(house: House) -> None:
    await house.prepare("leaves_branches")
    event = await house.run_one()
    assert event.state == COMPLETED, event.reason
    engines = (await house.prepare("leaves_branches")).engines
    assert {e.running for e in engines} == {0}


async def test_tasks_that_raise_fail_the_trajectory(house: House) -> None:
    await house.prepare("one_turn", tasks={"args": {"broken": True}})
    event = await house.run_one()
    assert event.reason.startswith("bad_task: held_out[0] of tests.rollout.plays:make_tasks raised")


async def test_an_index_beyond_the_split_starts_over(house: House) -> None:
    await house.prepare("one_turn", tasks={"args": {"size": 4}})
    event = await house.run_one(index=9)
    assert event.turns[0].messages[0].content == "101+4"


async def test_failures_reach_the_store_and_spare_the_rest(
    tmp_path: Path, store_process: ServiceProcess
) -> None:
    async with open_house(tmp_path, store=store_process.address, blocked_seconds=1.0) as house:
        await house.prepare("blocks")  # query 0 blocks, query 1 plays
        await house.open_step()
        ended = await house.run(training())
        states = {key: event.state for key, event in ended.items()}
        assert states == {
            "q0-s0-t0": FAILED,
            "q0-s0-t1": FAILED,
            "q1-s0-t0": COMPLETED,
            "q1-s0-t1": COMPLETED,
        }
        step = await house.step()
        assert step.sealed
        [counts] = [c for c in step.counts if c.policy == "big"]
        assert sum(counts.drop_reasons.values()) == 2
        assert all("workflow_blocked" in reason for reason in counts.drop_reasons)
        assert len(await house.samples("big")) == 2


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_turn_that_nobody_awaits_is_said_and_refused_where_chance_is(house: House) -> None:
    await house.prepare("forgets_to_await")
    event = await house.run_one()
    assert event.state == COMPLETED
    said = "2 turns were requested and never awaited (1 of checker, 1 of solver)"
    assert event.reason == f"turn_not_awaited: {said}"
    assert event.metrics["unawaited_turns"] == 2
    assert len(event.turns) == 1
    await house.prepare("awaits_in_the_end")
    event = await house.run_one()
    assert (event.state, event.reason) == (COMPLETED, "")
    pipeline = {"deterministic": True, "mode": "sync", "steps": 1, "queries_per_step": 1}
    await house.prepare("forgets_to_await", pipeline=pipeline)
    event = await house.run_one()
    assert event.state == FAILED
    assert event.reason.startswith(f"turn_not_awaited: {said}")
    # Whether the turn ends in time is chance, and so the weights would be.
    assert event.problem.kind == "turn_not_awaited"
    assert "Await every `chat`" in event.problem.remedy


def test_closing_a_workflow_does_not_count_as_its_failure() -> None:
    @types.coroutine
    def waits(*_: Any) -> Generator[None, None, None]:
        yield

    agents: Any = types.SimpleNamespace(enter=lambda: None)
    query: Any = None
    call = trajectory.call_workflow(waits, "t", query, agents, query)
    call.send(None)
    call.close()
    assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED
