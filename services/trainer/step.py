"""One step of one policy: claim -> accumulate -> step -> persist -> commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import structlog

from services.trainer.binding import Binding
from services.trainer.claims import Claim, StepClaims, bounds_of, is_lost, last_refs
from services.trainer.compute import Compute
from services.trainer.peers import Stopped
from services.trainer.policy_model import positions_of
from services.trainer.rows import columns_of, parse_rows
from services.trainer.settings import TrainerSettings
from services.trainer.state import Frontier
from services.trainer.suspension import HalfStep
from troupe.rpc import Aborted, DeadlineExceeded, FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2

log = structlog.get_logger("troupe.trainer")

# Losing leases again and again is not bad luck.
_ATTEMPTS = 3
# A binding that was superseded notices within this time.
_RENEW_SECONDS = 5.0


class Suspended(Exception):
    """The step stopped between two micro-batches, to be continued."""


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
        self._bounds = bounds_of(binding.spec, oldest_version)
        # Columns by reference that go with the samples that this step ends.
        self._refs: set[str] = set()
        self._make_claims = make_claims
        self._claims = make_claims(half)
        # Claims whose samples are in the gradients.
        self._trained: list[str] = []
        self._before = half
        self._leave = asyncio.Event()
        self._half: HalfStep | None = None
        self._compute = compute
        self._settings = settings
        self._micro_batches = self._samples = self._tokens = 0
        self._stop = threading.Event()
        self._watchers: set[asyncio.Event] = set()
        self._unwatched_since = time.monotonic()
        self._started = time.perf_counter()
        binding.step, binding.samples = step, 0 if half is None else half.samples
        binding.on_change = self._notify
        self._task = asyncio.create_task(self._guarded(), name=f"step-{binding.policy}-{step}")
        self._task.add_done_callback(lambda _: self._notify())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task.done()

    @property
    def _seconds(self) -> float:
        """How long it has been at work, suspensions not counted."""
        return time.perf_counter() - self._started

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

    def _event(self) -> trainer_pb2.StepEvent:
        return trainer_pb2.StepEvent(
            state=self.binding.state,
            micro_batches=self._micro_batches,
            samples=self._samples,
            tokens=self._tokens,
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
            self._half = self._halted()
            raise
        except TimeoutError:
            await self._abandon()
            raise DeadlineExceeded(
                f"step {self.step} of policy {self.binding.policy} did not end within {limit:g} s: "
                f"{self._samples} samples were trained, others never became ready",
                kind="step_timeout",
                field="limits.step_seconds",
                value=limit,
                remedy="Look for trajectories that do not end, or raise the limit.",
            ) from None
        except BaseException:
            await self._abandon()
            raise

    def _halted(self) -> HalfStep:
        question = self._claims.question
        return HalfStep(
            step=self.step,
            version=self._version,
            oldest_version=self._oldest_version,
            claimant=self._claims.claimant,
            claim_ids=list(self._trained),
            question="" if question in self._trained else question,
            micro_batches=self._micro_batches,
            samples=self._samples,
            tokens=self._tokens,
            refs=sorted(self._refs),
            seconds=self._seconds,
        )

    async def _abandon(self) -> None:
        """Back to the committed version with empty hands."""
        self._stop.set()
        binding = self.binding
        await self._claims.close()
        try:
            await self._compute.run(binding.reset)
        except TroupeError as error:
            # Stays dirty: the next step tries again, or Bind loads it elsewhere.
            log.error("state not restored", policy=binding.policy, error=str(error))
        if binding.state != pb.BINDING_STATE_RELEASED:
            binding.move(pb.BINDING_STATE_IDLE)

    async def _run(self) -> store_pb.StepCommit:
        commit = await self._claims.committed()
        if commit is not None:
            await self._adopt(commit)
            return commit
        if self.binding.version != self._version:
            raise FailedPrecondition(
                f"policy {self.binding.policy} is bound at version {self.binding.version}",
                kind="not_bound",
                field="version",
                value=self._version,
                remedy="Bind the policy at the ledger's version first.",
            )
        if self._before is not None and not await self._goes_on():
            self._before = None
        if self._before is None:
            await self._begin()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._attempt()
            except TroupeError as error:
                if not is_lost(error):
                    raise
                # Only leases that ran out while we were held up are worth another attempt.
                taken = not self._claims.lapsed or attempt == _ATTEMPTS
                self._before = None
                await self._compute.run(self.binding.reset)
                self.binding.move(pb.BINDING_STATE_IDLE)
                await self._claims.close()
                self._claims = self._make_claims(None)
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
            self._claims = self._make_claims(None)
            return False
        return True

    async def _begin(self) -> None:
        """Empty hands, and nobody else at this step."""
        if self.binding.frontier.step >= self.step:
            raise FailedPrecondition(
                f"version {self._version} of policy {self.binding.policy} comes from step "
                f"{self.binding.frontier.step}, which this store has not seen committed",
                kind="frontier_mismatch",
                field="step",
                value=self.step,
                remedy="Store and training state are of different runs: restore both together.",
            )
        if not self.binding.verified and self.binding.frontier.step >= 0:
            self.binding.verify(await self._claims.committed(self.binding.frontier.step))
        await self._compute.run(self.binding.reset)
        # Whoever trained this step before us is superseded: it can no longer commit.
        await self._claims.supersede()

    def _lost(self, error: TroupeError) -> Aborted:
        return Aborted(
            f"step {self.step} of policy {self.binding.policy}: {error.message}",
            kind="claims_lost",
            remedy="Run the step again on the worker that the policy is bound to.",
        )

    async def _attempt(self) -> store_pb.StepCommit:
        """One try under one set of leases, which are renewed meanwhile."""
        work = asyncio.create_task(self._work())
        keep = asyncio.create_task(self._keep())
        try:
            await asyncio.wait({work, keep}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                keep.result()  # raises: leases lost, or nobody watches
            return await work
        finally:
            for task in (work, keep):
                task.cancel()
            await asyncio.gather(work, keep, return_exceptions=True)

    async def _keep(self) -> None:
        """Renew leases while there is somebody for whom to work."""
        settings = self._settings
        orphan = settings.trainer_orphan_seconds
        pause = min(_RENEW_SECONDS, settings.trainer_lease_seconds / 3, orphan / 2)
        while True:
            await asyncio.sleep(pause)
            alone = 0.0 if self._watchers else time.monotonic() - self._unwatched_since
            if alone > orphan:
                raise Aborted(
                    f"step {self.step}: nobody watched it for {alone:.0f} s",
                    kind="step_orphaned",
                    remedy="Run the step again; nothing was counted.",
                )
            await self._claims.renew()

    async def _work(self) -> store_pb.StepCommit:
        binding, before = self.binding, self._before
        self._started = time.perf_counter() - (0.0 if before is None else before.seconds)
        if before is None:
            self._micro_batches = self._samples = self._tokens = 0
            self._trained, self._refs = [], set()
        else:
            self._micro_batches, self._samples = before.micro_batches, before.samples
            self._tokens = before.tokens
            self._trained, self._refs = list(before.claim_ids), set(before.refs)
        binding.move(pb.BINDING_STATE_ACCUMULATING)
        await self._accumulate()
        binding.move(pb.BINDING_STATE_STEPPING)
        if not self._claims.claim_ids:
            return await self._commit(store_pb.STEP_OUTCOME_EMPTY, "", binding.weights, {})
        binding.dirty = True
        outcome = await self._compute.run(binding.apply, self._stop)
        binding.dirty = outcome.applied or outcome.moved
        metrics = dict(outcome.metrics)
        metrics["train/wait_seconds"] = max(0.0, self._seconds - metrics["train/seconds"])
        if not outcome.applied:
            log.warning("step skipped", policy=binding.policy, reason=outcome.reason)
            # Some of its updates were made: the version's weights come back first.
            await self._compute.run(binding.reset)
            return await self._commit(
                store_pb.STEP_OUTCOME_SKIPPED, outcome.reason, binding.weights, metrics
            )
        binding.move(pb.BINDING_STATE_PUBLISHING)
        began = time.perf_counter()
        frontier = Frontier(self.step, outcome.digest)
        weights = await self._compute.run(binding.persist, frontier)
        metrics["train/publish_seconds"] = time.perf_counter() - began
        return await self._commit(store_pb.STEP_OUTCOME_APPLIED, "", weights, metrics, frontier)

    async def _accumulate(self) -> None:
        """Gradients of all micro-batches; the next one is claimed while one is computed."""
        following = asyncio.create_task(self._claim())
        leave = asyncio.create_task(self._leave.wait())
        try:
            while True:
                await asyncio.wait({following, leave}, return_when=asyncio.FIRST_COMPLETED)
                if self._leave.is_set():
                    raise Suspended
                claim = following.result()
                if claim.outcome == Claim.OUTCOME_EXHAUSTED:
                    await self._compute.run(self.binding.complete, self._stop)
                    return
                following = asyncio.create_task(self._claim())
                tokens = await self._compute.run(self._train_on, claim)
                self._trained.append(claim.claim_id)
                self._micro_batches += 1
                self._samples += len(claim.samples)
                self._tokens += tokens
                self.binding.samples = self._samples
                self._notify()
        finally:
            for task in (following, leave):
                task.cancel()
            await asyncio.gather(following, leave, return_exceptions=True)

    async def _claim(self) -> Claim:
        return await self._claims.claim(self._bounds, self._settings.trainer_claim_wait_seconds)

    def _train_on(self, claim: Claim) -> int:
        """Accumulate one claim; returns its tokens. In the compute thread."""
        if self._stop.is_set():
            raise Stopped
        binding = self.binding
        columns = columns_of(binding.spec.algorithm)
        learner = binding.learner
        rows = parse_rows(
            claim.samples,
            learner.vocabulary,
            binding.load_column,
            columns,
            longest=positions_of(learner.model),
        )
        self._refs.update(last_refs(claim, binding.spec.pipeline.max_uses))
        binding.accumulate(rows, self._stop)
        return sum(len(row.ids) for row in rows)

    async def _commit(
        self,
        outcome: store_pb.StepOutcome.ValueType,
        reason: str,
        weights: pb.WeightsRef,
        metrics: dict[str, float],
        frontier: Frontier | None = None,
    ) -> store_pb.StepCommit:
        """Commit; `frontier`: what the weights were trained on, if they are new."""
        binding = self.binding
        digest = None if frontier is None else frontier.samples_digest
        commit = await self._claims.commit(outcome, reason, weights, metrics, digest)
        theirs = (commit.weights.version, commit.weights.checksum)
        if theirs == (weights.version, weights.checksum):
            await self._compute.run(binding.confirm, commit.weights, frontier)
            await self._compute.run(binding.drop_columns, sorted(self._refs))
        else:  # another binding was first
            await self._adopt(commit)
        binding.move(pb.BINDING_STATE_IDLE)
        return commit

    async def _adopt(self, commit: store_pb.StepCommit) -> None:
        """Go on from a commit that is not ours. What is committed is true even if we cannot."""
        try:
            await self._compute.run(self.binding.adopt, commit)
        except TroupeError as error:
            log.error("committed version not loaded", policy=commit.policy, error=str(error))
