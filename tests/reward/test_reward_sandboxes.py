"""Sandboxes that outlive a call: what stays, what ends, and isolation from others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from services.reward.call import CallDeadline, CallOutcome, FunctionCall
from services.reward.cgroups import open_groups
from services.reward.function import RegisteredFunction
from services.reward.sandboxes import manager
from services.reward.sandboxes.kinds import open_providers
from services.reward.sandboxes.manager import SandboxGone, SandboxLimits, SandboxManager
from tests.support.needs import BUBBLEWRAP
from tests.support.waiting import PATIENCE, until
from troupe.rpc import InvalidArgument, ResourceExhausted, new_id
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    BUBBLEWRAP,
]


def function(name: str, source: Path | None = None, **fields: Any) -> RegisteredFunction:
    settings = {"timeout_seconds": 60, "sandbox": "bubblewrap", "memory_mib": 128}
    settings |= {"processes": 16, "disk_mib": 8, "stateful": True, "version": str(fields)}
    settings |= {"entrypoint": f"hostile_functions:{name}"}
    return RegisteredFunction(reward_pb.FunctionSpec(name=name, **(settings | fields)), source)


class Trajectory:
    """A caller of functions in its sandbox, with rollout's knowledge of it."""

    def __init__(self, sandboxes: SandboxManager, source: Path | None = None) -> None:
        self.sandboxes, self.source = sandboxes, source
        self.name = new_id()
        self.had: list[str] = []

    async def outcome(self, name: str, fields: dict[str, Any], **arguments: Any) -> CallOutcome:
        what = function(name, self.source, **fields)
        call = FunctionCall(
            json.dumps(arguments),
            "job",
            self.name,
            sandboxes=tuple(self.had),
            deadline=CallDeadline(what.spec.timeout_seconds),
        )
        async with self.sandboxes.executor(what, call) as place:
            outcome = await place.run(what, call)
        self.had = [outcome.sandbox]
        return outcome

    async def call(self, name: str, fields: dict[str, Any] | None = None, **arguments: Any) -> Any:
        outcome = await self.outcome(name, fields or {}, **arguments)
        return outcome.error or json.loads(outcome.result_json)

    async def until_busy(self) -> None:
        """Wait until a call runs in a sandbox."""
        await until(lambda: any(one.turn.locked() for one in self.sandboxes._sandboxes.values()))

    def close(self) -> None:
        self.sandboxes.close("job", self.name)


@contextlib.asynccontextmanager
async def sandboxes_of(**limits: Any) -> AsyncIterator[SandboxManager]:
    groups = open_groups()
    sandboxes = SandboxManager(SandboxLimits(**limits), 60, open_providers(groups))
    try:
        yield sandboxes
    finally:
        await sandboxes.stop()
        if groups is not None:
            groups.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[SandboxManager]:
    async with sandboxes_of() as sandboxes:
        yield sandboxes


@pytest_asyncio.fixture(loop_scope="module")
async def mine(sandboxes: SandboxManager) -> AsyncIterator[Trajectory]:
    trajectory = Trajectory(sandboxes)
    yield trajectory
    trajectory.close()


async def test_files_stay_in_a_trajectory_s_sandbox_and_no_other_sees_them(
    mine: Trajectory,
) -> None:
    assert await mine.call("writes", path="here") is None
    assert await mine.call("reads", path="/tmp/work/here") == "here"
    assert (await mine.call("where"))["uid"] != 0
    other = Trajectory(mine.sandboxes)
    assert await other.call("lists", path="/tmp/work") == []
    other.close()


async def test_processes_that_a_call_started_end_with_it(mine: Trajectory) -> None:
    await mine.call("counts_in_background", path="count")
    assert not [p for p in psutil.process_iter() if "ticker" in _name(p)]
    first = await mine.call("reads", path="count")
    assert await mine.call("reads", path="count") == first


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


async def test_a_timeout_ends_the_call_and_not_the_sandbox(mine: Trajectory) -> None:
    await mine.call("writes", path="here")
    for name in ("never_ends", "stubborn"):
        error = await mine.call(name, {"timeout_seconds": 0.5})
        assert (error.kind, "within 0.5 s" in error.message) == (Kind.KIND_TIMEOUT, True)
    assert await mine.call("reads", path="here") == "here"


async def test_calls_of_one_sandbox_run_one_after_another(mine: Trajectory) -> None:
    """A process that a call has started cannot meet another call."""
    first = asyncio.create_task(mine.call("looks_twice", path="second", seconds=0.5))
    await mine.until_busy()
    second = asyncio.create_task(mine.call("writes", path="second"))
    other = Trajectory(mine.sandboxes)
    assert await other.call("looks_twice", path="second", seconds=0.0) == [False, False]
    other.close()
    assert await first == [False, False]
    await second
    assert await mine.call("reads", path="second") == "here"


