"""One policy of one job as this worker serves it: tokenizer, engines, queue, target version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from services.rollout.engines.base import ServingEngine
from services.rollout.serving.router import PolicyRouter
from services.rollout.serving.supervision import EngineKeeper, Target
from services.rollout.serving.weight_fetch import WeightFetcher
from troupe.job import EngineSpec, RoutingSpec
from troupe.rpc.errors import FailedPrecondition, InvalidArgument, TroupeError
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow.languages import Language

log = structlog.get_logger(__name__)


def check_successor(current: pb.WeightsRef, new: pb.WeightsRef) -> bool:
    """Whether `new` is to be loaded: False for the version that is served already.

    Raises `FailedPrecondition` for an older version, or for the same one with other content: a
    version names one checksum.
    """
    if new.version == current.version:
        if new.checksum != current.checksum:
            raise FailedPrecondition(
                f"version {new.version} of policy '{new.policy}' is known with checksum "
                f"{current.checksum}",
                kind="version_conflict",
                field="weights.checksum",
                value=new.checksum,
                remedy="Publish changed weights under a new version.",
            )
        return False
    if new.version < current.version:
        raise FailedPrecondition(
            f"policy '{new.policy}' is at version {current.version} already",
            kind="version_stale",
            field="weights.version",
            value=new.version,
            remedy="Ask for the newest version, or prepare the job again.",
        )
    return True


async def roll_out(keepers: Sequence[EngineKeeper]) -> float:
    """Bring each engine to its target, the living ones first; returns exposed seconds, summed.

    Weights that do not fit one of them are refused before the first is touched. An engine that
    fails is left to its keeper when another one serves the target; when none does, the error of the
    last is raised. Engines that sleep are brought to the target once they are woken.
    """
    keepers = [keeper for keeper in keepers if not keeper.engine.asleep]
    for keeper in keepers:
        await keeper.accepts_target()
    exposed, failure = 0.0, None
    for keeper in sorted(keepers, key=lambda k: k.is_down):
        if keeper.is_down and any(k.serves_target for k in keepers):
            keeper.nudge()
            continue
        try:
            exposed += await keeper.reach_target()
        except TroupeError as error:
            log.error("a weight update failed", engine=keeper.engine.engine_id, error=str(error))
            failure = error
            keeper.nudge()
    if failure is not None and not any(k.serves_target for k in keepers):
        raise failure
    return exposed


# Trajectories have been ended before: what is still in flight are people's own generations.
_RELEASE_SECONDS = 2.0
# What attached servers that are up already may take longer than the first of them.
_LATE_SECONDS = 2.0


class ServedPolicy:
    """Owns the engines of a policy from their start to their stop."""

    def __init__(
        self,
        name: str,
        language: Language | None,
        engines: Sequence[ServingEngine],
        transfer: Transfer,
        spec: EngineSpec,
        ref: pb.WeightsRef,
        *,
        routing: RoutingSpec | None = None,
        resume: bool = True,
    ) -> None:
        """`language`: None for a network. `resume`: turns that lose their engine go on from their
        tokens."""
        self.name = name
        self._language = language
        self._target = Target(ref)
        self._arrivals = WeightFetcher(transfer)
        self._start_timeout = spec.start_timeout_seconds
        self._attached = bool(spec.urls)
        # Engines that still come up although the policy serves.
        self._late: set[asyncio.Task[float]] = set()
        self._keepers: dict[str, EngineKeeper] = {}
        # Engines that are being taken away, with their keepers, until they are somebody else's.
        self._leaving: dict[str, EngineKeeper] = {}
        for engine in engines:
            self.adopt(engine)
        self.router = PolicyRouter(
            name,
            engines,
            limit=spec.max_running,
            may_serve=lambda engine: self._keepers[engine.engine_id].may_serve,
            spec=routing,
            resume=resume,
        )
        self.router.on_lost = self._lost_turn
        self._updating = asyncio.Lock()

    @property
    def language(self) -> Language:
        """How its tokens are read and written. Raises `InvalidArgument` where it is a network."""
        if self._language is None:
            raise InvalidArgument(
                "is a network: it moves in its environment, and knows no text",
                kind="no_language",
                field="policy",
                value=self.name,
                remedy="Ask a policy that is a language model.",
            )
        return self._language

    @property
    def weights(self) -> pb.WeightsRef:
        """What the engines serve, or are being brought to."""
        return self._target.ref

    async def bring_up(self) -> None:
        """Start all engines at once and load the weights. Raises what the first failure raises.

        Attached servers may come later: one that serves is enough, and those that do not answer
        within moments of it are brought up when they do.
        """
        tasks = [asyncio.create_task(k.reach_target()) for k in self._keepers.values()]
        try:
            left = await self._enough(tasks) if self._attached else set()
            failures = await asyncio.gather(
                *(task for task in tasks if task not in left), return_exceptions=True
            )
        except BaseException:
            await _cancel(tasks)
            raise
        # Their failures are told, and mended, by who watches them.
        self._late = left
        for failure in failures:
            if isinstance(failure, BaseException):
                if not (self._attached and self.serving):
                    raise failure
                log.warning("an attached engine is missing", policy=self.name, error=str(failure))
        for keeper in self._keepers.values():
            keeper.watch()

    async def _enough(self, tasks: Sequence[asyncio.Task[float]]) -> set[asyncio.Task[float]]:
        """Wait until one engine serves and the others had a moment more; returns who is late."""
        pending = set(tasks)
        while pending and not self.serving:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_LATE_SECONDS)
        return pending

    async def prefetch(self, ref: pb.WeightsRef) -> float:
        """Bring weights to this host, which `update` will load; engines serve on meanwhile.

        Returns the seconds that it took from another host. Raises as `update` does.
        """
        if not check_successor(self._target.ref, ref):
            return 0.0
        return await self._arrivals.bring(ref)

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
            # Before it is the target: an engine that restarts meanwhile gets the former one.
            await self._arrivals.bring(ref)
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

    @property
    def serving_engines(self) -> list[ServingEngine]:
        """Those to which turns may go now."""
        return [keeper.engine for keeper in self._keepers.values() if keeper.may_serve]

    @property
    def serving(self) -> int:
        """Engines to which turns may go now."""
        return sum(keeper.may_serve for keeper in self._keepers.values())

    def keeper(self, engine_id: str) -> EngineKeeper | None:
        """Who looks after an engine of this policy; None for one that leaves, or is none of its."""
        return self._keepers.get(engine_id)

    def part_with(self, engine_id: str) -> ServingEngine:
        """An engine is taken away: no new turns go there, nobody updates or restarts it.

        It stays among the policy's engines until `forget`.
        """
        self.router.remove(engine_id)
        self.set_aside(engine_id)
        return self._leaving[engine_id].engine

    def set_aside(self, engine_id: str) -> None:
        """Nobody updates or restarts an engine that has no turns here, until `forget`. Without
        effect for one that is none of this policy's, or set aside already."""
        if (keeper := self._keepers.pop(engine_id, None)) is not None:
            self._leaving[engine_id] = keeper
            keeper.retire()

    def forget(self, engine_id: str) -> None:
        """An engine is none of this policy's any more. Repeatable."""
        for keepers in (self._keepers, self._leaving):
            if (keeper := keepers.pop(engine_id, None)) is not None:
                keeper.retire()

    def adopt(self, engine: ServingEngine) -> EngineKeeper:
        """An engine becomes one of this policy's; it gets no turns before `open_to_turns`."""
        keeper = EngineKeeper(
            engine,
            self._target,
            self._arrivals,
            start_timeout=self._start_timeout,
            on_change=self._engine_changed,
        )
        self._keepers[engine.engine_id] = keeper
        return keeper

    def open_to_turns(self, engine_id: str) -> None:
        """From now on turns may go to an adopted engine, whenever it serves; it is looked after."""
        keeper = self._keepers[engine_id]
        self.router.add(keeper.engine)
        keeper.watch()
        keeper.nudge()

    def statuses(self, job_id: str, worker_id: str) -> list[rollout.EngineStatus]:
        """One per engine, those that leave included, in order of their ids."""
        keepers = {**self._keepers, **self._leaving}
        return [keepers[engine_id].status(job_id, worker_id) for engine_id in sorted(keepers)]

    def load(self, job_id: str, worker_id: str) -> rollout.PolicyLoad:
        """What there is to do."""
        backlog = self.router.backlog
        return rollout.PolicyLoad(
            job_id=job_id,
            policy=self.name,
            worker_id=worker_id,
            waiting=backlog.waiting,
            in_flight=backlog.in_flight,
            outstanding_tokens=backlog.outstanding_tokens,
            engines=self.serving,
        )

    async def release(self, reason: str) -> None:
        """Refuse turns, let those in flight end for a moment, stop the engines. Repeatable."""
        self.router.close(reason)
        await _cancel(self._late)
        keepers = (*self._keepers.values(), *self._leaving.values())
        await asyncio.gather(
            *(keeper.stop(reason, _RELEASE_SECONDS) for keeper in keepers), return_exceptions=True
        )

    def _lost_turn(self, engine_id: str) -> None:
        # One that leaves may still fail turns; nobody brings it back here.
        if (keeper := self._keepers.get(engine_id)) is not None:
            keeper.nudge()

    def _engine_changed(self) -> None:
        self.router.wake()


async def _cancel(tasks: Iterable[asyncio.Task[float]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
