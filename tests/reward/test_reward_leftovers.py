"""`sandbox: process`: whatever a call leaves in its worker, the next call finds none of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.reward.careless_functions import BROKEN, HARMLESS, MENDED
from tests.reward.test_reward_service import Client, client_of
from tests.support.processes import runs
from tests.support.waiting import until
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """A service with one worker at a time."""
    async with client_of(reward_workers=1, reward_cores=1) as client:
        for name in ("state", "its_pid", "breaks", "keeps", "scores_later"):
            await client.register(name, entrypoint=f"careless_functions:{name}")
        for name, seconds in (("leaves", 60), ("leaves_late", 4)):
            entrypoint = "careless_functions:leaves"
            await client.register(name, entrypoint=entrypoint, timeout_seconds=seconds)
        yield client


async def call(client: Client, name: str, **arguments: Any) -> Any:
    response = await client.invoke(name, arguments)
    if response.WhichOneof("outcome") == "error":
        return response.error
    return json.loads(response.result_json)


async def ended(pid: int) -> None:
    await until(lambda: not runs(pid))


@pytest.mark.parametrize("what", [*MENDED, *HARMLESS, *BROKEN])
async def test_the_next_call_finds_its_process_as_it_was(client: Client, what: str) -> None:
    before, worker = await call(client, "state"), await call(client, "its_pid")
    assert await call(client, "breaks", what=what) == 0.5
    same = await call(client, "its_pid") == worker
    assert same == (what not in BROKEN)
    assert await call(client, "scores_later") == 0.25
    assert await call(client, "state") == before


@pytest.mark.parametrize("more", [{}, {"session": False}, {"deep": True}, {"ends": "raises"}])
async def test_a_process_that_a_call_leaves_ends_with_it(
    client: Client, more: dict[str, Any]
) -> None:
    worker = await call(client, "its_pid")
    left = await call(client, "leaves", **more)
    pid = left if isinstance(left, int) else int(left.message.rpartition(" ")[2])
    assert not psutil.pid_exists(pid)
    assert await call(client, "its_pid") != worker


@pytest.mark.parametrize("deep", [False, True])
async def test_a_process_ends_with_a_call_that_took_too_long(
    client: Client, tmp_path: Path, deep: bool
) -> None:
    path = tmp_path / "pid"
    error = await call(client, "leaves_late", ends="hangs", deep=deep, path=str(path))
    assert error.kind == Kind.KIND_TIMEOUT
    await ended(int(path.read_text()))


async def test_a_function_may_declare_that_its_processes_serve_later_calls(client: Client) -> None:
    worker = await call(client, "its_pid")
    kept = await call(client, "keeps")
    assert await call(client, "breaks", what="folder") == 0.5
    assert await call(client, "keeps") == kept
    assert await call(client, "its_pid") == worker
    assert await call(client, "breaks", what="open") == 0.5  # it ends with the worker
    assert not psutil.pid_exists(kept)
    assert await call(client, "keeps") != kept


async def test_builtins_that_a_module_replaces_do_not_affect_other_functions(
    client: Client,
) -> None:
    worker = await client.run("pid")
    memory = {"memory_mib": 512}
    assert await client.run("scores", entrypoint="patching_functions:scores", **memory) == 0.5
    assert await client.run("score", {"answer": "4", "expected": "5"}, **memory) == 0.0
    found = await client.run("score_later", {"answer": "abc"})
    assert found == {"solver": 3, "details": [1, None, "x"]}
    error = await client.run("not_json")
    assert error.kind == Kind.KIND_BAD_RESULT
    assert (await client.invoke("pid")).result_json == str(worker), "one worker answered them all"
