"""Sandboxes that run elsewhere: a provider without this host's files, processes or descriptors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.reward.sandboxes.kinds import PROVIDERS, open_providers
from services.reward.sandboxes.manager import SandboxGone, SandboxLimits, SandboxManager
from tests.reward.test_reward_sandbox_forging import ATTACK
from tests.reward.test_reward_sandboxes import Trajectory
from tests.reward.test_reward_service import client_of
from tests.support.needs import BUBBLEWRAP
from tests.support.remote_sandboxes import KIND, SocketProvider, sandbox_service
from troupe.functions import validation
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import reward_pb2 as reward_pb

pytestmark = BUBBLEWRAP

Kind = reward_pb.InvocationError
REMOTE = {"sandbox": KIND}
FUNCTIONS = Path(__file__).parent.with_name("hostile_functions.py")


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of the service of sandboxes, whose kind is registered."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    with sandbox_service(place) as port:
        monkeypatch.setitem(PROVIDERS, KIND, SocketProvider)
        monkeypatch.setattr(SocketProvider, "port", port)
        monkeypatch.setattr(validation, "SANDBOXES", (*validation.SANDBOXES, KIND))
        yield port


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Uploaded source, which cannot be opened elsewhere by its path."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "hostile_functions.py").write_text(FUNCTIONS.read_text())
    (folder / "honest.py").write_text("import csv\n\ndef says():\n    return csv.QUOTE_ALL\n")
    return folder


@contextlib.asynccontextmanager
async def sandboxes_elsewhere() -> AsyncIterator[SandboxManager]:
    sandboxes = SandboxManager(SandboxLimits(), 60, open_providers())
    try:
        yield sandboxes
    finally:
        await sandboxes.stop()


async def test_a_remote_sandbox_keeps_files_and_isolates_trajectories(
    port: int, source: Path
) -> None:
    async with sandboxes_elsewhere() as sandboxes:
        mine, other = Trajectory(sandboxes, source), Trajectory(sandboxes, source)
        assert await mine.call("writes", REMOTE, path="/tmp/work/here") is None
        assert await mine.call("reads", REMOTE, path="/tmp/work/here") == "here"
        assert await other.call("lists", REMOTE, path="/tmp/work") == []
        error = await other.call("reads", REMOTE, path=str(source / "honest.py"))
        assert "FileNotFoundError" in error.message


async def test_a_remote_sandbox_answers_only_for_the_function(port: int, source: Path) -> None:
    async with sandboxes_elsewhere() as sandboxes:
        mine = Trajectory(sandboxes, source)
        attacks = {**REMOTE, "entrypoint": "hostile_functions:runs"}
        assert await mine.call("runs", attacks, code=ATTACK, arguments=["20"]) == "[]"
        assert await mine.call("attacks_its_supervisor", REMOTE) == ["PermissionError"] * 3
        # Files that a call writes next to uploaded code are never imported.
        forged = ["/tmp/source/honest.py", "/tmp/troupe/csv.py"]
        assert await mine.call("writes_all", REMOTE, paths=forged) == ["done"] * 2
        says = {**REMOTE, "entrypoint": "honest:says"}
        assert await mine.call("says", says) == 1


async def test_a_timeout_in_a_remote_sandbox_ends_the_call_alone(port: int, source: Path) -> None:
    async with sandboxes_elsewhere() as sandboxes:
        mine = Trajectory(sandboxes, source)
        await mine.call("writes", REMOTE, path="here")
        for name in ("never_ends", "stubborn"):
            error = await mine.call(name, {**REMOTE, "timeout_seconds": 0.5})
            assert error.kind == Kind.KIND_TIMEOUT
        assert await mine.call("reads", REMOTE, path="here") == "here"


async def test_the_loss_of_a_remote_sandbox_is_reported(port: int, source: Path) -> None:
    async with sandboxes_elsewhere() as sandboxes:
        mine = Trajectory(sandboxes, source)
        # It has started: bubblewrap's second process outlives a first one that is killed before.
        await mine.call("writes", REMOTE, path="here")
        running = asyncio.create_task(mine.call("waits_for", REMOTE, path="never"))
        await mine.until_busy()
        for process in psutil.process_iter():
            if _is_supervisor_of(process, source):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        assert (await running).kind in (Kind.KIND_SANDBOX_GONE, Kind.KIND_WORKER_DIED)
        with pytest.raises(SandboxGone):
            await mine.call("where", REMOTE)


def _is_supervisor_of(process: psutil.Process, source: Path) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        words = process.cmdline()
        ours = str(source.parent / "elsewhere")
        return "troupe/supervisor.py" in words and any(ours in word for word in words)
    return False


async def test_a_service_that_is_not_there_fails_the_call(
    port: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SocketProvider, "port", 1)
    async with sandboxes_elsewhere() as sandboxes:
        error = await Trajectory(sandboxes, source).call("where", REMOTE)
    assert error.kind == Kind.KIND_WORKER_DIED
    assert "its sandbox did not start" in error.message


async def test_a_registered_kind_serves_calls_of_the_service(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[Any] = [reward_pb.SourceFile(path="rule.py", content=b"def score(x): return x + 5")]
    async with client_of(reward_workers=1) as client:
        request = reward_pb.UploadSourceRequest(request_id=new_id(), files=files)
        uploaded = await client.stub.UploadSource(request)
        fields = {"entrypoint": "rule:score", "source_sha256": uploaded.sha256}
        assert await client.run("score", {"x": 1}, **REMOTE, **fields) == 6
        with pytest.raises(InvalidArgument, match="is not a sandbox"):
            await client.register("score", sandbox="elsewhere", **fields)
        monkeypatch.setattr(SocketProvider, "port", 0)
        with pytest.raises(FailedPrecondition, match="no service of sandboxes"):
            await client.register("score", version="another", **REMOTE, **fields)
