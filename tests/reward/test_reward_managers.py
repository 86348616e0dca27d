"""Quotas, models and waiters as a caller of the service meets them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.chassis.app import serve
from services.reward.hosts.agent import RewardHost
from services.reward.server import RewardService
from services.reward.settings import RewardSettings
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE, until
from troupe.rpc import DeadlineExceeded, InvalidArgument, connect, new_id
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

Kind = reward_pb.InvocationError
HERE = Path(__file__).parent


class Client:
    def __init__(self, stub: Any, address: str) -> None:
        self.stub, self.address = stub, address

    async def register(self, name: str, **fields: Any) -> None:
        fields = {
            "entrypoint": f"managed_functions:{fields.pop('of', name)}",
            "timeout_seconds": PATIENCE,
            "version": "1",
            **fields,
        }
        spec = reward_pb.FunctionSpec(name=name, **fields)
        request = reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
        await self.stub.RegisterFunction(request)

    async def queued(self) -> int:
        response = await self.stub.ListFunctions(reward_pb.ListFunctionsRequest())
        queued: int = response.pool.queued
        return queued

    async def invoke(
        self, name: str, timeout: float = PATIENCE, waiters: int = 1, **arguments: Any
    ) -> reward_pb.InvokeResponse:
        request = reward_pb.InvokeRequest(
            invocation_id=new_id(),
            name=name,
            version="1",
            arguments_json=json.dumps(arguments),
            waiters=waiters,
        )
        response: reward_pb.InvokeResponse = await self.stub.Invoke(request, timeout=timeout)
        return response


@asynccontextmanager
async def service(**settings: Any) -> AsyncIterator[Client]:
    made = RewardSettings(drain_seconds=1, **{"reward_workers": 2, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        async with (
            serve(RewardService, made) as server,
            connect(server.address, server.settings.client()) as channel,
        ):
            yield Client(RewardStub(channel), server.address)


def moments(log: Path) -> list[float]:
    return [float(line.split()[1]) for line in log.read_text().splitlines()]


async def test_a_used_up_quota_keeps_its_calls_and_nobody_elses(tmp_path: Path) -> None:
    # A further unit takes longer than all of the test may.
    async with service(reward_quotas={"api": {"rate": 0.0001, "burst": 2}}) as client:
        await client.register("limited", of="notes", quota="api")
        await client.register("free", of="notes")
        log = str(tmp_path / "log")
        begun = [await client.invoke("limited", path=log) for _ in range(2)]
        assert all(answer.result_json for answer in begun)
        # Far more than there are workers, and all of them before the one that passes.
        waiting = [
            asyncio.create_task(client.invoke("limited", timeout=3600, path=log)) for _ in range(60)
        ]

        async def all_wait() -> bool:
            return await client.queued() == 60

        await until(all_wait)
        assert (await client.invoke("free", path=log)).result_json
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        async def told() -> bool:
            """The reason, given a second before the call's deadline, arrives in time."""
            calls = (client.invoke("limited", timeout=10, path=log) for _ in range(60))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            # On a busy machine a second may be too short, though not for ever.
            in_time = [one for one in answers if not isinstance(one, DeadlineExceeded)]
            for answer in in_time:
                assert isinstance(answer, reward_pb.InvokeResponse)
                assert answer.error.kind == Kind.KIND_QUOTA_EXHAUSTED
                assert "the quota api is used up" in answer.error.message
            return bool(in_time)

        await until(told)
        assert len(moments(tmp_path / "log")) == 3
        with pytest.raises(InvalidArgument, match="between 1 and 2 units of 'api'"):
            await client.register("greedy", of="notes", quota="api", quota_units=3)