async def test_a_cancelled_call_ends_and_nothing_else(mine: Trajectory) -> None:
    await mine.call("writes", path="here")
    what = function("waits_for")
    call = FunctionCall(json.dumps({"path": "never"}), "job", mine.name)
    async with mine.sandboxes.executor(what, call) as place:
        running = asyncio.create_task(place.run(what, call))
        waits = asyncio.create_task(mine.call("reads", path="here"))
        given_up = asyncio.create_task(mine.call("reads", path="here"))
        await mine.until_busy()
        given_up.cancel()
        place.cancel()
        outcome = await running
    assert outcome.error is not None
    assert outcome.error.kind == Kind.KIND_CANCELLED
    assert await waits == "here"
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert len(await mine.call("lists", path="/proc")) > 10  # alive


async def test_a_lost_sandbox_is_reported_and_can_be_replaced(mine: Trajectory) -> None:
    await mine.call("writes", path="here")
    had = mine.had
    mine.close()
    for had_before, why in ((had, "closed"), ([f"{had[0][:8]}-of-old"], "does not know")):
        mine.had = had_before
        with pytest.raises(SandboxGone) as gone:
            await mine.call("reads", path="here")
        assert (gone.value.sandbox_id, why in str(gone.value)) == (had_before[0], True)
        assert gone.value.error().kind == Kind.KIND_SANDBOX_GONE
    mine.had = ["other-sandbox"]  # of a function with other limits: nothing to this one
    error = await mine.call("reads", path="here")
    assert "FileNotFoundError" in error.message
    assert mine.had != had


async def test_the_supervisor_is_out_of_reach_inside_and_missed_when_it_dies(
    mine: Trajectory,
) -> None:
    done = await mine.call("attacks_its_supervisor")
    assert done == ["PermissionError"] * 3
    running = asyncio.create_task(mine.call("waits_for", path="never"))
    await mine.until_busy()
    for process in psutil.Process().children(recursive=True):
        # One of before may be ending.
        with contextlib.suppress(psutil.NoSuchProcess):
            if "supervisor.py" in " ".join(process.cmdline()):
                process.kill()
    error = await asyncio.wait_for(running, PATIENCE)
    assert error.kind == Kind.KIND_SANDBOX_GONE, error
    with pytest.raises(SandboxGone):
        await mine.call("where")


async def test_idle_for_too_long() -> None:
    async with sandboxes_of(idle_seconds=0.05) as sandboxes:
        trajectory = Trajectory(sandboxes)
        await trajectory.call("where")
        await until(lambda: not sandboxes._count)
        with pytest.raises(SandboxGone, match=r"idle for 0\.05 s"):
            await trajectory.call("where")


async def test_sandboxes_are_bounded_in_number_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandboxes_of(count=2, memory_mib=1000) as sandboxes:
        first, second, third = (Trajectory(sandboxes) for _ in range(3))
        await asyncio.gather(first.call("where"), second.call("where"))
        monkeypatch.setattr(manager, "_WAIT_SECONDS", 0.05)
        with pytest.raises(ResourceExhausted, match="2 sandboxes") as full:
            await third.call("where")
        assert full.value.retry_after_ms
        monkeypatch.setattr(manager, "_WAIT_SECONDS", 60)
        waits = asyncio.create_task(third.call("where"))
        assert (await second.call("where"))["uid"] != 0  # its own is there
        first.close()
        assert (await waits)["uid"] != 0
        third.close()
        # 384 MiB each: of one that takes 900, none.
        waits = asyncio.create_task(first.call("where", {"memory_mib": 700}))
        second.close()
        assert (await waits)["uid"] != 0
        with pytest.raises(InvalidArgument, match="1000 MiB"):
            sandboxes.check(function("where", memory_mib=1000).spec)
        with pytest.raises(InvalidArgument) as nameless:
            async with sandboxes.executor(function("where"), FunctionCall("{}", "job")):
                pass
        assert nameless.value.field == "trajectory_id"


async def test_a_stateless_call_has_a_sandbox_of_its_own(sandboxes: SandboxManager) -> None:
    before = sandboxes._count
    trajectory = Trajectory(sandboxes)
    await trajectory.call("writes", {"stateful": False}, path="here")
    assert await trajectory.call("lists", {"stateful": False}, path="/tmp/work") == []
    assert trajectory.had == [""]
    await until(lambda: sandboxes._count == before)


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's")
async def test_a_sandbox_without_room_for_a_process_says_so(mine: Trajectory) -> None:
    error = await mine.call("where", {"processes": 2})  # bubblewrap and the supervisor
    assert error.kind == Kind.KIND_WORKER_DIED
    assert "no process could be started" in error.message


async def test_a_sandbox_that_does_not_start_says_why(
    mine: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    error = await mine.call("where")
    assert error.kind == Kind.KIND_WORKER_DIED
    assert "bubblewrap is not installed" in error.message
    monkeypatch.undo()
    mine.had = []
    assert (await mine.call("where"))["uid"] != 0
