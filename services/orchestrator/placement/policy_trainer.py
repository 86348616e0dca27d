"""Bindings of a job's policies to trainer workers, and the steps that they do there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.crash_loops import CrashLoopGuard
from services.orchestrator.errors import RENEWABLE, Deadline, RetryBackoff, either, together
from services.orchestrator.jobs.checkpoints import at_hand
from services.orchestrator.placement.trainer_lease import TrainerLease
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.placement.workers import WorkerHandle
from services.orchestrator.state.weight_versions import VersionEntry
from troupe.rpc import DeadlineExceeded, FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import trainer_pb2 as tr

# What a step says that was suspended.
_SUSPENDED: Final = "step_suspended"
# This worker cannot hold the policy; another may.
_TOO_LARGE: Final = ("policy_too_large", "gang_too_large", "gang_uneven")
# Writing a checkpoint is worth a few attempts, not the job.
_CHECKPOINT_SECONDS: Final = 300.0


class Trainers:
    """Every policy of a job, each bound to one trainer worker at a time."""

    def __init__(
        self, job: JobContext, entries: Mapping[str, VersionEntry], tables: TableWatch | None = None
    ) -> None:
        """`tables` says how much of a step is ready; without it no step is run."""
        self._job = job
        self.tables = tables
        self.policies = {
            name: PolicyTrainer(job, self, name, entries.get(name))
            for name in job.spec.policies
            if name not in job.spec.slots
        }

    async def bind_all(self, patience: Deadline) -> dict[str, pb.WeightsRef]:
        """Bind what is not bound; the weights that each policy has now."""
        trainers = self.policies.values()
        await together(*(trainer.bind(patience) for trainer in trainers))
        return {trainer.policy: trainer.weights for trainer in trainers}

    async def republish(self, policy: str) -> None:
        """Publish a policy's weights again: they are not where they were."""
        trainer = self.policies[policy]
        await trainer.rebind(
            Deadline(
                f"publishing {policy} again",
                self._job.shared.settings.bind_timeout_seconds,
                "bind_timeout_seconds",
            )
        )

    async def release(self, seconds: float) -> None:
        """Give all devices back; who does not answer is left."""
        await asyncio.gather(
            *(trainer.release(seconds) for trainer in self.policies.values()),
            return_exceptions=True,
        )

    def began_with(self, versions: Mapping[str, int]) -> None:
        """By policy: samples that an older version began are not trained any more."""
        for policy, version in versions.items():
            self.policies[policy].oldest = version

    def close(self) -> None:
        """Nobody trains with these any more. Repeatable."""
        for trainer in self.policies.values():
            trainer.close()

    def swaps(self) -> dict[str, float]:
        """Metrics of the policies that came and went since they were asked for last."""
        found: dict[str, float] = {}
        for name, trainer in self.policies.items():
            for what, value in trainer.take_swaps().items():
                found[f"{name}/train/{what}"] = value
        return found