async def test_calls_at_once_are_bounded_over_services(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    shared = {"redis_url": redis.url, "reward_quotas": {"api": {"concurrency": 1}}}
    try:
        async with service(**shared) as one, service(**shared) as other:
            log = tmp_path / "log"
            for client in (one, other):
                await client.register("notes", quota="api")
            calls = [c.invoke("notes", path=str(log), seconds=0.1) for c in (one, other) * 2]
            answers = await asyncio.gather(*calls)
            assert all(answer.result_json for answer in answers)
            at = sorted(moments(log))
            assert min(b - a for a, b in pairwise(at)) >= 0.1
    finally:
        redis.kill()


async def test_retry_after_shuts_the_quota_and_the_call_is_done_later(tmp_path: Path) -> None:
    async with service(reward_quotas={"api": {"concurrency": 4}}) as client:
        await client.register("refused_once", quota="api", retries=1)
        log = tmp_path / "log"
        answer = await client.invoke("refused_once", path=str(log))
        assert json.loads(answer.result_json) == "done"
        assert answer.attempts == 2
        first, second = moments(log)
        assert second - first >= 0.39


async def test_a_refused_call_that_may_not_repeat_reports_when_to_retry() -> None:
    async with service(reward_quotas={"api": {"concurrency": 4}}) as client:
        await client.register("refused", quota="api")
        error = (await client.invoke("refused", after="0.01")).error
        assert error.kind == Kind.KIND_QUOTA_EXHAUSTED
        assert error.retry_after_seconds == pytest.approx(0.01)
        await client.register("unlimited", of="refused")
        error = (await client.invoke("unlimited", date_in=30)).error
        assert error.kind == Kind.KIND_RAISED
        assert 20 < error.retry_after_seconds <= 31
        assert (await client.invoke("unlimited")).error.retry_after_seconds == -1


async def test_calls_with_more_waiters_run_first_and_none_waits_for_ever(tmp_path: Path) -> None:
    async with service(reward_workers=1) as client:
        await client.register("notes")
        await client.register("held")
        log = tmp_path / "log"
        busy = asyncio.create_task(client.invoke("held", path=str(tmp_path / "go")))
        calls = [
            asyncio.create_task(client.invoke("notes", waiters=n, path=str(log), what=f"w{n}"))
            for n in (1, 4, 16, 2)
        ]

        async def all_queue() -> bool:
            return await client.queued() == 4

        await until(all_queue)
        (tmp_path / "go").touch()
        await asyncio.gather(busy, *calls)
        order = [line.split()[0] for line in log.read_text().splitlines()]
        assert order == ["w16", "w4", "w2", "w1"]


def served(log: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "model_server.py"), "{port}", str(log), *options]
    return {"command": command, "start_seconds": PATIENCE}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own host", "another host"])
async def test_a_call_finds_its_model_on_devices(tmp_path: Path, elsewhere: bool) -> None:
    models: dict[str, Any] = {
        "reward_gpus": 1,
        "reward_models": {
            "a": served(tmp_path / "a"),
            "b": served(tmp_path / "b", "refuse=1"),
        },
    }
    own: dict[str, Any] = (
        {"reward_workers": 0, "reward_host_expected_seconds": 0} if elsewhere else models
    )
    async with service(**own) as client:
        if not elsewhere:
            await uses_models(client, tmp_path)
            return
        host = RewardSettings(
            reward_address=client.address, reward_min_workers=0, drain_seconds=1, **models
        )
        async with serve(RewardHost, host) as running:
            async with asyncio.timeout(PATIENCE):
                await running.service.attached.wait()  # type: ignore[union-attr]
            await uses_models(client, tmp_path)


async def uses_models(client: Client, logs: Path) -> None:
    for name in "ab":
        await client.register(name, of="looks_at_model", model_service=name, min_workers=1)
    urls = [json.loads((await client.invoke(name)).result_json) for name in "aab"]
    assert urls[0] == urls[1] != urls[2]
    # Alternately: each evicts the other, and "b" fails once to come back.
    answers = [await client.invoke(name) for name in "abb"]
    assert [answer.HasField("error") for answer in answers] == [False, True, False]
    assert answers[1].error.kind == Kind.KIND_MODEL_UNAVAILABLE
    assert "b did not come back: 500" in answers[1].error.message
    assert (logs / "a").read_text().split()[::2] == ["start", "release", "resume", "release"]
    # Together: one after the other, and neither for ever.
    both = await asyncio.gather(*(client.invoke(name) for name in "ababab"))
    assert not any(answer.HasField("error") for answer in both)
    with pytest.raises(InvalidArgument, match="none has more than 0"):
        await client.register("c", of="looks_at_model", model_service="c")


@pytest.mark.parametrize("after", ["1e12", "86401", "inf", "nan", "-5", "soon", "9" * 400])
async def test_an_absurd_wait_shuts_nobody_out(tmp_path: Path, after: str) -> None:
    async with service(reward_quotas={"api": {"concurrency": 4}}) as client:
        await client.register("refused", quota="api")
        error = (await client.invoke("refused", after=after)).error
        assert error.kind == Kind.KIND_QUOTA_EXHAUSTED
        assert error.retry_after_seconds < 1
        await client.register("refused_once", quota="api")
        (tmp_path / "log").touch()
        async with asyncio.timeout(PATIENCE):
            answer = await client.invoke("refused_once", path=str(tmp_path / "log"))
        assert json.loads(answer.result_json) == "done"
