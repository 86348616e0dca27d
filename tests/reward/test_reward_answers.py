"""For every odd end of a function, its caller gets one typed error, and others get their
results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.reward.call import CallOutcome, as_reward
from tests.reward.test_reward_service import Client, client_of
from tests.support.needs import BUBBLEWRAP
from troupe.rpc import InvalidArgument, new_id
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """One worker, which every test leaves usable."""
    async with client_of(reward_workers=1, reward_cores=1) as client:
        yield client


async def run(client: Client, name: str, arguments: dict[str, Any] | None = None, **f: Any) -> Any:
    """Return the function's outcome, after checking that a neighbour in the same worker is fine."""
    found = await client.run(name, arguments, entrypoint=f"odd_functions:{name}", **f)
    assert await client.run("score", {"answer": "4", "expected": "4"}) == 1.0
    return found


@pytest.mark.parametrize("by_agent", [False, True])
async def test_a_reward_beyond_float_range_is_refused(client: Client, by_agent: bool) -> None:
    error = await run(client, "beyond_floats", {"by_agent": by_agent}, kind="reward")
    assert error.kind == Kind.KIND_BAD_RESULT
    assert "a reward is a finite number" in error.message
    found = await run(client, "beyond_floats", {"by_agent": by_agent})
    assert found == ({"solver": 10**400} if by_agent else 10**400), "a tool may say it"


@pytest.mark.parametrize("text", ["true", '"1"', "[1]", "null", '{"a": [1]}', "1" + "0" * 400])
async def test_answers_that_are_not_rewards_are_bad_results(text: str) -> None:
    outcome = as_reward(CallOutcome(text))
    assert outcome.error is not None
    assert outcome.error.kind == Kind.KIND_BAD_RESULT


@pytest.mark.parametrize("sandbox", ["process", pytest.param("bubblewrap", marks=BUBBLEWRAP)])
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("raises_mutely", {}, "_Mute"),
        ("names_a_file_of_old", {}, "FileNotFoundError: no such file: caf?.txt"),
        ("says_too_much", {"chars": 1 << 20}, "ValueError: xxx"),
        ("says_too_much", {"chars": 30 << 20}, "ValueError: xxx"),
    ],
)
async def test_an_exception_is_told_as_far_as_it_can_be(
    client: Client, sandbox: str, name: str, arguments: dict[str, Any], says: str
) -> None:
    error = await run(client, name, arguments, sandbox=sandbox)
    assert (error.kind, error.message.startswith(says)) == (Kind.KIND_RAISED, True), error
    assert len(error.message) <= 2000
    assert 0 < len(error.traceback) <= 16 << 10


async def test_arguments_that_go_too_deep_are_refused(client: Client) -> None:
    await client.register("score")
    request = reward_pb.InvokeRequest(
        invocation_id=new_id(),
        name="score",
        version=client.versions["score"],
        arguments_json='{"answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
    )
    with pytest.raises(InvalidArgument) as refused:
        await client.stub.Invoke(request)
    assert refused.value.field == "arguments_json"


async def test_a_function_that_breaks_the_import_path_does_not_affect_later_imports(
    client: Client,
) -> None:
    assert await run(client, "forgets_where_modules_are") is None


async def test_a_failed_import_costs_one_worker_only(
    client: Client,
) -> None:
    found = await client.run("missing", entrypoint="no_such_module:f")
    assert found.kind == Kind.KIND_NOT_IMPORTABLE
    worker = await client.run("pid")
    for _ in range(3):
        assert (await client.invoke("missing")).error.kind == Kind.KIND_NOT_IMPORTABLE
    assert (await client.invoke("pid")).result_json == str(worker)


@pytest.mark.parametrize("said", ["inf", "1e400", "nan", "soon"])
async def test_an_infinite_retry_time_is_ignored(client: Client, said: str) -> None:
    error = await run(client, "is_refused_for", {"after": said})
    assert error.kind == Kind.KIND_RAISED
    assert -1 <= error.retry_after_seconds < 1


@pytest.mark.parametrize("field", ["max_cores", "processes"])
async def test_more_than_any_machine_has_is_refused(client: Client, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.register("score", **{field: 2**31 - 1})
    assert refused.value.field == f"function.{field}"
    assert refused.value.remedy
