"""Engines that fail on command."""

from __future__ import annotations

import asyncio
import threading

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStartFailed, UpdateFailed
from services.rollout.engines.requests import EngineResponse, UpdateWave
from services.rollout.engines.turns import EngineTurn
from tests.support.waiting import PATIENCE
from troupe.job import PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb


class FragileEngine(EmbeddedEngine):
    """An embedded engine whose plug can be pulled under its turns."""

    def __init__(
        self, engine_id: str, policy: str, spec: PolicySpec, *, deterministic: bool = False
    ) -> None:
        super().__init__(engine_id, policy, spec, deterministic=deterministic)
        self.failing_starts = 0
        self.failing_updates = 0
        self.update_delay = 0.0
        self.updates: list[int] = []
        self.hanging = False
        self.absent: asyncio.Event | None = None
        # Its thread blocks once it has drawn this number of tokens, until it is released.
        self.halt_at: int | None = None
        self.halted = threading.Event()
        self.let_go = threading.Event()

    def pull_plug(self) -> None:
        """Die now, with all turns in hand."""
        self._die("the plug was pulled")

    def _drew(self, count: int) -> None:
        super()._drew(count)
        if self.halt_at is not None and self._turns._generated >= self.halt_at:
            self.halt_at = None
            self.halted.set()
            self.let_go.wait(PATIENCE)

    async def start(self) -> None:
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineStartFailed("not today", remedy="Try tomorrow.")
        if self.absent is not None:
            await self.absent.wait()
        await super().start()

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        if self.hanging:
            await asyncio.Event().wait()
        return await super()._serve(turn)

    async def update_weights(
        self, ref: common_pb.WeightsRef, transfer: Transfer, wave: UpdateWave | None = None
    ) -> float:
        if self.failing_updates:
            self.failing_updates -= 1
            raise UpdateFailed("the link broke")
        await asyncio.sleep(self.update_delay)
        exposed = await super().update_weights(ref, transfer, wave)
        self.updates.append(ref.version)
        return exposed


class Workshop:
    """Makes fragile engines and keeps them at hand, by policy."""

    def __init__(self) -> None:
        self.engines: dict[str, list[FragileEngine]] = {}

    def __call__(
        self,
        engine_id: str,
        policy_name: str,
        policy_spec: PolicySpec,
        *,
        replica: int,
        deterministic: bool,
        routed_experts: bool = False,
    ) -> FragileEngine:
        engine = FragileEngine(engine_id, policy_name, policy_spec, deterministic=deterministic)
        self.engines.setdefault(policy_name, []).append(engine)
        return engine
