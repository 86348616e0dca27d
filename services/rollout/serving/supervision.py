"""Keeps one engine alive and at its policy's weights.

An engine that died is started again with growing pauses, comes up STALE, gets the policy's target
version, is verified, and only then serves: the same road as at its first start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from services.rollout.engines.base import ServingEngine
from services.rollout.serving.weight_fetch import WeightFetcher, gone
from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer import Corrupt, KeyNotFound
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout

log = structlog.get_logger(__name__)

# Often enough to notice a hung engine within a few turns, seldom enough to cost nothing.
PROBE_SECONDS = 1.0
# A probe that takes this long counts as missed, whatever the engine thinks.
PROBE_TIMEOUT_SECONDS = 20.0
# The first restart is immediate, since most deaths are single accidents; then the pauses double.
RESTART_PAUSE_SECONDS = 0.5
RESTART_PAUSE_SECONDS_MAX = 30.0

_DOWN = (pb.ENGINE_STATE_STARTING, pb.ENGINE_STATE_DEAD)


@dataclass(slots=True)
class Target:
    """The weights that all engines of a policy should serve.

    While they are being rolled out (`rolling`) engines that still have the former version go on
    serving; afterwards an engine that missed the update serves nothing until it has caught up.
    """

    ref: pb.WeightsRef
    rolling: bool = False


class EngineKeeper:
    """Probes, restarts and updates one engine. Everything that changes it goes through here."""

    def __init__(
        self,
        engine: ServingEngine,
        target: Target,
        arrivals: WeightFetcher,
        *,
        start_timeout: float,
        on_change: Callable[[], None],
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        """`on_change` is called whenever the engine may have begun to serve."""
        self.engine = engine
        self._target = target
        self._arrivals = arrivals
        self._start_timeout = start_timeout
        self._on_change = on_change
        self._probe_seconds = probe_seconds
        self._lock = asyncio.Lock()
        self._nudge = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._retired = False

    @property
    def busy(self) -> bool:
        """Whether the engine is being started or updated."""
        return self._lock.locked()

    @property
    def serves_target(self) -> bool:
        """Whether the engine takes turns with the weights that it should have."""
        ref = self._target.ref
        return self.engine.state == pb.ENGINE_STATE_HEALTHY and (
            self.engine.version,
            self.engine.checksum,
        ) == (ref.version, ref.checksum)

    @property
    def may_serve(self) -> bool:
        """Whether turns may go to the engine now."""
        if self._target.rolling:
            return self.engine.state == pb.ENGINE_STATE_HEALTHY
        return self.serves_target

    @property
    def is_down(self) -> bool:
        """Whether the engine must be started before it can be updated."""
        return self.engine.state in _DOWN

    async def reach_target(self) -> float:
        """Start the engine if it is down, update it if it is not at the target.

        Returns the seconds in which it could not serve because of the update. Repeating is
        harmless; a retired keeper does nothing. Raises what the engine raises, or `Unavailable`
        when it did not start in time.
        """
        async with self._lock:
            engine = self.engine
            if self._retired:
                return 0.0
            if self.is_down:
                try:
                    async with asyncio.timeout(self._start_timeout):
                        await engine.start()
                except TimeoutError as error:
                    raise Unavailable(
                        f"engine {engine.engine_id} did not start within {self._start_timeout:g} s",
                        kind="engine_start_timeout",
                        field=f"policies.{engine.policy}.engine.start_timeout_seconds",
                        remedy="Raise it, or look at the engine's log.",
                    ) from error
            if self.serves_target:
                return 0.0
            # The reference is read once: a target that moves meanwhile gets an update of its own.
            ref = self._target.ref
            await self._arrivals.bring(ref)
            exposed = await self._load(ref)
        self._on_change()
        return exposed

    async def accepts_target(self) -> None:
        """Raise `WeightsRefused` when the target cannot fit the engine; changes nothing."""
        if self.is_down or self.serves_target:
            return
        ref = self._target.ref
        await self._arrivals.bring(ref)
        with _published_again(ref):
            await self.engine.accepts(ref, self._arrivals.transfer)

    async def _load(self, ref: pb.WeightsRef) -> float:
        with _published_again(ref):
            return await self.engine.update_weights(ref, self._arrivals.transfer)

    def watch(self) -> None:
        """Begin to look after the engine."""
        if self._watch is None and not self._retired:
            self._watch = asyncio.create_task(
                self._look_after(), name=f"watch-{self.engine.engine_id}"
            )

    def nudge(self) -> None:
        """Look at the engine now: it failed a turn."""
        self._nudge.set()

    def retire(self) -> None:
        """Touch the engine no more: it leaves the policy. Repeatable."""
        self._retired = True
        if self._watch is not None:
            self._watch.cancel()

    async def stop(self, reason: str, drain_seconds: float) -> None:
        """Stop watching; let the engine end its turns, within `drain_seconds`, and stop it."""
        self.retire()
        if self._watch is not None:
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.engine.state == pb.ENGINE_STATE_HEALTHY:
            await self.engine.drain(reason, deadline_seconds=drain_seconds)
        await self.engine.stop()

    def status(self, job_id: str, worker_id: str) -> rollout.EngineStatus:
        """What the engine is and does now."""
        engine, load = self.engine, self.engine.load()
        return rollout.EngineStatus(
            engine_id=engine.engine_id,
            job_id=job_id,
            policy=engine.policy,
            kind=engine.kind,
            state=engine.state,
            version=engine.version,
            checksum=engine.checksum,
            running=load.running,
            waiting=load.waiting,
            generated_tokens=load.generated_tokens,
            tokens_per_second=load.tokens_per_second,
            worker_id=worker_id,
            message=engine.message,
            restarts=engine.restarts,
            device_class=engine.device.device_class,
            prefill_tokens_per_second=engine.device.prefill_tokens_per_second,
            decode_tokens_per_second=engine.device.decode_tokens_per_second,
        )

    async def _look_after(self) -> None:
        pause = 0.0
        while True:
            try:
                async with asyncio.timeout(pause or self._probe_seconds):
                    await self._nudge.wait()
            except TimeoutError:
                pass
            self._nudge.clear()
            try:
                pause = await self._inspect(pause)
            except Exception:
                # The watch outlives its own faults: without it a dead engine stays dead.
                log.exception("looking after an engine failed", engine=self.engine.engine_id)
                pause = RESTART_PAUSE_SECONDS_MAX

    async def _inspect(self, pause: float) -> float:
        """Probe once and mend what is broken; returns the pause before the next try, 0 if well."""
        if self._lock.locked():
            return pause  # starting or updating: whoever does it reports on it
        engine = self.engine
        before = engine.state
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                await engine.check()
        except TimeoutError:
            log.warning("an engine's probe hangs", engine=engine.engine_id)
        if engine.state == pb.ENGINE_STATE_HEALTHY and before != pb.ENGINE_STATE_HEALTHY:
            self._on_change()
        behind = engine.state == pb.ENGINE_STATE_HEALTHY and not self.may_serve
        if engine.asleep or not (behind or self.is_down or engine.state == pb.ENGINE_STATE_STALE):
            return 0.0
        log.warning(
            "an engine is being brought back",
            engine=engine.engine_id,
            policy=engine.policy,
            state=pb.EngineState.Name(engine.state),
            reason=engine.message,
        )
        try:
            await self.reach_target()
        except TroupeError as error:
            log.error("an engine did not come back", engine=engine.engine_id, error=str(error))
            return min(max(pause * 2, RESTART_PAUSE_SECONDS), RESTART_PAUSE_SECONDS_MAX)
        log.info("an engine serves again", engine=engine.engine_id, version=engine.version)
        return 0.0


@contextmanager
def _published_again(ref: pb.WeightsRef) -> Iterator[None]:
    """Weights that are gone after all (a host's memory was cleared) have to be published again by
    who trained them: this kind of error says so."""
    try:
        yield
    except (KeyNotFound, Corrupt) as error:
        raise gone(ref, error) from error
