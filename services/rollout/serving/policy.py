"""One policy of one job on this worker: engines, router, target version, tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any

import structlog

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.requests import UpdateWave
from services.rollout.serving.router import PolicyRouter
from services.rollout.serving.supervision import EngineKeeper
from services.rollout.serving.weight_versions import TargetVersion, WeightFetcher
from troupe.job import EngineSpec, RoutingSpec
from troupe.rpc.errors import InvalidArgument, TroupeError
from troupe.scheduling.routing import next_wave
from troupe.scheduling.sharing import split_limit
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow.languages import Language

log = structlog.get_logger(__name__)

# Drain time at a release. Trajectories have already ended: only Generate calls are in flight.
_RELEASE_SECONDS = 2.0
# How much longer than the first attached server the others may take at the start.
_LATE_SECONDS = 2.0


async def roll_out(
    engines: Iterable[EngineKeeper], *, overlapping: bool = True, workers: int = 1
) -> float:
    """Bring all engines to their target, in waves that leave the policy serving
    (`troupe.scheduling.routing`); return the sum of exposed seconds. `workers`: rollout workers
    that do so at the same time.

    Weights that do not fit an engine are refused before any engine is changed. A failing engine is
    left to its keeper if another engine serves the target; if none does, the last error is raised.
    Engines that are down are started last, or by their keepers if another engine serves the target
    by then. Engines off their devices reach the target when they are woken.
    """
    keepers = {k.engine.engine_id: k for k in engines if k.kept and not k.off_device}
    await asyncio.gather(*(keeper.check_target() for keeper in keepers.values()))
    waiting = {engine_id for engine_id, keeper in keepers.items() if not keeper.is_down}
    down = [keeper for engine_id, keeper in keepers.items() if engine_id not in waiting]
    exposed, failure = 0.0, None

    async def load(wave: Iterable[EngineKeeper]) -> None:
        nonlocal exposed, failure
        loading = list(wave)
        together = [keeper for keeper in loading if keeper.takes_from_trainer]
        taking = UpdateWave.of(len(together), workers)
        results = await asyncio.gather(
            *(k.reach_target(taking if k in together else None) for k in loading),
            return_exceptions=True,
        )
        for keeper, result in zip(loading, results, strict=True):
            if isinstance(result, float | int):
                exposed += result
                continue
            if not isinstance(result, TroupeError):
                raise result
            engine_id = keeper.engine.engine_id
            log.error("a weight update failed", engine=engine_id, error=str(result))
            failure = result
            keeper.nudge()

    while waiting:
        wave = next_wave(
            [k.as_updating(waits=name in waiting) for name, k in keepers.items()],
            overlapping=overlapping,
        )
        waiting.difference_update(wave)
        await load(keepers[engine_id] for engine_id in wave)
    if any(keeper.serves_target for keeper in keepers.values()):
        for keeper in down:
            keeper.nudge()
    else:
        await load(down)
    if failure is not None and not any(k.serves_target for k in keepers.values()):
        raise failure
    return exposed


class ServedPolicy:
    """The engines of one policy, from their start to their stop."""

    def __init__(
        self,
        name: str,
        language: Language | None,
        engines: Sequence[ServingEngine],
        transfer: Transfer,
        spec: EngineSpec,
        ref: common_pb.WeightsRef,
        *,
        routing: RoutingSpec | None = None,
        resume: bool = True,
        overlapping: bool = True,
    ) -> None:
        """Create the policy without engines. `language`: None for a network. `resume`: whether
        turns of a lost engine keep tokens. `overlapping`: whether steps overlap, so that turns
        arrive while engines load weights."""
        self.name = name
        self._language = language
        self._target = TargetVersion(ref)
        self._fetcher = WeightFetcher(transfer)
        self._start_timeout = spec.start_timeout_seconds
        self._attached = bool(spec.urls)
        self._limit = spec.running_limit
        self._overlapping = overlapping
        # Attached engines that are still starting although the policy serves.
        self._late: set[asyncio.Task[float]] = set()
        self._keepers: dict[str, EngineKeeper] = {}
        # Keepers of engines on their way to another policy, until it lists them.
        self._leaving: dict[str, EngineKeeper] = {}
        for engine in engines:
            self.adopt(engine)
        self.router = PolicyRouter(
            name,
            engines,
            limit=spec.running_limit,
            may_serve=self._target.admits,
            spec=routing,
            resume=resume,
        )
        self.router.on_lost = self._lost_turn
        self._updating = asyncio.Lock()
        # Copies of weights to this host that engines serve already.
        self._copying: set[asyncio.Task[None]] = set()

    @property
    def language(self) -> Language:
        """Tokenizer and chat template. Raises `InvalidArgument` for a network."""
        if self._language is None:
            raise InvalidArgument(
                "is a network: it acts in its environment, and has no text",
                kind="no_language",
                field="policy",
                value=self.name,
                remedy="Ask a policy that is a language model.",
            )
        return self._language

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response that every engine serves; 0: unknown."""
        known = (keeper.engine.max_context for keeper in self._keepers.values())
        return min(filter(None, known), default=0)

    @property
    def weights(self) -> common_pb.WeightsRef:
        """The target version, which the engines serve or will soon serve."""
        return self._target.ref

    async def bring_up(self) -> None:
        """Start all engines at once and load the weights. Raises the first failure.

        Attached servers may follow later: one that serves is enough. Servers that do not answer
        within `_LATE_SECONDS` after it are brought up when they do.
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
        # Their keepers report and repair their failures.
        self._late = left
        for failure in failures:
            if isinstance(failure, BaseException):
                if not (self._attached and self.serving):
                    raise failure
                log.warning("an attached engine is missing", policy=self.name, error=str(failure))
        for keeper in self._keepers.values():
            keeper.watch()

    async def _enough(self, tasks: Sequence[asyncio.Task[float]]) -> set[asyncio.Task[float]]:
        """Wait for one engine, and `_LATE_SECONDS` for the others; return the pending tasks."""
        pending = set(tasks)
        while pending and not self.serving:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_LATE_SECONDS)
        return pending

    async def prefetch(self, ref: common_pb.WeightsRef) -> float:
        """Fetch weights to this host for a later `update`; engines continue to serve.

        Return the seconds of the transfer from another host. Raises the errors of `update`.
        """
        if not self._target.precedes(ref) or not self._keeps_any or self._have_loaded(ref):
            return 0.0
        return await self._fetcher.fetch(ref, self._target.ref)

    async def load_ahead(self, ref: common_pb.WeightsRef, workers: int = 1) -> int:
        """Have engines load the next version before its commit, from its trainer's device, all
        together; return how many did. `workers`: rollout workers that do so at the same time.

        `update` lets them serve it. Engines that cannot, or fail, are left to `update`.
        """
        async with self._updating:
            if ref.version != self._target.ref.version + 1:
                return 0
            keepers = [one for one in self._keepers.values() if one.may_load_ahead(ref)]
            wave = UpdateWave.of(len(keepers), workers)
            results = await asyncio.gather(
                *(keeper.load_ahead(ref, wave) for keeper in keepers), return_exceptions=True
            )
        for keeper, result in zip(keepers, results, strict=True):
            if isinstance(result, TroupeError):
                engine_id = keeper.engine.engine_id
                log.warning("not loaded before its commit", engine=engine_id, error=str(result))
                keeper.nudge()
            elif isinstance(result, BaseException):
                raise result
        return sum(result is True for result in results)

    def _have_loaded(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether all engines that this worker keeps have loaded `ref` before its commit."""
        kept = [keeper.engine for keeper in self._keepers.values() if keeper.kept]
        return bool(kept) and all(engine.awaits(ref) for engine in kept)

    async def update(self, ref: common_pb.WeightsRef, workers: int = 1) -> float:
        """Bring the engines to `ref`, in waves; return the sum of exposed seconds. `workers`:
        rollout workers that do so at the same time.

        Repeatable. If no engine accepts the new weights, the policy stays at the former version and
        the error is raised. Raises `FailedPrecondition` for an older version or another checksum
        (`TargetVersion.precedes`).
        """
        async with self._updating:
            former = self._target.ref
            if not self._target.precedes(ref):
                served = any(keeper.serves_target for keeper in self._keepers.values())
                # A version that they have loaded was not committed.
                if not served or any(one.engine.ahead for one in self._keepers.values()):
                    await self._roll_out(workers)
                return 0.0
            if self._have_loaded(ref):
                # Only restarts need a copy on this host.
                self._copy_later(ref, former)
            elif self._keeps_any:
                # Fetched first: an engine that restarts meanwhile loads the former version.
                await self._fetcher.fetch(ref, former)
            self._target.ref, self._target.rolling = ref, True
            try:
                return await self._roll_out(workers)
            except BaseException:
                if not any(keeper.serves_target for keeper in self._keepers.values()):
                    self._target.ref = former
                raise
            finally:
                self._target.rolling = False
                self.router.wake()

    def _copy_later(self, ref: common_pb.WeightsRef, former: common_pb.WeightsRef) -> None:
        """Fetch weights to this host while engines serve them already."""

        async def fetch() -> None:
            try:
                await self._fetcher.fetch(ref, former)
            except TroupeError as error:  # a restart tries again
                log.warning("weights were not copied", policy=self.name, error=str(error))

        task = asyncio.create_task(fetch(), name=f"copy-{ref.key}")
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)

    async def _roll_out(self, workers: int) -> float:
        keepers = self._keepers.values()
        return await roll_out(keepers, overlapping=self._overlapping, workers=workers)

    def share(self, engine_id: str, server: rollout_pb.SharedServer) -> None:
        """Keep an engine whose server other workers also use, or follow its keeper.

        Repeatable; no effect for an engine of another policy.
        """
        if (keeper := self._keepers.get(engine_id)) is None:
            return
        verified = (server.version, server.checksum) if server.HasField("version") else None
        keeper.share(kept=server.kept, vouched=verified, alone=server.workers <= 1)
        places = {str(number): 1.0 for number in range(max(1, server.workers))}
        self.router.set_limit(engine_id, split_limit(self._limit, places)[str(server.place)])

    async def follow(self) -> None:
        """Let engines whose servers others keep serve the target, if they have it.

        One that fails is left to its keeper here.
        """
        followed = [keeper for keeper in self._keepers.values() if not keeper.kept]
        results = await asyncio.gather(
            *(keeper.reach_target() for keeper in followed), return_exceptions=True
        )
        for keeper, result in zip(followed, results, strict=True):
            if isinstance(result, TroupeError):
                log.warning("not followed", engine=keeper.engine.engine_id, error=str(result))
                keeper.nudge()
            elif isinstance(result, BaseException):
                raise result
        self.router.wake()

    @property
    def _keeps_any(self) -> bool:
        return any(keeper.kept for keeper in self._keepers.values())

    async def sleep(self) -> None:
        """Take the engines off their devices until `wake`. Repeatable.

        Raises the error of an engine that keeps its memory; the others then sleep.
        """
        async with self._updating:
            await wait_for_all(keeper.sleep() for keeper in self._keepers.values())

    async def wake(self) -> None:
        """Bring the engines back to their devices and to the target. Repeatable.

        An engine that fails is left to its keeper if another one serves; if none does, the error is
        raised.
        """
        async with self._updating:
            try:
                await wait_for_all(keeper.wake() for keeper in self._keepers.values())
            except TroupeError as error:
                if not any(keeper.serves_target for keeper in self._keepers.values()):
                    raise
                log.error("an engine did not wake", policy=self.name, error=str(error))
            finally:
                self.router.wake()

    def retarget(self, ref: common_pb.WeightsRef) -> None:
        """Replace the target without a check, because the job is prepared anew (after a resume)."""
        self._target.ref = ref

    @property
    def serving_engines(self) -> list[ServingEngine]:
        """Engines to which turns may go now."""
        return [keeper.engine for keeper in self._keepers.values() if keeper.may_serve]

    @property
    def serving(self) -> int:
        """Number of engines to which turns may go now."""
        return sum(keeper.may_serve for keeper in self._keepers.values())

    def keeper(self, engine_id: str) -> EngineKeeper | None:
        """Return the keeper of an engine; None for an engine that leaves or belongs to another
        policy."""
        return self._keepers.get(engine_id)

    def part_with(self, engine_id: str) -> ServingEngine:
        """Begin to take an engine away: no new turns, no updates, no restarts.

        It stays listed with this policy until `forget`.
        """
        self.router.remove(engine_id)
        self.set_aside(engine_id)
        return self._leaving[engine_id].engine

    def set_aside(self, engine_id: str) -> None:
        """Stop updating and restarting an engine that has no turns here, until `forget`. No effect
        for an engine of another policy, or one that is already set aside."""
        if (keeper := self._keepers.pop(engine_id, None)) is not None:
            self._leaving[engine_id] = keeper
            keeper.retire()

    def forget(self, engine_id: str) -> None:
        """Remove an engine from this policy's list. Repeatable."""
        for keepers in (self._keepers, self._leaving):
            if (keeper := keepers.pop(engine_id, None)) is not None:
                keeper.retire()

    def adopt(self, engine: ServingEngine) -> EngineKeeper:
        """Add an engine to this policy; it gets no turns before `open_to_turns`."""
        keeper = EngineKeeper(
            engine,
            self._target,
            self._fetcher,
            start_timeout=self._start_timeout,
            on_change=lambda: self.router.wake(),
        )
        self._keepers[engine.engine_id] = keeper
        return keeper

    def open_to_turns(self, engine_id: str) -> None:
        """Route turns to an adopted engine whenever it serves, and start watching it."""
        keeper = self._keepers[engine_id]
        self.router.add(keeper.engine)
        keeper.watch()
        keeper.nudge()

    def statuses(self, job_id: str, worker_id: str) -> list[rollout_pb.EngineStatus]:
        """Return one status per engine, including leaving ones, in order of their ids."""
        keepers = {**self._keepers, **self._leaving}
        return [keepers[engine_id].status(job_id, worker_id) for engine_id in sorted(keepers)]

    def load(self, job_id: str, worker_id: str) -> rollout_pb.PolicyLoad:
        """Return the policy's backlog and number of serving engines, as heartbeats report them."""
        backlog = self.router.backlog
        return rollout_pb.PolicyLoad(
            job_id=job_id,
            policy=self.name,
            worker_id=worker_id,
            waiting=backlog.waiting,
            in_flight=backlog.in_flight,
            outstanding_tokens=backlog.outstanding_tokens,
            engines=self.serving,
        )

    async def release(self, reason: str) -> None:
        """Refuse new turns, let the others end within `_RELEASE_SECONDS`, and stop the engines.
        Repeatable."""
        self.router.close(reason)
        await _cancel(self._late)
        await _cancel(self._copying)
        keepers = (*self._keepers.values(), *self._leaving.values())
        await asyncio.gather(
            *(keeper.stop(reason, _RELEASE_SECONDS) for keeper in keepers), return_exceptions=True
        )

    def _lost_turn(self, engine_id: str) -> None:
        # Not an engine that leaves: its turns may still fail, but it is not restarted here.
        if (keeper := self._keepers.get(engine_id)) is not None:
            keeper.nudge()


async def wait_for_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all parts concurrently; raise the first error after all have ended."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in (ending := list(tasks)):
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
