"""One step of one policy, as those see it who ask for it; its work is an `Attempt`'s."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import structlog

from services.trainer.attempt import Attempt, Suspended, adopt
from services.trainer.binding import Binding
from services.trainer.claims import StepClaims, is_lost
from services.trainer.compute import Compute
from services.trainer.settings import TrainerSettings
from services.trainer.suspension import HalfStep
from troupe.rpc import Aborted, DeadlineExceeded, FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2

log = structlog.get_logger("troupe.trainer")

# Losing leases again and again is not bad luck.
_ATTEMPTS = 3


class StepRun:
    """A running or finished step; watchers come and go without disturbing it."""

    def __init__(
        self,
        binding: Binding,
        step: int,
        version: int,
        oldest_version: int | None,
        make_claims: Callable[[HalfStep | None], StepClaims],
        compute: Compute,
        settings: TrainerSettings,
        half: HalfStep | None = None,
    ) -> None:
        """`half`: the part of this step that was done before it was suspended; its gradients are
        in the binding."""
        self.step = step
        self.binding = binding
        self._version = version
        self._oldest_version = oldest_version
        self._make_claims = make_claims
        self._leave = asyncio.Event()
        self._half: HalfStep | None = None
        self._compute = compute
        self._settings = settings
        self._stop = threading.Event()
        self._watchers: set[asyncio.Event] = set()
        self._unwatched_since = time.monotonic()
        self._attempt = self._make_attempt(half)
        binding.step, binding.samples = step, 0 if half is None else half.samples
        binding.on_change = self._notify
        self._task = asyncio.create_task(self._guarded(), name=f"step-{binding.policy}-{step}")
        self._task.add_done_callback(lambda _: self._notify())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task.done()

    def starts_from(self, version: int) -> bool:
        """Whether it makes the version after `version`."""
        return self._version == version

    async def watch(self) -> AsyncIterator[trainer_pb2.StepEvent]:
        """Progress from now on; the last event carries the commit. Raises what the step raised.

        Leaving early does not stop the step.
        """
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while not self._task.done():
                yield self._event()
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
            self._unwatched_since = time.monotonic()
        if self._task.cancelled():
            raise Aborted(
                f"step {self.step} of policy {self.binding.policy} was given up",
                kind="step_released",
                remedy="Bind the policy and run the step again; nothing was counted.",
            )
        if self._half is not None:
            raise Aborted(
                f"step {self.step} of policy {self.binding.policy} was suspended",
                kind="step_suspended",
                remedy="Resume the policy, and run the step there: it goes on where it was.",
            )
        event = self._event()
        event.commit.CopyFrom(self._task.result())
        yield event

    async def outcome(self) -> store_pb.StepCommit | None:
        """The commit once the step has ended; None when it ended without one."""
        await asyncio.wait({self._task})
        failed = self._task.cancelled() or self._task.exception() is not None
        return None if failed else self._task.result()

    async def cancel(self) -> None:
        """Give the step up: gradients are thrown away, samples go back. Idempotent."""
        self._stop.set()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def suspend(self) -> HalfStep | None:
        """Stop after the micro-batch that is computed now; what there is to go on with.

        None when the step was past its last micro-batch: then it has ended, well or not.
        """
        self._leave.set()
        await asyncio.wait({self._task})
        return self._half

    async def settled(self) -> None:
        """After `cancel`: wait until the store has no question of ours left to answer."""
        await self._claims.settled()

    @property
    def _claims(self) -> StepClaims:
        return self._attempt.claims

    def _make_attempt(self, before: HalfStep | None) -> Attempt:
        return Attempt(
            self.binding,
            (self.step, self._version, self._oldest_version),
            self._make_claims(before),
            self._compute,
            self._settings,
            before=before,
            stop=self._stop,
            leave=self._leave,
            alone=self._alone,
            on_progress=self._notify,
        )

    def _alone(self) -> float:
        return 0.0 if self._watchers else time.monotonic() - self._unwatched_since

    def _event(self) -> trainer_pb2.StepEvent:
        return trainer_pb2.StepEvent(
            state=self.binding.state,
            micro_batches=self._attempt.micro_batches,
            samples=self._attempt.samples,
            tokens=self._attempt.tokens,
        )

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def _guarded(self) -> store_pb.StepCommit:
        limit = self.binding.spec.limits.step_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._run()
        except Suspended:
            await self._claims.freeze()
            self._half = self._attempt.half()
            raise
        except TimeoutError:
            await self._abandon()
            raise DeadlineExceeded(
                f"step {self.step} of policy {self.binding.policy} did not end within {limit:g} s: "
                f"{self._attempt.samples} samples were trained, others never became ready",
                kind="step_timeout",
                field="limits.step_seconds",
                value=limit,
                remedy="Look for trajectories that do not end, or raise the limit.",
            ) from None
        except BaseException:
            await self._abandon()
            raise

    async def _abandon(self) -> None:
        """Back to the committed version with empty hands."""
        self._stop.set()
        binding = self.binding
        await self._claims.close()
        try:
            await self._compute.run(binding.versions.reset)
        except TroupeError as error:
            # Stays dirty: the next step tries again, or Bind loads it elsewhere.
            log.error("state not restored", policy=binding.policy, error=str(error))
        if binding.state != pb.BINDING_STATE_RELEASED:
            binding.move(pb.BINDING_STATE_IDLE)

    async def _run(self) -> store_pb.StepCommit:
        commit = await self._claims.committed()
        if commit is not None:
            await adopt(self.binding, self._compute, commit)
            return commit
        if self.binding.version != self._version:
            raise FailedPrecondition(
                f"policy {self.binding.policy} is bound at version {self.binding.version}",
                kind="not_bound",
                field="version",
                value=self._version,
                remedy="Bind the policy at the ledger's version first.",
            )
        if self._attempt.before is None or not await self._goes_on():
            await self._begin()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._attempt.run()
            except TroupeError as error:
                if not is_lost(error):
                    raise
                # Only leases that ran out while we were held up are worth another attempt.
                taken = not self._claims.lapsed or attempt == _ATTEMPTS
                await self._compute.run(self.binding.versions.reset)
                self.binding.move(pb.BINDING_STATE_IDLE)
                await self._claims.close()
                self._attempt = self._make_attempt(None)
                if taken or await self._claims.contested():
                    raise self._lost(error) from error
                log.warning("leases ran out, the step begins again", error=str(error))
        raise AssertionError("the last attempt returns or raises")

    async def _goes_on(self) -> bool:
        """Whether the leases of the suspended part are held still; if not, they are given up."""
        try:
            await self._claims.renew()
        except TroupeError as error:
            if not is_lost(error):
                raise
            log.warning("leases were lost in suspension, the step begins again", error=str(error))
            await self._claims.close()
            self._attempt = self._make_attempt(None)
            return False
        return True

    async def _begin(self) -> None:
        """Empty hands, and nobody else at this step."""
        versions = self.binding.versions
        if versions.frontier.step >= self.step:
            raise FailedPrecondition(
                f"version {self._version} of policy {self.binding.policy} comes from step "
                f"{versions.frontier.step}, which this store has not seen committed",
                kind="frontier_mismatch",
                field="step",
                value=self.step,
                remedy="Store and training state are of different runs: restore both together.",
            )
        if not versions.verified and versions.frontier.step >= 0:
            versions.verify(await self._claims.committed(versions.frontier.step))
        await self._compute.run(versions.reset)
        # Whoever trained this step before us is superseded: it can no longer commit.
        await self._claims.supersede()

    def _lost(self, error: TroupeError) -> Aborted:
        return Aborted(
            f"step {self.step} of policy {self.binding.policy}: {error.message}",
            kind="claims_lost",
            remedy="Run the step again on the worker that the policy is bound to.",
        )
