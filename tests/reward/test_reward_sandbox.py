"""Untrusted code: it gets a typed error in time, and harms no other call."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.reward.test_reward_service import Client, client_of
from tests.support.needs import BUBBLEWRAP
from tests.support.sandbox_root import shown_below_tmp
from tests.support.waiting import PATIENCE, until
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    BUBBLEWRAP,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """One service, which every test leaves usable."""
    async with client_of(reward_workers=2) as client:
        yield client


@dataclass
class Caged:
    """Calls hostile functions in sandboxes: of one call each, or of one trajectory."""

    client: Client
    stateful: bool
    trajectory: str = field(default_factory=new_id)

    async def call(self, name: str, arguments: dict[str, Any] | None = None, **fields: Any) -> Any:
        """Return the function's outcome; the error if it failed."""
        settings = {"sandbox": "bubblewrap", "memory_mib": 128, "processes": 16, "disk_mib": 8}
        settings |= {"entrypoint": f"hostile_functions:{name}", "stateful": self.stateful, **fields}
        await self.client.register(name, **settings)
        ids = {"trajectory_id": self.trajectory} if self.stateful else {}
        response = await self.client.invoke(name, arguments, **ids)
        if response.HasField("error"):
            return response.error
        return json.loads(response.result_json)

    async def still_fine(self) -> None:
        """A neighbour outside, others inside, and another trajectory."""
        assert await self.client.run("score", {"answer": "4", "expected": "4"}) == 1.0
        for neighbour in (Caged(self.client, False), other := Caged(self.client, True)):
            assert (await neighbour.call("where"))["uid"] != 0
        await other.close()

    async def close(self) -> int:
        request = reward_pb.CloseTrajectoryRequest(
            request_id=new_id(), trajectory_id=self.trajectory
        )
        return (await self.client.stub.CloseTrajectory(request)).closed


@pytest_asyncio.fixture(
    params=[False, True], ids=["of one call", "of a trajectory"], loop_scope="module"
)
async def caged(client: Client, request: pytest.FixtureRequest) -> AsyncIterator[Caged]:
    caged = Caged(client, request.param)
    yield caged
    await caged.close()


