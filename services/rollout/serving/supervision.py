"""Supervision of one engine, which keeps it running and at its policy's target weights.

A dead engine is restarted with growing pauses. It comes up STALE, loads the policy's target version
and serves only after its verification, on the same path as at its first start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.errors import EngineDied, UpdateFailed
from services.rollout.engines.requests import NO_UPDATE, UpdateWave
from services.rollout.serving.weight_versions import TargetVersion, WeightFetcher, weights_gone
from troupe.rpc.errors import TroupeError, Unavailable
from troupe.scheduling.routing import UpdatingEngine
from troupe.transfer import Corrupt, KeyNotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

log = structlog.get_logger(__name__)

# Short enough to notice a hung engine within a few turns; a probe costs almost nothing.
PROBE_SECONDS = 1.0
# A probe that takes longer counts as missed.
PROBE_TIMEOUT_SECONDS = 20.0
# The first restart is immediate, since most deaths are single accidents; later pauses double.
RESTART_PAUSE_SECONDS = 0.5
RESTART_PAUSE_SECONDS_MAX = 30.0

_DOWN = (common_pb.ENGINE_STATE_STARTING, common_pb.ENGINE_STATE_DEAD)


class EngineKeeper:
    """The keeper of one engine, which probes, restarts and updates it. All changes to the engine go
    through its keeper."""

    def __init__(
        self,
        engine: ServingEngine,
        target: TargetVersion,
        fetcher: WeightFetcher,
        *,
        start_timeout: float,
        on_change: Callable[[], None],
    ) -> None:
        """Keep `engine`. `on_change` is called whenever the engine may have begun to serve."""
        self.engine = engine
        self._target = target
        self._fetcher = fetcher
        self._start_timeout = start_timeout
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._nudge = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._retired = False
        # Whether trainers have the devices: then the engine sleeps, and is not restarted if it
        # dies.
        self._off_device = False
        # Whether this worker brings the engine to new weights. Else another worker does (its
        # keeper), and `_vouched` is the version and checksum that it has verified there.
        self._kept = True
        self._vouched: tuple[int, str] | None = None
        # Whether no other worker uses its server.
        self._alone = True

    @property
    def kept(self) -> bool:
        """Whether this worker, not another, brings the engine to new weights."""
        return self._kept

    def share(self, *, kept: bool, vouched: tuple[int, str] | None, alone: bool) -> None:
        """Keep the engine, or follow another worker's. Repeatable. `alone`: no other worker uses
        its server.

        An engine that is taken over is loaded again, since its keeper may have died during a load.
        """
        taken_over = kept and not self._kept
        self._kept, self._vouched = kept, vouched
        self.engine.follow_keeper(not kept)
        self._alone = alone
        if not alone:
            # Others' turns would wait for a version that may never be.
            self.engine.give_up_ahead("other workers use its server")
        if taken_over:
            self.engine.distrust("its keeper was lost")
            self.nudge()

    @property
    def _may_follow(self) -> bool:
        """Whether the keeper of the engine has brought it to the target."""
        target = self._target.ref
        return self._vouched == (target.version, target.checksum)

    @property
    def busy(self) -> bool:
        """Whether the engine is being started or updated."""
        return self._lock.locked()

    @property
    def serves_target(self) -> bool:
        """Whether the engine serves the policy's target version."""
        return self._target.is_served_by(self.engine)

    @property
    def may_serve(self) -> bool:
        """Whether turns may go to the engine now."""
        return self._target.admits(self.engine)

    @property
    def off_device(self) -> bool:
        """Whether the engine has left its devices, to trainers."""
        return self._off_device or bool(self.engine.asleep)

    @property
    def takes_from_trainer(self) -> bool:
        """Whether the engine, which is up, is to load the target from its trainer's device."""
        lacks = self._kept and not (self.is_down or self.off_device or self.serves_target)
        return lacks and not self.has_target and self.engine.takes_from_trainer(self._target.ref)

    @property
    def has_target(self) -> bool:
        """Whether the engine has loaded the target before its commit."""
        return self.engine.awaits(self._target.ref)

    def may_load_ahead(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether the engine can load `ref` before its commit."""
        here = self._kept and self._alone and not (self._retired or self.off_device)
        return here and self.serves_target and self.engine.loads_ahead(ref)

    async def load_ahead(self, ref: common_pb.WeightsRef, wave: UpdateWave) -> bool:
        """Have the engine load `ref` before its commit; see `ServingEngine.load_ahead`."""
        async with self._lock:
            return self.may_load_ahead(ref) and await self.engine.load_ahead(ref, wave)

    @property
    def is_down(self) -> bool:
        """Whether the engine must be started before it can be updated."""
        return self.engine.state in _DOWN

    def as_updating(self, *, waits: bool) -> UpdatingEngine:
        """Return the engine in the form for `routing.next_wave`. `waits`: it has to load
        weights."""
        engine = self.engine
        return UpdatingEngine(
            engine.engine_id,
            frozenset(map(str, engine.held_devices)),
            serves=self.may_serve,
            waits=waits,
            turns=engine.load().running,
            together=self.takes_from_trainer or self.has_target,
        )

    async def reach_target(self, wave: UpdateWave | None = None) -> float:
        """Start the engine if it is down, and update it if it does not serve the target. `wave`:
        the engines that take it from the trainer's device together with this one.

        Returns the seconds in which the update kept it from serving. Repeatable; does nothing after
        `retire`. Raises the engine's errors, `Unavailable` if it does not start in time, and
        `NotFound` (`weights_not_found`) if the target cannot be fetched.
        """
        async with self._lock:
            engine = self.engine
            if self._retired or self.off_device:
                return 0.0
            if self.is_down:
                try:
                    async with asyncio.timeout(self._start_timeout):
                        await engine.start()
                except TimeoutError as error:
                    raise self._start_timed_out("start") from error
            if self.serves_target:
                return 0.0
            if not self._kept:
                if self._may_follow:
                    await self.engine.follow(self._target.ref)
                    self._on_change()
                return 0.0
            # Read once: if the target moves meanwhile, its own update follows.
            ref = self._target.ref
            exposed = await self._admit(ref)
            if exposed is None:
                await self._fetcher.fetch(ref)
                with _missing_as_gone(ref):
                    exposed = await engine.update_weights(ref, self._fetcher.transfer, wave)
        self._on_change()
        return exposed

    async def _admit(self, ref: common_pb.WeightsRef) -> float | None:
        """Let the engine serve what it has loaded before the commit; None if it is not `ref`."""
        if not self.engine.awaits(ref):
            return None
        try:
            return await self.engine.admit(ref)
        except UpdateFailed as error:
            log.warning(
                "an engine loads a version again", engine=self.engine.engine_id, error=str(error)
            )
            if self.is_down:
                raise
            return None

    async def sleep(self) -> None:
        """Take the engine off its devices until `wake`; an engine that is down stays down.
        Repeatable.

        Raises the errors of `Engine.sleep`; then the engine has not left its devices.
        """
        async with self._lock:
            if self._retired:
                return
            if not self.is_down:
                await self.engine.sleep()
            self._off_device = True

    async def wake(self) -> None:
        """Bring the engine back to its devices and to the policy's target. Repeatable.

        Raises the errors of `reach_target`.
        """
        async with self._lock:
            self._off_device = False
            if self.engine.asleep and not self._retired:
                try:
                    async with asyncio.timeout(self._start_timeout):
                        await self.engine.wake()
                except TimeoutError as error:
                    raise self._start_timed_out("wake") from error
                except EngineDied as error:  # it is restarted
                    log.warning("an engine died asleep", reason=error.message)
        await self.reach_target()

    async def check_target(self) -> None:
        """Raise `WeightsRefused` if the target cannot fit the engine's model, without changing
        anything."""
        if not self._kept or self.is_down or self.off_device or self.serves_target:
            return
        if self.has_target:
            return  # it fitted
        ref = self._target.ref
        await self._fetcher.fetch(ref)
        with _missing_as_gone(ref):
            await self.engine.accepts(ref, self._fetcher.transfer)

    def watch(self) -> None:
        """Start the task that probes the engine and brings it back."""
        if self._watch is None and not self._retired:
            self._watch = asyncio.create_task(
                self._watch_engine(), name=f"watch-{self.engine.engine_id}"
            )

    def nudge(self) -> None:
        """Probe the engine now, because it failed a turn or an update."""
        self._nudge.set()

    def retire(self) -> None:
        """Stop changing the engine, which leaves the policy. Repeatable."""
        self._retired = True
        if self._watch is not None:
            self._watch.cancel()

    async def stop(self, reason: str, drain_seconds: float) -> None:
        """Retire, let the engine finish its turns within `drain_seconds`, and stop it."""
        self.retire()
        if self._watch is not None:
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.engine.state == common_pb.ENGINE_STATE_HEALTHY:
            await self.engine.drain(reason, deadline_seconds=drain_seconds)
        await self.engine.stop()

    def status(self, job_id: str, worker_id: str) -> rollout_pb.EngineStatus:
        """Return the engine's state and load, for heartbeats and ListEngines."""
        engine, load = self.engine, self.engine.load()
        update = engine.last_update or NO_UPDATE
        return rollout_pb.EngineStatus(
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
            update_way=update.way,
            update_exposed_seconds=update.exposed_seconds,
            update_seconds=update.total_seconds,
            update_fallbacks=engine.update_fallbacks,
            host=engine.host.host_id if engine.host.shared else "",
            live_versions=engine.live_versions,
        )

    def _start_timed_out(self, what: str) -> Unavailable:
        return Unavailable(
            f"engine {self.engine.engine_id} did not {what} within {self._start_timeout:g} s",
            kind="engine_start_timeout",
            field=f"policies.{self.engine.policy}.engine.start_timeout_seconds",
            remedy="Raise it, or see the engine's log.",
        )

    async def _watch_engine(self) -> None:
        pause = 0.0
        while True:
            try:
                async with asyncio.timeout(pause or PROBE_SECONDS):
                    await self._nudge.wait()
            except TimeoutError:
                pass
            self._nudge.clear()
            try:
                pause = await self._inspect(pause)
            except Exception:
                # The task must survive its own faults: otherwise a dead engine would stay dead.
                log.exception("supervision of an engine failed", engine=self.engine.engine_id)
                pause = RESTART_PAUSE_SECONDS_MAX

    async def _inspect(self, pause: float) -> float:
        """Probe once and repair the engine; return the pause before the next attempt, 0 if all is
        well."""
        if self._lock.locked():
            return pause  # a start or an update is running and reports its own failure
        engine = self.engine
        before = engine.state
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                await engine.check()
        except TimeoutError:
            log.warning("an engine's probe hangs", engine=engine.engine_id)
        if (
            engine.state == common_pb.ENGINE_STATE_HEALTHY
            and before != common_pb.ENGINE_STATE_HEALTHY
        ):
            self._on_change()
        behind = engine.state == common_pb.ENGINE_STATE_HEALTHY and not self.may_serve
        needs_repair = behind or self.is_down or engine.state == common_pb.ENGINE_STATE_STALE
        if self.off_device or not needs_repair:
            return 0.0
        if not (self._kept or self.is_down or self._may_follow):
            return 0.0  # its keeper is about to
        log.warning(
            "an engine is being brought back",
            engine=engine.engine_id,
            policy=engine.policy,
            state=common_pb.EngineState.Name(engine.state),
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
def _missing_as_gone(ref: common_pb.WeightsRef) -> Iterator[None]:
    """Convert errors about weights that have left this host's memory since they were fetched into
    the error that makes their trainer publish them again."""
    try:
        yield
    except (KeyNotFound, Corrupt) as error:
        raise weights_gone(ref, error) from error
