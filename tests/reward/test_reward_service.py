"""One result or one typed error for every invocation, whatever the function does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import pytest_asyncio

from services.chassis.app import serve
from services.reward.server import RewardService, RewardSettings
from tests.support.waiting import PATIENCE, until
from troupe.functions.validation import MAX_PATHS, MAX_SECONDS
from troupe.rpc import (
    NO_RETRY,
    AlreadyExists,
    ClientSettings,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    connect,
    new_id,
)
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

Kind = reward_pb.InvocationError
SECONDS = ("timeout_seconds", "expected_seconds", "idle_seconds", "sandbox_idle_seconds")
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Client:
    """Registers and invokes functions of `reward_functions`; the version follows the settings."""

    def __init__(self, stub: RewardAsyncStub, address: str) -> None:
        self.stub, self.address = stub, address
        self.versions: dict[str, str] = {}

    async def register(self, name: str, **fields: Any) -> None:
        fields = {"entrypoint": f"reward_functions:{name}", "timeout_seconds": PATIENCE, **fields}
        version = fields.pop("version", str(fields))
        spec = reward_pb.FunctionSpec(name=name, version=version, **fields)
        request = reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
        await self.stub.RegisterFunction(request)
        self.versions[name] = version

    async def invoke(
        self, name: str, arguments: dict[str, Any] | None = None, **fields: Any
    ) -> reward_pb.InvokeResponse:
        request = reward_pb.InvokeRequest(
            invocation_id=fields.pop("invocation_id", new_id()),
            name=name,
            version=self.versions.get(name, ""),
            arguments_json=json.dumps(arguments or {}),
            **fields,
        )
        return await self.stub.Invoke(request)

    async def until_running(self, name: str, running: int, queued: int = 0) -> None:
        """Wait until these numbers of a function's invocations run and wait."""
        async with asyncio.timeout(PATIENCE):
            while True:
                status = await self.stub.ListFunctions(reward_pb.ListFunctionsRequest())
                known = {one.function.version: one for one in status.functions}
                one = known[self.versions[name]]
                if (one.running, one.queued) == (running, queued):
                    return
                await asyncio.sleep(0.01)

    async def run(self, name: str, arguments: dict[str, Any] | None = None, **fields: Any) -> Any:
        """Register and invoke; returns the result, or the error."""
        await self.register(name, **fields)
        response = await self.invoke(name, arguments)
        if response.WhichOneof("outcome") == "error":
            return response.error
        return json.loads(response.result_json)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """One service for all tests that leave it usable, as any invocation must."""
    async with client_of(reward_workers=2) as client:
        yield client


@contextlib.asynccontextmanager
async def client_of(**settings: Any) -> AsyncIterator[Client]:
    given = RewardSettings(drain_seconds=0.2, **settings)
    async with serve(RewardService, given) as server, connect(server.address) as channel:
        yield Client(RewardStub(channel), server.address)


async def test_results_of_sync_and_async_functions(client: Client) -> None:
    assert await client.run("score", {"answer": "4", "expected": "4"}) == 1.0
    assert await client.run("score_later", {"answer": "abc"}) == {
        "solver": 3,
        "details": [1, None, "x"],
    }
    assert await client.run("numpy_numbers") == {"a": 0.5, "b": [0, 1, 2], "c": True}


