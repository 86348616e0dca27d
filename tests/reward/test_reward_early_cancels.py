"""A call that is cancelled before its executor has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from services.chassis.telemetry import Telemetry
from services.reward.call import CallOutcome, FunctionCall
from services.reward.cgroups import CoreLease
from services.reward.function import RegisteredFunction
from services.reward.host import FunctionHost
from services.reward.runtime import Runtime
from tests.support.places import BarePlace
from tests.support.waiting import PATIENCE, until
from troupe.v1 import reward_pb2 as reward_pb

CANCELLED = reward_pb.InvocationError.KIND_CANCELLED


class NappingPlace(BarePlace):
    """A place whose calls end when cancelled, like a worker's, even in their first step."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        self.cancelled.clear()
        self.ran += 1
        await self.cancelled.wait()
        yield (
            0,
            CallOutcome(error=reward_pb.InvocationError(kind=CANCELLED, message="while it ran")),
        )


async def test_in_the_moment_in_which_it_is_given_away() -> None:
    place = NappingPlace()
    runtime = Runtime([FunctionHost("", [place])], Telemetry())
    await runtime.dispatcher.start()
    function = RegisteredFunction(reward_pb.FunctionSpec(name="naps", timeout_seconds=60))
    (ended,) = runtime.submit([("early", FunctionCall("{}"))], function)
    assert runtime.cancel("early")
    async with asyncio.timeout(PATIENCE):
        assert (await ended).error.kind == CANCELLED
    assert place.ran == 0
    # The place is as good as before.
    (later,) = runtime.submit([("later", FunctionCall("{}"))], function)
    await until(lambda: place.ran)
    assert runtime.cancel("later")
    async with asyncio.timeout(PATIENCE):
        assert (await later).error.message == "while it ran"
    await runtime.stop()


class SlowModels:
    """One that comes to its devices when `there` is set."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.loaded = 0

    async def ready(self, name: str) -> str:
        await self.there.wait()
        self.loaded += 1
        return f"http://{name}"

    async def stop(self) -> None: ...


async def test_while_its_model_is_brought_to_devices() -> None:
    place, models = NappingPlace(), SlowModels()
    as_models: Any = models
    host = FunctionHost("", [place], models=as_models)
    function = RegisteredFunction(
        reward_pb.FunctionSpec(name="judges", model_service="judge", timeout_seconds=60)
    )
    taken, lease = host.take(function, 0)

    async def run() -> list[CallOutcome]:
        return [
            outcome
            async for _, outcome in host.run_many(taken, function, [FunctionCall("{}")], lease)
        ]

    running = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    host.cancel(taken)
    async with asyncio.timeout(PATIENCE):
        (outcome,) = await running
    assert outcome.error is not None
    assert outcome.error.kind == CANCELLED
    assert place.ran == 0
    host.give_back(taken, lease)
    # The next call that needs the model finds it.
    models.there.set()
    await asyncio.sleep(0.01)
    assert models.loaded == 1
    await host.stop()
