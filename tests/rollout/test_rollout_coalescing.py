"""Reward calls that come together go in one message, and end each for itself."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from services.chassis.app import serve
from services.reward.call import fitted
from services.reward.server import RewardService, RewardSettings
from services.rollout.rewards import Coalescer
from tests.support.waiting import PATIENCE
from troupe.rpc import InvalidArgument, connect, new_id
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULE = """
import os, time
def score(x, die=False):
    if die:
        os._exit(3)
    return x * 2
def slow(x):
    time.sleep(0.06)
    return x
"""


class Counting:
    """A stub that counts its calls."""

    def __init__(self, stub: Any) -> None:
        self._stub, self.asked = stub, Counter[str]()

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            self.asked[method] += 1
            return getattr(self._stub, method)(*args, **keywords)

        return call


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Counting]:
    folder: Path = tmp_path_factory.mktemp("rewards")
    (folder / "coalesced_rewards.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    settings = RewardSettings(drain_seconds=0.2, reward_workers=1)
    try:
        async with serve(RewardService, settings) as server, connect(server.address) as channel:
            stub = Counting(RewardStub(channel))
            for name in ("score", "slow"):
                spec = reward_pb.FunctionSpec(
                    name=name,
                    entrypoint=f"coalesced_rewards:{name}",
                    timeout_seconds=PATIENCE,
                    kind="reward",
                )
                request = reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
                await stub.RegisterFunction(request)
            yield stub
    finally:
        sys.path.remove(str(folder))


def ask(name: str, arguments: str) -> reward_pb.InvokeRequest:
    return reward_pb.InvokeRequest(invocation_id=new_id(), name=name, arguments_json=arguments)


async def known_as_short(stub: Counting, coalescer: Coalescer) -> None:
    """Call `score` until the coalescer takes it for short: on a busy machine the first calls may
    not be."""
    stub.asked.clear()
    async with asyncio.timeout(PATIENCE):
        while not stub.asked["InvokeBatch"]:
            await coalescer.invoke(ask("score", '{"x": 1}'), PATIENCE)
    stub.asked.clear()


async def test_short_calls_go_together_and_fail_alone(stub: Counting) -> None:
    coalescer = Coalescer(cast("Any", stub))
    # Its duration is still unknown.
    stub.asked.clear()
    assert (await coalescer.invoke(ask("score", '{"x": 1}'), PATIENCE)).result_json == "2"
    assert stub.asked == {"Invoke": 1}
    await known_as_short(stub, coalescer)
    arguments = ['{"x": 0}', '{"x": 0, "die": true}', "[]", *(f'{{"x": {i}}}' for i in range(60))]
    answers = await asyncio.gather(
        *(coalescer.invoke(ask("score", one), PATIENCE) for one in arguments),
        return_exceptions=True,
    )
    assert stub.asked == {"InvokeBatch": 1}
    good, died, bad, *others = answers
    assert isinstance(good, reward_pb.InvokeResponse)
    assert isinstance(died, reward_pb.InvokeResponse)
    assert good.result_json == "0"
    assert died.error.kind == reward_pb.InvocationError.KIND_WORKER_DIED
    assert isinstance(bad, InvalidArgument)
    assert bad.field == "arguments_json"
    assert [one.result_json for one in others] == [str(2 * i) for i in range(60)]  # type: ignore[union-attr]


async def test_long_calls_go_alone(stub: Counting) -> None:
    coalescer = Coalescer(cast("Any", stub))
    await coalescer.invoke(ask("slow", '{"x": 1}'), PATIENCE)
    stub.asked.clear()
    await asyncio.gather(*(coalescer.invoke(ask("slow", '{"x": 1}'), PATIENCE) for _ in range(2)))
    assert stub.asked == {"Invoke": 2}


async def test_results_that_exceed_the_message_are_requested_alone(stub: Counting) -> None:
    class Crowded:
        """Has room for one result only, as messages of the service have for some megabytes."""

        def __getattr__(self, method: str) -> Any:
            return getattr(stub, method)

        async def InvokeBatch(self, request: Any, timeout: float) -> Any:
            reply = await stub.InvokeBatch(request, timeout=timeout)
            most = len(reply.responses) * 256 + reply.responses[0].ByteSize()
            monstrous = [reward_pb.InvokeResponse() for _ in reply.responses]
            for wide, one in zip(monstrous, reply.responses, strict=True):
                wide.CopyFrom(one)
                wide.result_json += " " * 1000
            return reward_pb.InvokeBatchResponse(responses=fitted(monstrous, most + 1100))

    coalescer = Coalescer(cast("Any", Crowded()))
    await known_as_short(stub, coalescer)
    answers = await asyncio.gather(
        *(coalescer.invoke(ask("score", f'{{"x": {i}}}'), PATIENCE) for i in range(4))
    )
    assert [one.result_json.strip() for one in answers] == ["0", "2", "4", "6"]
    assert stub.asked == {"InvokeBatch": 1, "Invoke": 3}