async def test_a_sandbox_sees_nothing_of_the_host(
    caged: Caged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_TOKEN", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    found = await caged.call("where")
    assert found["uid"] != 0
    assert "TROUPE_TOKEN" not in found["environment"]
    own = {"work"} if caged.stateful else set()
    assert set(await caged.call("lists", {"path": "/tmp"})) == own | shown_below_tmp()
    paths = [str(secret), "/etc/shadow", "/root/.bashrc", f"/proc/{os.getppid()}/environ"]
    found = await caged.call("reads_all", {"paths": paths})
    assert all("Error" in what for what in found), found
    paths = ["/here", "/usr/here", str(Path(__file__).parent / "here"), "/tmp/here"]
    *others, private = await caged.call("writes_all", {"paths": paths})
    assert all("Error" in what for what in others), others
    assert private == "done"


async def test_a_sandbox_reaches_no_network(caged: Caged) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        place = {"host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
        error = await caged.call("connects", place)
        assert "ConnectionRefusedError" in error.message
        settings = {"entrypoint": "hostile_functions:connects", "version": "trusted"}
        assert await caged.client.run("connects", place, **settings) is None


async def test_a_fork_bomb_is_small(caged: Caged) -> None:
    children = await caged.call("fork_bomb", {"most": 500})
    assert 0 < children <= 16
    assert 0 < await caged.call("fork_bomb", {"most": 500}) <= 16
    await caged.still_fine()


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's")
async def test_memory_is_that_of_all_processes_together(caged: Caged) -> None:
    """None of them takes more than one may: 10 x 60 MiB, of 128 + 256."""
    hogs = {"mib": 60, "processes": 10}
    result = await caged.call("memory_hog", hogs, timeout_seconds=60)
    # The kernel ends whom it likes: a child, or the function itself.
    if isinstance(result, reward_pb.InvocationError):
        kind = Kind.KIND_OUT_OF_MEMORY if caged.stateful else Kind.KIND_WORKER_DIED
        assert result.kind == kind, result
    else:
        assert -9 in result
    await caged.still_fine()


async def test_memory_of_one_process(caged: Caged) -> None:
    error = await caged.call("hogs_alone", {"mib": 4000})
    assert error.kind == Kind.KIND_OUT_OF_MEMORY, error
    await caged.still_fine()


async def test_a_disk_is_full_soon(caged: Caged) -> None:
    for path in ("/tmp/big", "/dev/shm/big"):
        assert await caged.call("fills_the_disk", {"path": path, "mib": 64}) <= 8
    await caged.still_fine()


async def test_output_without_end(caged: Caged) -> None:
    error = await caged.call("shouts", {"mib": 64}, timeout_seconds=60)
    assert (error.kind, error.message) == (Kind.KIND_RAISED, "ValueError: hoarse")
    assert error.output.endswith("the last words\n")
    assert len(error.output) <= 16 << 10
    error = await caged.call("answers_too_much", {"mib": 32})
    assert error.kind in (Kind.KIND_BAD_RESULT, Kind.KIND_OUT_OF_MEMORY)
    await caged.still_fine()


@pytest.mark.slow
async def test_output_of_a_gibibyte(caged: Caged) -> None:
    error = await caged.call("shouts", {"mib": 1024}, timeout_seconds=120)
    assert (error.kind, error.message) == (Kind.KIND_RAISED, "ValueError: hoarse")
    await caged.still_fine()


async def test_a_forged_answer_is_refused(caged: Caged) -> None:
    for text in ("\xff\xff\xff\xff", "\0\0\0\2{}", '\0\0\0\x0f["ok", 1, null]'):
        error = await caged.call("forges", {"text": text}, timeout_seconds=PATIENCE)
        assert error.kind == Kind.KIND_WORKER_DIED, error
        if caged.stateful:  # a call forges none but its own
            assert (await caged.call("where"))["uid"] != 0
    await caged.still_fine()


@pytest.mark.parametrize("name", ["never_ends", "stubborn"])
async def test_a_call_that_hangs_is_ended_with_its_children(caged: Caged, name: str) -> None:
    error = await caged.call(name, timeout_seconds=0.5)
    assert (error.kind, "did not end within 0.5 s" in error.message) == (Kind.KIND_TIMEOUT, True)
    await caged.still_fine()
    assert await caged.close() == caged.stateful
    await until(lambda: all(name not in _command(process) for process in psutil.process_iter()))


def _command(process: psutil.Process) -> str:
    """Return a process's name; empty if it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


async def test_unavailable_or_contradictory_sandboxes_are_refused_when_registered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, name in (
        ({"sandbox": "castle"}, "sandbox"),
        ({"sandbox": "container"}, "image"),
        ({"stateful": True}, "stateful"),
        ({"sandbox": "bubblewrap", "writes": ["/data"]}, "writes"),
        ({"sandbox": "bubblewrap", "stateful": True, "memory_mib": 1 << 30}, "memory_mib"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await client.register("score", **settings)
        assert refused.value.field == f"function.{name}"
    monkeypatch.setenv("PATH", "/nowhere")
    for settings in ({"sandbox": "bubblewrap"}, {"sandbox": "container", "image": "python"}):
        with pytest.raises(FailedPrecondition) as missing:
            await client.register("score", **settings)
        assert (missing.value.kind, missing.value.field) == ("no_sandbox", "function.sandbox")


async def test_the_next_call_finds_a_sandbox_ready_and_empty() -> None:
    async with client_of(reward_workers=1) as client:
        caged = Caged(client, False)

        async def is_warm() -> bool:
            listed = await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())
            return any(status.warm_workers for status in listed.functions)

        async def warm() -> None:
            await until(is_warm)

        await caged.call("writes", {"path": "/tmp/here"})
        await warm()
        # Another function of the same confinement: the sandbox is there, its code is not.
        assert set(await caged.call("lists", {"path": "/tmp"})) == shown_below_tmp()
        assert (await caged.call("never_ends", timeout_seconds=0.2)).kind == Kind.KIND_TIMEOUT
        await caged.call("lists", {"path": "/tmp"})
        await warm()
        ready = await client.invoke("lists", {"path": "/tmp"})
        assert set(json.loads(ready.result_json)) == shown_below_tmp()
        assert ready.cold_start_seconds == 0.0


async def test_a_trajectory_is_told_that_its_sandbox_is_gone(client: Client) -> None:
    settings = {"entrypoint": "hostile_functions:where", "sandbox": "bubblewrap", "stateful": True}
    await client.register("where", **settings)
    first = await client.invoke("where", trajectory_id="t")
    again = await client.invoke("where", trajectory_id="t", sandboxes=[first.sandbox])
    assert first.sandbox
    assert again.sandbox == first.sandbox
    async with client_of(reward_workers=1, reward_min_workers=0) as restarted:
        await restarted.register("where", **settings)
        gone = await restarted.invoke("where", trajectory_id="t", sandboxes=[first.sandbox])
        assert (gone.error.kind, gone.sandbox) == (Kind.KIND_SANDBOX_GONE, first.sandbox)
        anew = await restarted.invoke("where", trajectory_id="t")
        assert json.loads(anew.result_json)["uid"] != 0
        with pytest.raises(InvalidArgument) as nameless:
            await restarted.invoke("where")
        assert nameless.value.field == "trajectory_id"


async def test_a_call_that_waits_for_room_can_be_cancelled_and_holds_no_worker() -> None:
    async with client_of(reward_workers=1, reward_sandboxes=1) as client:
        first, second = Caged(client, True), Caged(client, True)
        await first.call("where")
        await second.client.register(
            "where", entrypoint="hostile_functions:where", sandbox="bubblewrap", stateful=True
        )
        waits = asyncio.create_task(
            client.invoke("where", trajectory_id=second.trajectory, invocation_id="waits")
        )
        await first.call("where")  # the only worker is free
        cancel = reward_pb.CancelInvocationRequest(invocation_id="waits")
        assert (await client.stub.CancelInvocation(cancel)).cancelled
        assert (await waits).error.kind == Kind.KIND_CANCELLED
        waits = asyncio.create_task(client.invoke("where", trajectory_id=second.trajectory))
        assert await first.close() == 1
        assert json.loads((await waits).result_json)["uid"] != 0


async def test_a_call_that_waits_for_the_next_sandbox_can_be_cancelled() -> None:
    settings = {"sandbox": "bubblewrap", "memory_mib": 128, "processes": 16, "disk_mib": 8}
    async with client_of(reward_workers=1) as client, asyncio.timeout(PATIENCE):
        await client.register("naps", entrypoint="reward_functions:sleeps", **settings)
        await client.invoke("naps", {"seconds": 0})  # uses the sandbox up: the next one starts
        waits = asyncio.create_task(
            client.invoke("naps", {"seconds": 60}, invocation_id="cancelled early")
        )
        cancel = reward_pb.CancelInvocationRequest(invocation_id="cancelled early")
        while not (await client.stub.CancelInvocation(cancel)).cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await waits).error.kind == Kind.KIND_CANCELLED
        # And only that one.
        assert not (await client.invoke("naps", {"seconds": 0})).HasField("error")