@pytest.mark.parametrize(
    ("name", "fields", "kind", "says"),
    [
        ("raises", {}, Kind.KIND_RAISED, "ValueError: this answer cannot be scored"),
        ("exits", {}, Kind.KIND_RAISED, "SystemExit: 3"),
        ("recurses", {}, Kind.KIND_RAISED, "RecursionError"),
        ("score", {}, Kind.KIND_RAISED, "missing 2 required positional arguments"),
        ("hangs", {"timeout_seconds": 0.3}, Kind.KIND_TIMEOUT, "did not end within 0.3 s"),
        ("dies", {}, Kind.KIND_WORKER_DIED, "exited with status 7"),
        ("is_killed", {}, Kind.KIND_WORKER_DIED, "killed by SIGKILL"),
        ("nothing_finite", {}, Kind.KIND_BAD_RESULT, "nan"),
        ("numpy_nan", {}, Kind.KIND_BAD_RESULT, "nan"),
        ("not_json", {}, Kind.KIND_BAD_RESULT, "object is not JSON"),
        ("huge", {}, Kind.KIND_BAD_RESULT, "16,777,216 at most"),
        ("missing", {}, Kind.KIND_NOT_IMPORTABLE, "has no attribute 'missing'"),
        ("not_a_function", {}, Kind.KIND_NOT_IMPORTABLE, "is a int, not a function"),
        (
            "elsewhere",
            {"entrypoint": "no_such_module:f"},
            Kind.KIND_NOT_IMPORTABLE,
            "No module named 'no_such_module'",
        ),
    ],
)
async def test_every_bad_end_is_one_typed_error(
    client: Client, name: str, fields: dict[str, Any], kind: int, says: str
) -> None:
    error = await client.run(name, **fields)
    assert error.kind == kind, error
    assert says in error.message
    # The worker, or its successor, continues.
    assert await client.run("score", {"answer": "", "expected": ""}) == 1.0


async def test_a_reward_is_a_number_or_numbers(client: Client) -> None:
    for end, told in (("none", "returned nothing"), ("nan", "nan")):
        error = await client.run("mixed", {"i": 1, "end": end}, kind="reward")
        assert (error.kind, told in error.message) == (Kind.KIND_BAD_RESULT, True), error
    error = await client.run("prints", kind="reward")
    assert error.message.endswith('the function returned "done"')
    error = await client.run("numpy_numbers", kind="reward")
    assert error.kind == Kind.KIND_BAD_RESULT, "a list is no number"
    assert await client.run("mixed", {"i": 7, "end": ""}, kind="reward") == 7


async def test_the_author_sees_his_own_traceback(client: Client) -> None:
    error = await client.run("raises")
    assert "in raises" in error.traceback
    assert "worker.py" not in error.traceback


async def test_memory_is_limited_relative_to_the_worker(client: Client) -> None:
    error = await client.run("eats_memory", {"mib": 300}, memory_mib=100)
    assert error.kind == Kind.KIND_OUT_OF_MEMORY
    assert error.message == "needed more than 100 MiB"
    response = await client.invoke("eats_memory", {"mib": 20})
    assert json.loads(response.result_json) == 20 * 2**20


