"""Engines that a test moves by hand, and a router over them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from services.rollout.engines.base import (
    Device,
    EngineDied,
    EngineResponse,
    SamplingParams,
    VersionSpan,
    lost_turn,
)
from services.rollout.serving.router import PolicyRouter, StickyRoute
from troupe.job import RoutingSpec
from troupe.v1 import common_pb2 as pb

HEALTHY = pb.ENGINE_STATE_HEALTHY
TEN = SamplingParams(max_new_tokens=10)


@dataclass
class HandEngine:
    """Answers when told to; knows what it was given."""

    engine_id: str
    policy: str = "p"
    state: pb.EngineState.ValueType = HEALTHY
    message: str = ""
    device: Device = field(default_factory=Device)
    asked: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    held: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    most: int = 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
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
        self.state = pb.ENGINE_STATE_DEAD
        self.message = "it was told to"
        for future in self.held.values():
            if not future.done():
                error = EngineDied(self.engine_id, self.message)
                future.set_exception(lost_turn(error, drawn) if drawn else error)


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
    router = PolicyRouter("p", engines, limit=limit, spec=spec, resume=resume)  # type: ignore[arg-type]
    return router, engines


def ask(
    router: PolicyRouter,
    name: str,
    home: StickyRoute | None = None,
    seconds: float = 5,
    **kind: Any,
) -> asyncio.Task[EngineResponse]:
    return asyncio.create_task(
        router.generate(
            name, [1] * 10, TEN, route=home or StickyRoute(), deadline_seconds=seconds, **kind
        )
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
