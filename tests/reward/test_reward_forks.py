"""A process that a function starts never answers for it, at any level of confinement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from services.reward.sandboxes.manager import SandboxManager
from tests.reward.forking_functions import FORGED, TRUE, WAYS
from tests.reward.test_reward_sandboxes import Trajectory, sandboxes_of
from tests.reward.test_reward_service import Client, client_of
from tests.support.needs import BUBBLEWRAP
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
Run = Callable[..., Awaitable[Any]]
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = {"memory_mib": 0, "processes": 32, "timeout_seconds": 60}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with client_of(reward_workers=1, reward_spares=False) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[SandboxManager]:
    async with sandboxes_of() as sandboxes:
        yield sandboxes


@pytest_asyncio.fixture(
    loop_scope="module",
    params=[
        "process",
        pytest.param("bubblewrap", marks=BUBBLEWRAP),
        pytest.param("stateful", marks=BUBBLEWRAP),
    ],
)
async def run(
    request: pytest.FixtureRequest, client: Client, sandboxes: SandboxManager
) -> AsyncIterator[Run]:
    """Calls a function of `forking_functions` at one level."""
    trajectory = Trajectory(sandboxes)

    async def run(name: str, **arguments: Any) -> Any:
        fields = {**LIMITS, "entrypoint": f"forking_functions:{name}"}
        if request.param == "stateful":
            return await trajectory.call(name, fields, **arguments)
        return await client.run(name, arguments, sandbox=request.param, **fields)

    yield run
    trajectory.close()


@pytest.mark.parametrize("way", WAYS)
async def test_a_started_process_cannot_answer_for_the_function(run: Run, way: str) -> None:
    assert await run("forks", way=way) == TRUE


async def test_a_worker_serves_on_after_every_way_to_fork(client: Client) -> None:
    await client.register("forks", entrypoint="forking_functions:forks", timeout_seconds=60)
    for way in WAYS:
        for one in (way, "fork"):
            response = await client.invoke("forks", {"way": one})
            assert response.result_json == str(TRUE), (way, response.error)


async def test_a_program_that_replaces_the_function_cannot_answer(run: Run) -> None:
    error = await run("becomes_another_program")
    assert error != FORGED
    assert error.kind == Kind.KIND_WORKER_DIED
    assert await run("forks", way="fork") == TRUE


async def test_a_childs_noise_is_ignored_up_to_a_bound(run: Run) -> None:
    assert await run("floods", mib=2) == TRUE
    error = await run("floods", mib=24)
    assert error.kind == Kind.KIND_WORKER_DIED
    assert "processes that the call started wrote too much" in error.message
    assert await run("forks", way="fork") == TRUE