async def test_bad_requests_are_refused_with_field_and_remedy(client: Client) -> None:
    with pytest.raises(NotFound) as missing:
        await client.invoke("unknown")
    assert missing.value.kind == "function_not_found"
    await client.register("score")
    await client.register("score")
    with pytest.raises(AlreadyExists):
        await client.register("score", timeout_seconds=1, version=client.versions["score"])
    for field, value in (
        ("entrypoint", "score"),
        ("timeout_seconds", math.nan),
        ("timeout_seconds", 0),
        ("memory_mib", -1),
        ("expected_seconds", math.nan),
        ("expected_seconds", -1),
        *((name, value) for name in SECONDS for value in (1e308, math.inf, MAX_SECONDS + 1)),
        ("seconds_per", {"two words": 1.0}),
        ("reads", ["/etc"] * (MAX_PATHS + 1)),
        ("parameters_json", json.dumps({"description": "x" * 2**18})),
        ("seconds_per", {f"a{i}": 1.0 for i in range(17)}),
        ("seconds_per.tests", {"tests": 1e308}),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await client.register("other", **{field.partition(".")[0]: value})
        assert refused.value.field == f"function.{field}"
        assert refused.value.remedy
    for text in ("[1]", "{"):
        request = reward_pb.InvokeRequest(
            invocation_id=new_id(),
            name="score",
            version=client.versions["score"],
            arguments_json=text,
        )
        with pytest.raises(InvalidArgument) as refused:
            await client.stub.Invoke(request)
        assert refused.value.field == "arguments_json"
    with pytest.raises(InvalidArgument):
        await client.invoke("score", invocation_id="")


async def test_an_invocation_id_runs_once(client: Client, tmp_path: Path) -> None:
    await client.register("stamps")
    log = tmp_path / "log"
    order = {"path": str(log), "seconds": 0.2}
    first, joined = await asyncio.gather(
        *(client.invoke("stamps", order, invocation_id="runs once") for _ in range(2))
    )
    again = await client.invoke("stamps", order, invocation_id="runs once")
    assert first == joined == again
    assert log.read_text() == "ran\n"
    with pytest.raises(AlreadyExists):
        await client.invoke("stamps", {"path": "other"}, invocation_id="runs once")


async def test_work_goes_on_without_its_caller_if_it_runs_and_not_if_it_waits(
    client: Client, tmp_path: Path
) -> None:
    await client.register("stamps", max_concurrency=1)
    runs, waits = tmp_path / "runs", tmp_path / "waits"
    running = {"path": str(runs), "seconds": 0.5}
    calls = [
        asyncio.create_task(client.invoke("stamps", running, invocation_id="alone")),
        asyncio.create_task(client.invoke("stamps", {"path": str(waits)}, invocation_id="left")),
    ]
    await until(runs.exists)
    for call in calls:
        call.cancel()
    response = await client.invoke("stamps", running, invocation_id="alone")
    assert response.result_json == "1.0"
    assert runs.read_text() == "ran\n"
    assert not waits.exists()


async def test_cancel_waiting_and_running(client: Client, tmp_path: Path) -> None:
    await client.register("stamps", max_concurrency=1)
    log = tmp_path / "log"
    calls = [
        asyncio.create_task(
            client.invoke("stamps", {"path": str(log), "seconds": 30}, invocation_id=key)
        )
        for key in ("runs", "waits")
    ]
    await until(log.exists)
    for key in ("waits", "runs"):
        response = await client.stub.CancelInvocation(
            reward_pb.CancelInvocationRequest(invocation_id=key)
        )
        assert response.cancelled
    for call in calls:
        assert (await call).error.kind == Kind.KIND_CANCELLED
    gone = await client.stub.CancelInvocation(
        reward_pb.CancelInvocationRequest(invocation_id="runs")
    )
    assert not gone.cancelled
    assert await client.run("pid") > 0


async def test_priority_and_max_concurrency(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with client_of(reward_workers=1) as client:
        await client.register("waits")
        await client.register("score", max_concurrency=1)
        order: list[str] = []

        async def call(tag: str, priority: int) -> None:
            await client.invoke("waits", {"path": str(gate), "tag": tag}, priority=priority)
            order.append(tag)

        tasks = [asyncio.create_task(call("first", 0))]
        await client.until_running("waits", 1)
        late = (("low", -1), ("high", 5), ("high too", 5), ("middle", 1))
        for queued, (tag, priority) in enumerate(late, 1):
            tasks.append(asyncio.create_task(call(tag, priority)))
            await client.until_running("waits", 1, queued)
        gate.touch()
        await asyncio.gather(*tasks)
        assert order == ["first", "high", "high too", "middle", "low"]


async def test_one_functions_limit_leaves_workers_to_others(client: Client) -> None:
    await client.register("sleeps", max_concurrency=1, timeout_seconds=120)
    await client.register("pid")
    version = client.versions["sleeps"]
    slow = [
        asyncio.create_task(
            client.invoke("sleeps", {"seconds": 60}, priority=9, invocation_id=f"slow {i}")
        )
        for i in range(3)
    ]
    await client.until_running("sleeps", 1, 2)
    # Another worker is started for it, since the one that is there is busy for long.
    await client.invoke("pid")
    status = await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())
    sleeps = next(f for f in status.functions if f.function.version == version)
    assert (sleeps.running, sleeps.queued) == (1, 2)
    assert status.pool.workers == status.pool.max_workers == 2
    for i in (2, 1, 0):
        await client.stub.CancelInvocation(
            reward_pb.CancelInvocationRequest(invocation_id=f"slow {i}")
        )
    await asyncio.gather(*slow)
    await client.invoke("sleeps", {"seconds": 0.1})
    status = await client.stub.ListFunctions(reward_pb.ListFunctionsRequest())
    sleeps = next(f for f in status.functions if f.function.version == version)
    assert (sleeps.invocations, sleeps.errors, sleeps.running, sleeps.queued) == (4, 3, 0, 0)
    assert sleeps.mean_seconds >= 0.1 / 4


async def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    async with client_of(reward_workers=1, reward_max_queued=2) as client:
        await client.register("waits")
        gate = tmp_path / "gate"
        held = {"path": str(gate)}
        calls = [asyncio.create_task(client.invoke("waits", held)) for _ in range(2)]
        await client.until_running("waits", 1, 1)
        version = client.versions["waits"]
        request = reward_pb.InvokeRequest(invocation_id="x", name="waits", version=version)
        async with connect(client.address, ClientSettings(retry=NO_RETRY)) as channel:
            with pytest.raises(ResourceExhausted) as full:
                await RewardStub(channel).Invoke(request)
        assert full.value.retry_after_ms
        gate.touch()
        await client.invoke("waits", held)  # repeats until there is room
        await asyncio.gather(*calls)


async def test_edited_code_is_not_run_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "edited_by_user.py"
    source.write_text("def reward():\n    return 1\n")
    async with client_of(reward_workers=1) as client:
        assert await client.run("old", entrypoint="edited_by_user:reward") == 1
        source.write_text("def reward():\n    return 22\n")
        assert await client.run("new", entrypoint="edited_by_user:reward") == 22
        source.write_text("def reward():\n    return 333\n")  # and the job is prepared again
        assert await client.run("new", entrypoint="edited_by_user:reward") == 333


async def test_workers_are_light_and_die_with_the_service() -> None:
    async with client_of(reward_workers=1) as client:
        modules = await client.run("loaded_modules")
        assert not {"torch", "grpc", "transformers"} & set(modules)
        worker = psutil.Process(await client.run("pid"))
        await client.register("sleeps")
        busy = asyncio.create_task(client.invoke("sleeps", {"seconds": 60}))
        await client.until_running("sleeps", 1)
    busy.cancel()
    _, alive = psutil.wait_procs([worker], timeout=PATIENCE)
    assert not alive


async def test_hundreds_of_invocations_at_once(client: Client) -> None:
    await client.register("score")
    answers = [{"answer": "a", "expected": "ab"[i % 2]} for i in range(400)]
    responses = await asyncio.gather(*(client.invoke("score", one) for one in answers))
    assert [json.loads(one.result_json) for one in responses] == [1.0, 0.0] * 200


async def test_a_deadline_ends_the_wait(client: Client) -> None:
    await client.register("sleeps")
    request = reward_pb.InvokeRequest(
        invocation_id=new_id(),
        name="sleeps",
        version=client.versions["sleeps"],
        arguments_json='{"seconds": 2}',
    )
    with pytest.raises(DeadlineExceeded):
        await client.stub.Invoke(request, timeout=0.2)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e308, 1e-320])
async def test_a_share_that_no_job_can_have_is_refused(client: Client, weight: float) -> None:
    await client.register("score")
    with pytest.raises(InvalidArgument, match="not a number from 1e-06 to 1e") as caught:
        await client.invoke("score", weight=weight)
    assert caught.value.field == "weight"


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 1e308])
async def test_an_invalid_expected_time_is_refused(client: Client, seconds: float) -> None:
    await client.register("score")
    arguments = {"answer": "4", "expected": "4"}
    with pytest.raises(InvalidArgument, match="not a number of seconds") as caught:
        await client.invoke("score", arguments, expected_seconds=seconds)
    assert caught.value.field == "expected_seconds"
    told = await client.invoke("score", arguments, expected_seconds=3.0)
    assert json.loads(told.result_json) == 1.0
