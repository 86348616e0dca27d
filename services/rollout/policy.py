"""One policy of one job as this worker serves it: tokenizer, engines, queue, target version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from services.rollout.engines.base import Engine
from services.rollout.router import PolicyRouter
from services.rollout.supervision import EngineKeeper, Target
from services.rollout.tokenizers import Language
from services.rollout.weights import check_successor, roll_out
from troupe.job import EngineSpec, RoutingSpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout

log = structlog.get_logger(__name__)


class ServedPolicy:
    """Owns the engines of a policy from their start to their stop."""

    def __init__(
        self,
        name: str,
        language: Language,
        engines: Sequence[Engine],
        transfer: Transfer,
        spec: EngineSpec,
        ref: pb.WeightsRef,
        *,
        routing: RoutingSpec | None = None,
        resume: bool = True,
    ) -> None:
        """`resume`: turns that lose their engine go on from their tokens."""
        self.name = name
        self.language = language
        self._target = Target(ref)
        keepers = [
            EngineKeeper(
                engine,
                self._target,
                transfer,
                start_timeout=spec.start_timeout_seconds,
                on_change=self._engine_changed,
            )
            for engine in engines
        ]
        self._keepers = {keeper.engine.engine_id: keeper for keeper in keepers}
        self.router = PolicyRouter(
            name,
            engines,
            limit=spec.max_running,
            may_serve=lambda engine: self._keepers[engine.engine_id].may_serve,
            spec=routing,
            resume=resume,
        )
        self.router.on_lost = lambda engine_id: self._keepers[engine_id].nudge()
        self._updating = asyncio.Lock()

    @property
    def weights(self) -> pb.WeightsRef:
        """What the engines serve, or are being brought to."""
        return self._target.ref

    async def bring_up(self) -> None:
        """Start all engines at once and load the weights. Raises what the first failure raises."""
        results = await asyncio.gather(
            *(keeper.reach_target() for keeper in self._keepers.values()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for keeper in self._keepers.values():
            keeper.watch()

    async def update(self, ref: pb.WeightsRef) -> float:
        """Bring the engines to `ref`, one after another; returns exposed seconds, summed.

        Harmless when they are there already. When no engine takes the new weights the policy
        stays at the former ones and the error is raised.
        """
        async with self._updating:
            former = self._target.ref
            if not check_successor(former, ref):
                if not any(keeper.serves_target for keeper in self._keepers.values()):
                    await roll_out(list(self._keepers.values()))
                return 0.0
            self._target.ref, self._target.rolling = ref, True
            try:
                return await roll_out(list(self._keepers.values()))
            except BaseException:
                if not any(keeper.serves_target for keeper in self._keepers.values()):
                    self._target.ref = former
                raise
            finally:
                self._target.rolling = False
                self.router.wake()

    def retarget(self, ref: pb.WeightsRef) -> None:
        """Accept `ref` as the truth, whatever was served before (the job is prepared anew)."""
        self._target.ref = ref

    def statuses(self, job_id: str, worker_id: str) -> list[rollout.EngineStatus]:
        """One per engine, in order of their ids."""
        return [keeper.status(job_id, worker_id) for keeper in self._keepers.values()]

    async def release(self, reason: str) -> None:
        """Refuse turns and stop the engines. Repeatable."""
        self.router.close(reason)
        await asyncio.gather(
            *(keeper.stop() for keeper in self._keepers.values()), return_exceptions=True
        )

    def _engine_changed(self) -> None:
        self.router.wake()
