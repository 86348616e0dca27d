"""One optimizer step of one policy: claim, accumulate, apply, publish, commit.

`Attempt` does the work under one set of leases and renews them meanwhile. `StepRun` is the step
that RunStep exposes: it starts a new attempt if leases expire, ends at the step's deadline, and can
be watched, cancelled and suspended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

import structlog

from services.trainer.binding import PolicyBinding
from services.trainer.claims import Claim, StepClaims, bounds_of, is_lost, last_refs, refs_of
from services.trainer.compute import Compute
from services.trainer.learning.optimizer import learning_rates
from services.trainer.learning.ranks import Stopped
from services.trainer.settings import TrainerSettings
from services.trainer.state.suspension import SuspendedStep
from services.trainer.state.training_state import Frontier
from troupe.contracts import kinds
from troupe.contracts.metric_names import (
    PUBLISH_SECONDS,
    TRAIN_SECONDS,
    VALUES_GONE,
)
from troupe.prefixes import restore
from troupe.rpc import Aborted, DeadlineExceeded, FailedPrecondition, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

log = structlog.get_logger("troupe.trainer")

# Maximum attempts at a step whose leases expire; more indicate a fault, not a delay.
_ATTEMPTS = 3
# Longest pause between renewals of leases: a superseded binding notices within this time.
_RENEW_SECONDS = 5.0
# Seconds to wait for the deletion of column values on other hosts.
_DROP_SECONDS = 10.0


class Suspended(Exception):
    """Raised in a step that was stopped between two micro-batches, to be continued later."""


class Attempt:
    """Trains and commits one policy's step under one set of leases."""

    def __init__(self, run: StepRun, claims: StepClaims, before: SuspendedStep | None) -> None:
        """`before`: the part done before a suspension; its gradients are in the binding."""
        self.claims = claims
        self.resumes = before is not None
        # The step so far; its `seconds` are those before this attempt.
        self.progress = SuspendedStep(run.step, run.version, run.oldest_version, claims.claimant)
        if before is not None:
            ids, refs = list(before.claim_ids), list(before.refs)
            self.progress = replace(before, claim_ids=ids, refs=refs)
        else:
            self.progress.keeping = run.binding.versions.keeps_rows(run.step)
        # Policies whose sums of joint pairs are waited for, and this policy's own.
        self.missing: Sequence[str] = ()
        self._sums: store_pb.PairSums | None = None
        # The copy of a micro-batch that is on its way to the store, if there is one.
        self._keeping: asyncio.Task[None] | None = None
        self._run = run
        self._binding, self._compute = run.binding, run.compute
        self._values = run.binding.values()
        self._began = time.perf_counter()
        self._bounds = bounds_of(run.binding.spec, run.oldest_version)

    @property
    def _parts(self) -> int:
        """Number of the step's micro-batches, and one for the sums of joint pairs."""
        return self.progress.micro_batches + self._binding.spec.exchanges_pairs(self._run.step)

    @property
    def _seconds(self) -> float:
        """Seconds of work on the step so far, without suspensions."""
        return time.perf_counter() - self._began + self.progress.seconds

    async def run(self) -> store_pb.StepCommit:
        """Train and commit, renewing the leases meanwhile.

        Raises Suspended, what the store raises, and Aborted of kind "step_orphaned".
        """
        work = asyncio.create_task(self._work())
        keep = asyncio.create_task(self._renew_leases())
        try:
            await asyncio.wait({work, keep}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                keep.result()  # raises, because leases were lost or the step is orphaned
            return await work
        finally:
            for task in (work, keep):
                task.cancel()
            await asyncio.gather(work, keep, return_exceptions=True)

    def unfinished(self) -> SuspendedStep:
        """Return the step so far, after Suspended."""
        request = self.claims.last_request
        pending = "" if request in self.progress.claim_ids else request
        return replace(self.progress, pending_claim=pending, seconds=self._seconds)

    async def _renew_leases(self) -> None:
        """Renew leases until the step has been unwatched for too long."""
        settings = self._run.settings
        orphan = settings.trainer_orphan_seconds
        pause = min(_RENEW_SECONDS, settings.trainer_lease_seconds / 3, orphan / 2)
        while True:
            await asyncio.sleep(pause)
            seconds = self._run.unwatched_seconds()
            if seconds > orphan:
                raise Aborted(
                    f"step {self._run.step}: nobody watched it for {seconds:.0f} s",
                    kind="step_orphaned",
                    remedy="Run the step again; nothing was counted.",
                )
            await self.claims.renew()

    async def _work(self) -> store_pb.StepCommit:
        self._began = time.perf_counter()
        binding = self._binding
        binding.move(common_pb.BINDING_STATE_ACCUMULATING)
        await self._accumulate()
        binding.move(common_pb.BINDING_STATE_STEPPING)
        gone = {VALUES_GONE: float(self.progress.gone)} if self.progress.gone else {}
        if not self.progress.samples:
            return await self._commit(
                store_pb.STEP_OUTCOME_EMPTY, "", binding.versions.weights, gone
            )
        binding.versions.dirty = True
        version = binding.versions.committed
        rates = learning_rates(binding.spec, binding.policy, version, self._run.step)
        outcome = await self._compute.run(
            binding.draw, binding.learner.apply, version, self._run.stop, rates
        )
        self._run.kept = outcome.kept
        binding.versions.dirty = outcome.applied or outcome.moved
        metrics = dict(outcome.metrics) | gone
        metrics["train/wait_seconds"] = max(0.0, self._seconds - metrics[TRAIN_SECONDS])
        if outcome.fault:
            spec = binding.spec.algorithm
            raise FailedPrecondition(
                f"step {self._run.step + 1} of policy {binding.policy}: {outcome.reason}",
                kind="algorithm_function",
                field=outcome.fault,
                value=getattr(spec, outcome.fault.removeprefix("algorithm.")),
                remedy="Fix the function and resume the job, which repeats the step; "
                "docs/algorithms.md says what it must return.",
            )
        if not outcome.applied:
            log.warning("step skipped", policy=binding.policy, reason=outcome.reason)
            # Some of the step's updates may have been made.
            await self._compute.run(binding.versions.reset)
            return await self._commit(
                store_pb.STEP_OUTCOME_SKIPPED, outcome.reason, binding.versions.weights, metrics
            )
        binding.move(common_pb.BINDING_STATE_PUBLISHING)
        began = time.perf_counter()
        frontier, keeping = Frontier(self._run.step, outcome.digest), self.progress.keeping
        binding.versions.durability.stepped(self._seconds)
        if binding.versions.durability.commits_soon(keeping=keeping):
            # Engines may load the weights meanwhile. (Where the commit waits for a slow disk, they
            # would hold back what they compute for minutes, or go back.)
            self._run.stepped = await self._compute.run(binding.versions.stepped)
            self._run.notify()
        weights = await self._compute.run(binding.versions.persist, frontier, keeping=keeping)
        metrics[PUBLISH_SECONDS] = time.perf_counter() - began
        metrics |= binding.versions.durability.metrics(weights.version if keeping else 0)
        return await self._commit(store_pb.STEP_OUTCOME_APPLIED, "", weights, metrics, frontier)

    async def _accumulate(self) -> None:
        """Accumulate all micro-batches; the next one is claimed while one is computed."""
        following = asyncio.create_task(self._claim())
        suspend = asyncio.create_task(self._run.suspending.wait())
        progress, binding = self.progress, self._binding
        try:
            while True:
                await asyncio.wait({following, suspend}, return_when=asyncio.FIRST_COMPLETED)
                if self._run.suspending.is_set():
                    raise Suspended
                claim = following.result()
                if claim.outcome == Claim.OUTCOME_EXHAUSTED:
                    await self._kept()
                    if binding.spec.exchanges_pairs(self._run.step):
                        await self._exchange(suspend)
                    await self._compute.run(binding.draw, binding.learner.complete, self._run.stop)
                    return
                following = asyncio.create_task(self._claim())
                tokens, gone, kept = await self._compute.run(self._train_on, claim)
                if gone:
                    await self._drop(claim.claim_id, gone)
                if progress.keeping:
                    await self._kept()
                    keep = self._keep(progress.micro_batches, kept)
                    self._keeping = asyncio.create_task(keep)
                progress.claim_ids.append(claim.claim_id)
                progress.micro_batches += 1
                progress.samples += len(claim.samples) - len(gone)
                progress.tokens += tokens
                binding.samples = progress.samples
                self._run.notify()
        except Suspended:
            await self._kept()
            raise
        finally:
            tasks = [task for task in (following, suspend, self._keeping) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _exchange(self, suspend: asyncio.Task[bool]) -> None:
        """Exchange the sums of joint pairs with the trainers of the other policies, and give the
        learner those over all policies.

        Others may need this device for theirs: the step can be suspended while it waits. Raises
        Suspended.
        """
        learner, settings = self._binding.learner, self._run.settings
        mine = self._sums = await self._compute.run(learner.pair_sums)
        asking = asyncio.create_task(
            self.claims.exchange(mine, settings.trainer_claim_wait_seconds, self._note_missing)
        )
        try:
            await asyncio.wait({asking, suspend}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise Suspended
            sums = asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        # What follows is one computation, in which the step cannot be suspended.
        self._binding.move(common_pb.BINDING_STATE_STEPPING)
        await self._compute.run(learner.join_pairs, sums)
        await self._keep(self.progress.micro_batches, [], sums)

    def _note_missing(self, policies: Sequence[str]) -> None:
        self.missing = policies

    async def _keep(
        self,
        index: int,
        samples: Sequence[store_pb.ClaimedSample],
        sums: store_pb.PairSums | None = None,
    ) -> None:
        """Have the store keep a micro-batch, or sums of joint pairs; if it cannot, the state is
        written with the step."""
        if not self.progress.keeping:
            return
        try:
            await self.claims.keep_rows(index, samples, sums)
        except TroupeError as error:
            log.warning("rows not kept", policy=self._binding.policy, error=str(error))
            self.progress.keeping = False

    async def _kept(self) -> None:
        """Wait until the store has kept, or refused, the last micro-batch."""
        if self._keeping is not None:
            await self._keeping

    async def _claim(self) -> Claim:
        return await self.claims.claim(self._bounds, self._run.settings.trainer_claim_wait_seconds)

    def _train_on(
        self, claim: Claim
    ) -> tuple[int, list[store_pb.Sample], list[store_pb.ClaimedSample]]:
        """Accumulate one claim, in the compute thread.

        Returns the number of its tokens, the samples left out because of lost values, and, if its
        rows are to be kept, the others with their values.
        """
        if self._run.stop.is_set():
            raise Stopped
        binding = self._binding
        samples = restore(claim.samples, claim.stems)
        rows, gone = self._values.read(samples, binding.learner.read)
        self.progress.refs += last_refs(claim, binding.spec.pipeline.max_uses)
        if rows:
            binding.draw(binding.learner.accumulate, rows, self._run.stop)
        kept: list[store_pb.ClaimedSample] = []
        if self.progress.keeping:
            lost = {sample.sample_id for sample in gone}
            kept = self._values.with_values(
                one for one in samples if one.sample.sample_id not in lost
            )
        return sum(row.size for row in rows), gone, kept

    async def _drop(self, claim_id: str, gone: Sequence[store_pb.Sample]) -> None:
        """Have the store drop samples of a claim whose other samples are in the gradients."""
        names = [sample.sample_id for sample in gone]
        log.warning("values gone", policy=self._binding.policy, step=self._run.step, samples=names)
        await self.claims.drop_gone(claim_id, names)
        self.progress.gone += len(gone)
        # Their other values are not needed either. They are deleted now, not at the commit, since a
        # later attempt does not see these samples; but for those that others may begin with, which
        # are deleted with the job.
        await self._drop_values(refs_of(gone, shared=False))

    async def _drop_values(self, refs: Iterable[str]) -> None:
        """Delete column values by key, waiting at most `_DROP_SECONDS`.

        Not in the compute thread, since it calls other hosts.
        """
        keys = sorted(set(refs))
        if not keys:
            return
        dropped = asyncio.create_task(asyncio.to_thread(self._binding.drop_columns, keys))
        try:
            async with asyncio.timeout(_DROP_SECONDS):
                await asyncio.shield(dropped)
        except TimeoutError:
            dropped.add_done_callback(lambda done: done.cancelled() or done.exception())
            log.warning("values are still being deleted", keys=len(keys), seconds=_DROP_SECONDS)

    async def _commit(
        self,
        outcome: store_pb.StepOutcome.ValueType,
        reason: str,
        weights: common_pb.WeightsRef,
        metrics: dict[str, float],
        frontier: Frontier | None = None,
    ) -> store_pb.StepCommit:
        """Commit the step; `frontier`: what the weights were trained on, None if unchanged."""
        binding = self._binding
        digest = None if frontier is None else frontier.samples_digest
        keeping = frontier is not None and self.progress.keeping
        answer = await self.claims.commit(
            outcome,
            reason,
            weights,
            metrics,
            digest,
            durable=frontier is not None and not keeping,
            kept=self._parts if keeping else None,
            sums=self._sums,
        )
        commit = answer.commit
        theirs = (commit.weights.version, commit.weights.checksum)
        if theirs == (weights.version, weights.checksum):
            confirm = binding.versions.confirm
            await self._compute.run(confirm, commit.weights, frontier, keeping=keeping)
            if keeping:
                write = binding.versions.write_behind
                await self._compute.run(write, over_high_water=answer.over_high_water)
            await self._drop_values(self.progress.refs)
        else:  # another binding has committed the step first
            await adopt(self._binding, self._compute, commit)
        binding.move(common_pb.BINDING_STATE_IDLE)
        return commit


async def adopt(binding: PolicyBinding, compute: Compute, commit: store_pb.StepCommit) -> None:
    """Load the version that another binding committed; a failure is only logged."""
    try:
        await compute.run(binding.versions.adopt, commit)
    except TroupeError as error:
        log.error("committed version not loaded", policy=commit.policy, error=str(error))


class StepRun:
    """A running or finished step, which runs in the background whether it is watched or not."""

    def __init__(
        self,
        binding: PolicyBinding,
        step: int,
        version: int,
        oldest_version: int | None,
        make_claims: Callable[[SuspendedStep | None], StepClaims],
        compute: Compute,
        settings: TrainerSettings,
        unfinished: SuspendedStep | None = None,
    ) -> None:
        """`unfinished`: the part done before a suspension; its gradients are in the binding."""
        self.step = step
        self.binding = binding
        self.version = version
        self.oldest_version = oldest_version
        self._make_claims = make_claims
        self.suspending = asyncio.Event()
        self._unfinished: SuspendedStep | None = None
        # Tokens of the step for people to look at, once it was computed.
        self.kept: Sequence[orchestrator_pb.TrainedTurn] = ()
        # The weights that the step has made, while they are published and committed.
        self.stepped: common_pb.WeightsRef | None = None
        self.compute = compute
        self.settings = settings
        self.stop = threading.Event()
        self._watchers: set[asyncio.Event] = set()
        self._unwatched_since = time.monotonic()
        self._attempt = self._make_attempt(unfinished)
        binding.step, binding.samples = step, 0 if unfinished is None else unfinished.samples
        binding.on_change = self.notify
        self._task = asyncio.create_task(self._guarded(), name=f"step-{binding.policy}-{step}")
        self._task.add_done_callback(lambda _: self.notify())

    @property
    def done(self) -> bool:
        """Whether the step has ended, with or without a commit."""
        return self._task.done()

    async def watch(self) -> AsyncIterator[trainer_pb.StepEvent]:
        """Stream progress; the last event carries the commit. Raises what the step raised.

        Closing the stream early does not stop the step.
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
        if self._unfinished is not None:
            raise Aborted(
                f"step {self.step} of policy {self.binding.policy} was suspended",
                kind=kinds.STEP_SUSPENDED,
                remedy="Resume the policy, and run the step there: it goes on where it was.",
            )
        event = self._event()
        event.commit.CopyFrom(self._task.result())
        yield event

    async def outcome(self) -> store_pb.StepCommit | None:
        """Wait for the end of the step; its commit, or None without one."""
        await asyncio.wait({self._task})
        failed = self._task.cancelled() or self._task.exception() is not None
        return None if failed else self._task.result()

    async def cancel(self) -> None:
        """Give the step up: discard its gradients and release its samples. Idempotent."""
        self.stop.set()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def suspend(self) -> SuspendedStep | None:
        """Stop after the current micro-batch; returns the step so far.

        Returns None if the step was past its last micro-batch; it has then ended.
        """
        self.suspending.set()
        await asyncio.wait({self._task})
        return self._unfinished

    async def settled(self) -> None:
        """Wait, after `cancel`, until a claim that was in flight is released."""
        await self._claims.settled()

    @property
    def _claims(self) -> StepClaims:
        return self._attempt.claims

    def _make_attempt(self, before: SuspendedStep | None) -> Attempt:
        self.stepped = None
        return Attempt(self, self._make_claims(before), before)

    def unwatched_seconds(self) -> float:
        """Return seconds since the last watcher left; 0 while there is one."""
        return 0.0 if self._watchers else time.monotonic() - self._unwatched_since

    def _event(self) -> trainer_pb.StepEvent:
        progress = self._attempt.progress
        return trainer_pb.StepEvent(
            state=self.binding.state,
            micro_batches=progress.micro_batches,
            samples=progress.samples,
            tokens=progress.tokens,
            stepped=self.stepped,
        )

    def notify(self) -> None:
        """Wake the watchers: the step has got on."""
        for watcher in self._watchers:
            watcher.set()

    async def _guarded(self) -> store_pb.StepCommit:
        limit = self.binding.spec.limits.step_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._run()
        except Suspended:
            await self._claims.freeze()
            self._unfinished = self._attempt.unfinished()
            raise
        except TimeoutError:
            await self._abandon()
            count, missing = self._attempt.progress.samples, ", ".join(self._attempt.missing)
            what = f"{count} samples were trained, others never became ready"
            remedy = "Look for trajectories that do not end, or raise the limit."
            if missing:
                what = f"its joint pairs wait for the margins of {missing}"
                remedy = "Look for the trainers of these policies, or raise the limit."
            raise DeadlineExceeded(
                f"step {self.step} of policy {self.binding.policy} did not end within {limit:g} s: "
                f"{what}",
                kind="step_timeout",
                field="limits.step_seconds",
                value=limit,
                remedy=remedy,
            ) from None
        except BaseException:
            await self._abandon()
            raise

    async def _abandon(self) -> None:
        """Release all claims and go back to the committed version."""
        self.stop.set()
        binding = self.binding
        await self._claims.close()
        try:
            await self.compute.run(binding.versions.reset)
        except TroupeError as error:
            # The versions stay dirty: the next step retries, or another Bind loads the state.
            log.error("state not restored", policy=binding.policy, error=str(error))
        if binding.state != common_pb.BINDING_STATE_RELEASED:
            binding.move(common_pb.BINDING_STATE_IDLE)

    async def _run(self) -> store_pb.StepCommit:
        commit = await self._claims.committed()
        if commit is not None:
            await adopt(self.binding, self.compute, commit)
            return commit
        committed = self.binding.versions.committed
        if committed != self.version:
            raise FailedPrecondition(
                f"policy {self.binding.policy} is bound at version {committed}",
                kind=kinds.NOT_BOUND,
                field="version",
                value=self.version,
                remedy="Bind the policy at its committed version first.",
            )
        if not self._attempt.resumes or not await self._still_leased():
            await self._begin()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._attempt.run()
            except TroupeError as error:
                if not is_lost(error):
                    raise
                # Retry only if leases expired, not if another binding has superseded this one.
                taken = not self._claims.lapsed or attempt == _ATTEMPTS
                await self.compute.run(self.binding.versions.reset)
                self.binding.move(common_pb.BINDING_STATE_IDLE)
                await self._claims.close()
                self._attempt = self._make_attempt(None)
                if taken or await self._claims.contested():
                    raise Aborted(
                        f"step {self.step} of policy {self.binding.policy}: {error.message}",
                        kind="claims_lost",
                        remedy="Run the step again on the worker that the policy is bound to.",
                    ) from error
                log.warning("leases ran out, the step begins again", error=str(error))
        raise AssertionError("the last attempt returns or raises")

    async def _still_leased(self) -> bool:
        """Return whether the suspended part still has its leases; if not, its claims are
        released."""
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
        """Discard gradients, check the state's frontier, and supersede other bindings."""
        versions = self.binding.versions
        if versions.frontier.step >= self.step:
            raise FailedPrecondition(
                f"version {self.version} of policy {self.binding.policy} comes from step "
                f"{versions.frontier.step}, which this store has not seen committed",
                kind="frontier_mismatch",
                field="step",
                value=self.step,
                remedy="Store and training state are of different runs: restore both together.",
            )
        if not versions.verified and versions.frontier.step >= 0:
            versions.verify(await self._claims.committed(versions.frontier.step))
        await self.compute.run(versions.reset)
        # From here on an earlier binding that trained this step can no longer commit it.
        await self._claims.supersede()
