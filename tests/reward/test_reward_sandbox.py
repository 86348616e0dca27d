"""Code that is not to be trusted: it gets a typed error in time, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.reward.test_reward_service import Client, client_of
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import reward_pb2 as pb

Kind = pb.InvocationError
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """One service, which every test leaves usable."""
    async with client_of(reward_workers=2) as client:
        yield client


async def caged(client: Client, name: str, arguments: dict[str, Any], **fields: Any) -> Any:
    """What the function made of it in a sandbox; the error if it failed."""
    settings = {"sandbox": "bubblewrap", "memory_mib": 128, "processes": 16, "disk_mib": 8}
    settings |= {"entrypoint": f"hostile_functions:{name}", **fields}
    return await client.run(name, arguments, **settings)


async def still_fine(client: Client) -> None:
    """A neighbour outside, and another inside."""
    assert await client.run("score", {"answer": "4", "expected": "4"}) == 1.0
    assert (await caged(client, "where", {}))["uid"] == 65534


async def test_it_sees_nothing_of_the_host(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_TOKEN", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    found = await caged(client, "where", {})
    assert found["uid"] == 65534
    assert "TROUPE_TOKEN" not in found["environment"]
    assert await caged(client, "lists", {"path": "/tmp"}) == []
    for path in (str(secret), "/etc/shadow", "/root/.bashrc", f"/proc/{os.getppid()}/environ"):
        error = await caged(client, "reads", {"path": path})
        assert (error.kind, "Error" in error.message) == (Kind.KIND_RAISED, True)
    for path in ("/here", "/usr/here", str(Path(__file__).parent / "here")):
        error = await caged(client, "writes", {"path": path})
        assert "OSError" in error.message or "PermissionError" in error.message
    assert await caged(client, "writes", {"path": "/tmp/here"}) is None


async def test_it_reaches_no_network(client: Client) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await caged(client, "connects", {"host": "127.0.0.1", "port": port})
        assert "ConnectionRefusedError" in error.message
        outside = {"host": "127.0.0.1", "port": port}
        settings = {"entrypoint": "hostile_functions:connects", "version": "trusted"}
        assert await client.run("connects", outside, **settings) is None


async def test_a_fork_bomb_is_small(client: Client) -> None:
    children = await caged(client, "fork_bomb", {"most": 500})
    assert 0 < children <= 16
    await still_fine(client)


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are root's")
async def test_memory_is_that_of_all_processes_together(client: Client) -> None:
    """None of them takes more than one may: 10 x 60 MiB, of 128 + 256."""
    result = await caged(client, "memory_hog", {"mib": 60, "processes": 10}, timeout_seconds=60)
    # The kernel ends whom it likes: a child, or the function itself.
    if isinstance(result, pb.InvocationError):
        assert result.kind == Kind.KIND_WORKER_DIED
    else:
        assert -9 in result
    await still_fine(client)


async def test_a_disk_is_full_soon(client: Client) -> None:
    for path in ("/tmp/big", "/dev/shm/big"):
        assert await caged(client, "fills_the_disk", {"path": path, "mib": 64}) <= 8
    await still_fine(client)


async def test_output_without_end(client: Client) -> None:
    error = await caged(client, "shouts", {"mib": 64}, timeout_seconds=60)
    assert (error.kind, error.message) == (Kind.KIND_RAISED, "ValueError: hoarse")
    assert error.output.endswith("the last words\n")
    assert len(error.output) <= 16 << 10
    error = await caged(client, "answers_too_much", {"mib": 32})
    assert error.kind in (Kind.KIND_BAD_RESULT, Kind.KIND_OUT_OF_MEMORY)
    await still_fine(client)


async def test_an_answer_that_was_forged_is_none(client: Client) -> None:
    for text in ("\xff\xff\xff\xff", "\0\0\0\2{}", '\0\0\0\x0f["ok", 1, null]'):
        error = await caged(client, "forges", {"text": text}, timeout_seconds=30)
        assert error.kind == Kind.KIND_WORKER_DIED
    await still_fine(client)


@pytest.mark.parametrize("name", ["never_ends", "stubborn"])
async def test_what_does_not_end_is_ended_with_all_that_it_started(
    client: Client, name: str
) -> None:
    error = await caged(client, name, {}, timeout_seconds=1)
    assert (error.kind, "did not end within 1 s" in error.message) == (Kind.KIND_TIMEOUT, True)
    await still_fine(client)
    deadline = time.monotonic() + 20
    while any(name in _command(process) for process in psutil.process_iter()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def _command(process: psutil.Process) -> str:
    """What a process calls itself; nothing if it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


async def test_a_sandbox_that_is_none_or_not_here_is_refused_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument) as unknown:
        await client.register("score", sandbox="castle")
    assert unknown.value.field == "function.sandbox"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FailedPrecondition) as missing:
        await client.register("score", sandbox="bubblewrap")
    assert (missing.value.kind, missing.value.field) == ("no_sandbox", "function.sandbox")