class PolicyTrainer:
    """One policy: where it is bound, its weights, and its steps. It is the only one that binds
    this policy, so there is one binding at a time that the store listens to."""

    def __init__(
        self, job: JobContext, team: Trainers, policy: str, entry: VersionEntry | None
    ) -> None:
        self._job = job
        self.policy = policy
        self._seat = TrainerLease(job, policy, team.tables)
        self._weights = None if entry is None else entry.weights
        self._binding = asyncio.Lock()
        # The version that it began again with, if it did.
        self.oldest = 0
        # What it published is not where it was: Bind publishes again.
        self._publish = False
        self._victims = CrashLoopGuard(
            job.shared.workers,
            job.shared.deaths,
            job.job_id,
            job.spec.limits.worker_deaths,
            f"loaded or trained {policy}",
            f"policies.{policy}",
            "Look into the trainers' logs for what ended them. If it was memory, lower "
            "`pipeline.micro_batch_tokens`. Then resume the job.",
        )

    @property
    def weights(self) -> pb.WeightsRef:
        """The newest committed weights; known once bound."""
        assert self._weights is not None, "bound before"
        return self._weights

    @property
    def worker(self) -> WorkerHandle | None:
        """Who holds it, or is about to."""
        return self._seat.worker

    @property
    def progress(self) -> tr.StepEvent | None:
        """Of the step that runs, if one does."""
        return self._seat.progress

    @property
    def suspended(self) -> bool:
        """Whether its state waits for a device."""
        return self._seat.suspended is not None

    def take_swaps(self) -> dict[str, float]:
        """How often it came and went since this was asked last, and what that cost."""
        seat = self._seat
        if not seat.swaps:
            return {}
        found = {"swaps": float(seat.swaps), "swap_seconds": seat.swap_seconds}
        seat.swaps, seat.swap_seconds = 0, 0.0
        return found

    async def bind(self, patience: Deadline) -> WorkerHandle:
        """Bind to a worker unless bound to a living one; try elsewhere when that fails."""
        with self._seat.visit():
            return await self._bind(patience)

    async def _bind(self, patience: Deadline) -> WorkerHandle:
        attempts, seat, deaths = RetryBackoff(patience), self._seat, self._job.shared.deaths
        async with self._binding:
            while True:
                self._victims.check()
                worker = await self._next_worker(patience)
                if seat.bound:
                    return worker
                if not deaths.may_begin(self._job.job_id):
                    patience.say(f"{self.policy} waits: workers died that several jobs were on")
                    await patience.wait(deaths.turn(self._job.job_id))
                    continue
                try:
                    with seat.in_use():
                        await self._bind_to(worker, patience)
                except TroupeError as error:
                    if isinstance(error, Unavailable):
                        self._victims.note(worker)
                    if error.kind in _TOO_LARGE:
                        # Bytes; of a gang it is ranks.
                        value = (error.value or "") if error.kind == "policy_too_large" else ""
                        if seat.too_large_for(worker, int(value) if value.isdigit() else 0):
                            raise
                        continue
                    seat.vacate(avoid=worker)
                    await attempts.failed(error)
                    if attempts.worth_a_notice:
                        await self._job.warn(f"{self.policy} on {worker}: {error}")

    async def rebind(self, patience: Deadline) -> None:
        """Bind again, to publish again."""
        self._publish, self._seat.bound = True, False
        await self.bind(patience)

    async def run_step(self, step: int, patience: Deadline) -> es.StepCommit:
        """The commit of this policy's step `step`, whatever workers come and go meanwhile."""
        attempts, seat = RetryBackoff(patience), self._seat
        with seat.training(step):
            while True:
                try:
                    if attempts.count and (commit := await self._committed(step)) is not None:
                        return self.adopt(commit)
                    worker = await self._bind(patience)
                    commit = await self._follow(worker, step, patience, attempts)
                    if commit.outcome == es.STEP_OUTCOME_APPLIED:
                        self._weights = commit.weights
                    self._victims.clear()
                    return commit
                except TroupeError as error:
                    await patience.wait(seat.settled())
                    if error.kind == _SUSPENDED or (seat.suspended is not None):
                        continue  # it goes on where it was once it is its turn
                    self.unbind_after(error)
                    if (attempts.count + 1).bit_count() == 1:  # 1, 2, 4, ...
                        await self._job.warn(f"training of {self.policy}, step {step + 1}: {error}")
                    await attempts.failed(error)

    def adopt(self, commit: es.StepCommit) -> es.StepCommit:
        """Take over a commit that the store knows and that no worker of ours has told of."""
        applied = commit.outcome == es.STEP_OUTCOME_APPLIED
        # A policy that leads may be further already.
        if applied and commit.weights.version > self.weights.version:
            self._weights = commit.weights
            # Whoever is bound, or suspended, may still be at the version before.
            self._seat.bound = False
            self._seat.drop()
        return commit

    async def restart(self, left: int, checksum: str, patience: Deadline) -> pb.WeightsRef:
        """Have the first weights (`checksum`) as the version after `left`, without a step; the
        ledger moves. Repeatable; no step is open.

        Raises `TroupeError`: FailedPrecondition of kind "state_not_found" or "weights_changed"
        when the first version is not there as it was.
        """
        attempts, ledger = RetryBackoff(patience), self._job.shared.ledger
        while True:
            try:
                with self._seat.visit():
                    worker = await self._bind(patience)
                    if self.weights.version != left:
                        return self.weights  # whoever began this came so far
                    request = tr.RestartRequest(
                        request_id=f"{self._job.job_id}-{self.policy}-restart-{left}",
                        job_id=self._job.job_id,
                        policy=self.policy,
                        version=left,
                        checksum=checksum,
                    )
                    patience.say(f"{self.policy} begins again")
                    with self._seat.in_use():
                        async with worker.while_alive():
                            response = await worker.trainer.Restart(request, timeout=patience.left)
                done = (await ledger.entries(self._job.job_id))[self.policy].done
                entry = await ledger.restart(self._job.job_id, done, response.weights)
                self._weights = entry.weights
                return entry.weights
            except TroupeError as error:
                self.unbind_after(error)
                await attempts.failed(error)

    async def save_checkpoint(self) -> tr.SaveCheckpointResponse:
        """Write the newest weights as a checkpoint. Raises `TroupeError` when that fails."""
        patience = Deadline(f"the checkpoint of {self.policy}", _CHECKPOINT_SECONDS, "checkpoint")
        attempts = RetryBackoff(patience)
        while True:
            try:
                worker = await self.bind(patience)
                request = tr.SaveCheckpointRequest(
                    request_id=new_id("checkpoint"),
                    job_id=self._job.job_id,
                    policy=self.policy,
                    version=self.weights.version,
                )
                async with worker.while_alive():
                    saved = await worker.trainer.SaveCheckpoint(request, timeout=patience.left)
                    return await at_hand(self._job, worker, request, saved, patience.left)
            except TroupeError as error:
                self.unbind_after(error)
                await attempts.failed(error)

    async def release(self, seconds: float) -> None:
        """Give the devices back. Raises `TroupeError`."""
        await self._seat.release(seconds)

    def close(self) -> None:
        """Nobody needs it any more."""
        self._seat.close()

    async def _next_worker(self, patience: Deadline) -> WorkerHandle:
        """The worker where it may be bound: as soon as the binder has one for it."""
        seat, workers = self._seat, self._job.shared.workers
        while True:
            seat.check()
            await patience.wait(seat.settled())
            if (worker := seat.worker) is not None and worker.alive:
                return worker
            if workers.usable(orch.WORKER_KIND_TRAINER):
                patience.say(f"{self.policy} waits for its turn on a trainer worker")
            else:
                patience.say(f"waiting for a trainer worker for {self.policy}")
            await patience.wait(either(seat.change(), workers.change()))
            self._victims.check()

    async def _bind_to(self, worker: WorkerHandle, patience: Deadline) -> None:
        known, seat = self._weights, self._seat
        if known is not None and (state := seat.suspended) is not None:
            resumed = state.version == known.version and await self._resume(worker, state, patience)
            seat.drop()
            if resumed and not self._publish:
                return
        request = tr.BindRequest(
            request_id=new_id("bind"),
            job_id=self._job.job_id,
            policy=self.policy,
            spec_json=self._job.spec_json,
            version=0 if known is None else known.version,
            checksum="" if known is None else known.checksum,
        )
        limit = min(patience.left, self._job.shared.settings.bind_timeout_seconds)
        patience.say(f"loading {self.policy} on {worker}")
        async with worker.while_alive():
            response = await worker.trainer.Bind(request, timeout=limit)
        if known is None:
            entry = await self._job.shared.ledger.open(self._job.job_id, response.weights)
            self._weights = entry.weights
        elif response.weights.checksum != known.checksum:
            raise FailedPrecondition(
                f"{worker} loaded {self.policy}@{known.version} with checksum "
                f"{response.weights.checksum}; the ledger has {known.checksum}",
                kind="checksum_conflict",
                field=f"policies.{self.policy}",
                remedy="The training state was lost or changed; submit a new job.",
            )
        else:
            # Where the weights are may have changed with the binding.
            self._weights = response.weights
        self._publish = False
        seat.was_bound(response.state_bytes)

    async def _resume(
        self, worker: WorkerHandle, state: tr.SuspendedState, patience: Deadline
    ) -> bool:
        """Whether `worker` goes on where it was suspended. Asked once: a state has one owner, and
        of a call without an answer nobody knows who that is.

        Raises `TroupeError` when the worker broke off.
        """
        request = tr.ResumeRequest(
            request_id=new_id("resume"),
            job_id=self._job.job_id,
            policy=self.policy,
            spec_json=self._job.spec_json,
            version=self.weights.version,
            checksum=self.weights.checksum,
            state=state,
        )
        patience.say(f"resuming {self.policy} on {worker}")
        limit = min(patience.left, self._job.shared.settings.bind_timeout_seconds)
        try:
            async with worker.while_alive():
                response = await worker.trainer.Resume(request, timeout=limit)
        except TroupeError as error:
            self._seat.drop()
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                raise
            begins = f", step {state.step + 1} begins again" if state.HasField("step") else ""
            await self._job.warn(f"{self.policy} is loaded afresh on {worker}{begins}: {error}")
            return False
        self._seat.count_swap(response.seconds)
        self._seat.was_bound(response.state_bytes)
        return True

    async def _follow(
        self, worker: WorkerHandle, step: int, patience: Deadline, attempts: RetryBackoff
    ) -> es.StepCommit:
        request = tr.RunStepRequest(
            request_id=f"{self._job.job_id}-{self.policy}-{step}",
            job_id=self._job.job_id,
            policy=self.policy,
            step=step,
            version=self.weights.version,
            oldest_version=max(
                self.oldest, self.weights.version - self._job.spec.alpha_of(self.policy)
            ),
        )
        async with worker.while_alive():
            async for event in worker.trainer.RunStep(request, timeout=patience.left):
                if self.progress is None or event.samples > self.progress.samples:
                    attempts.reset()
                self._seat.note(event)
                if event.HasField("commit"):
                    return event.commit
        raise Unavailable(f"{worker} ended the step of {self.policy} without a commit")

    async def _committed(self, step: int) -> es.StepCommit | None:
        """What the store knows: the one truth about commits."""
        request = es.GetStepRequest(job_id=self._job.job_id, step=step, counts_only=True)
        found = await self._job.shared.experience.GetStep(request)
        return next((one for one in found.commits if one.policy == self.policy), None)

    def unbind_after(self, error: TroupeError) -> None:
        """Forget the binding if it is gone, or if the worker says that there is none."""
        if self.worker is not None and isinstance(error, Unavailable):
            self._victims.note(self.worker)
        if self.worker is not None and not self.worker.alive:
            self._seat.vacate()
        elif error.kind in RENEWABLE:
            self._seat.bound = False
