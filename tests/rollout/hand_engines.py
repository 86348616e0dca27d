"""Engines that a test moves by hand, and a router over them."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.errors import EngineDied, lost_turn
from services.rollout.engines.requests import DeviceSpeed, EngineResponse, VersionSpan
from services.rollout.engines.turns import EngineTurn
from services.rollout.serving.router import PolicyRouter, StickyRoute
from tests.support.waiting import PATIENCE
from troupe.job import RoutingSpec
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

HEALTHY = common_pb.ENGINE_STATE_HEALTHY
TEN = Sampling(max_new_tokens=10)


class HandEngine(ServingEngine):
    """Answers when told to; knows what it was given."""

    kind: ClassVar[str] = "hand"

    def __init__(self, engine_id: str, device: DeviceSpeed | None = None) -> None:
        super().__init__(engine_id, "p")
        self.device = device or DeviceSpeed()
        self._state: common_pb.EngineState.ValueType = HEALTHY
        self._message = ""
        self.asked: dict[str, tuple[list[int], Sampling]] = {}
        self.held: dict[str, asyncio.Future[Any]] = {}
        self.served: list[str] = []
        self.cancelled: list[str] = []
        self.most = 0

    @property
    def state(self) -> common_pb.EngineState.ValueType:
        return self._state

    @state.setter
    def state(self, state: common_pb.EngineState.ValueType) -> None:
        self._state = state

    @property
    def message(self) -> str:
        return self._message

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        deadline_seconds: float,
    ) -> EngineResponse:
        self.held[request_id] = asyncio.get_running_loop().create_future()
        self.asked[request_id] = (prompt_ids, sampling)
        self.most = max(self.most, len(self.held))
        self.served.append(request_id)
        try:
            return await self.held[request_id]  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            del self.held[request_id]

    def answer(
        self, request_id: str, reason: Any = "stop", tokens: int = 2, version: int = 0
    ) -> None:
        self.held[request_id].set_result(drew(tokens, reason, version))

    def die(self, drawn: EngineResponse | None = None) -> None:
        self.state = common_pb.ENGINE_STATE_DEAD
        self._message = "it was told to"
        for future in self.held.values():
            if not future.done():
                error = EngineDied(self.engine_id, self.message)
                future.set_exception(lost_turn(error, drawn) if drawn else error)

    async def check(self) -> common_pb.EngineState.ValueType:
        return self.state

    async def abort(self, request_id: str) -> None: ...

    async def stop(self) -> None: ...

    async def _begin(self) -> None: ...

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        raise NotImplementedError

    def _drop(self, turn: EngineTurn) -> None: ...

    def _fail_turns(self, error: Exception) -> None: ...

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None: ...

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        return 0.0

    async def _release(self, tags: Any) -> None: ...

    async def _resume(self, tags: Any) -> None: ...


def drew(tokens: int, reason: Any, version: int = 0) -> EngineResponse:
    spans = [VersionSpan(version, 0, tokens)] if tokens else []
    return EngineResponse(
        list(range(20, 20 + tokens)), [-float(n) for n in range(tokens)], spans, reason, 0, 0.25, 1
    )


def make(
    count: int = 2, limit: int = 2, *, resume: bool = True, **routing: Any
) -> tuple[PolicyRouter, list[HandEngine]]:
    engines = [HandEngine(f"e{i}") for i in range(count)]
    spec = RoutingSpec.model_validate(routing)
    router = PolicyRouter("p", engines, limit=limit, spec=spec, resume=resume)
    return router, engines


def ask(
    router: PolicyRouter,
    name: str,
    home: StickyRoute | None = None,
    seconds: float = PATIENCE,
    prompt: int = 10,
    **kind: Any,
) -> asyncio.Task[EngineResponse]:
    return asyncio.create_task(
        router.generate(
            name, [1] * prompt, TEN, route=home or StickyRoute(), deadline_seconds=seconds, **kind
        )
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
