"""An engine that gives the replies of a test, with log-probs and versions like a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.turns import EngineTurn
from troupe.job import PolicySpec
from troupe.v1 import common_pb2 as common_pb

VOCABULARY = 128


@dataclass
class Script:
    """Responses of engines: `speak(prompt ids)` returns one; `hold` keeps turns back."""

    speak: Callable[[list[int]], list[int]]
    hold: asyncio.Event | None = None
    asked: list[list[int]] = field(default_factory=list)
    aborted: int = 0

    def make(
        self, engine_id: str, policy_name: str, policy_spec: PolicySpec, **options: Any
    ) -> ScriptedEngine:
        """A `MakeEngine` of tests/rollout/house.py."""
        return ScriptedEngine(self, engine_id, policy_name, policy_spec)


class ScriptedEngine(ServingEngine):
    """Answers from a `Script`; the n-th token of a response has the log-prob -n / 10."""

    kind: ClassVar[str] = "embedded"

    def __init__(self, script: Script, engine_id: str, policy: str, spec: PolicySpec) -> None:
        super().__init__(engine_id, policy)
        self._script = script
        self._context = spec.engine.max_context or 2048

    async def _begin(self) -> None:
        self.vocabulary, self.max_context = VOCABULARY, self._context
        self.eos_ids = frozenset({2})

    async def check(self) -> common_pb.EngineState.ValueType:
        return self.state

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError("nothing here aborts by id")

    async def stop(self) -> None:
        self._life.stopped()

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        self._script.asked.append(turn.prompt_ids)
        if self._script.hold is not None:
            await self._script.hold.wait()
        else:
            await asyncio.sleep(0)
        for number, token in enumerate(self._script.speak(turn.prompt_ids), 1):
            if turn.remaining:
                turn.append(token, -number / 10, self.version or 0)
                if token in turn.stop_ids:
                    break
        return turn.result()

    def _drop(self, turn: EngineTurn) -> None:
        self._script.aborted += 1

    def _fail_turns(self, error: Exception) -> None: ...

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None: ...

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        return 0.0

    async def _release(self, tags: Any) -> None: ...

    async def _resume(self, tags: Any) -> None: ...
