"""Bindings of a job's policies to trainer workers, and the steps that they do there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.faults import RENEWABLE, Attempts, Patience, together
from services.orchestrator.ledger import Entry
from services.orchestrator.remote_checkpoints import at_hand
from services.orchestrator.victims import Victims
from services.orchestrator.workers import Worker
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.scheduling import placement
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import trainer_pb2 as tr

# A frozen policy is loaded but never computes.
_FROZEN_COST: Final = 0.25
# Writing a checkpoint is worth a few attempts, not the job.
_CHECKPOINT_SECONDS: Final = 300.0


class Trainers:
    """Every policy of a job, each bound to one trainer worker at a time."""

    def __init__(self, job: JobContext, entries: Mapping[str, Entry]) -> None:
        self._job = job
        self.policies = {
            name: PolicyTrainer(job, self, name, entries.get(name)) for name in job.spec.policies
        }

    async def bind_all(self, patience: Patience) -> dict[str, pb.WeightsRef]:
        """Bind what is not bound; the weights that each policy has now."""
        trainers = self.policies.values()
        await together(*(trainer.bind(patience) for trainer in trainers))
        return {trainer.policy: trainer.weights for trainer in trainers}

    def place(self, policy: str, avoid: Worker | None) -> Worker | None:
        """The worker where `policy` goes, given where the others are; `avoid` if need be."""
        usable = self._job.shared.workers.usable(orch.WORKER_KIND_TRAINER)
        workers = [worker for worker in usable if worker is not avoid] or usable
        if not workers:
            return None
        costs = {
            name: 1.0 if self._job.spec.policies[name].trainable else _FROZEN_COST
            for name in self.policies
        }
        loads = [
            placement.TrainerWorker(
                worker.worker_id,
                sum(
                    one.job_id != self._job.job_id and one.state != pb.BINDING_STATE_RELEASED
                    for one in worker.beat.bindings
                ),
            )
            for worker in workers
        ]
        # A binding that an earlier orchestrator made is as good as one of ours.
        bound = {
            one.policy: worker.worker_id
            for worker in workers
            for one in worker.beat.bindings
            if one.job_id == self._job.job_id and one.state != pb.BINDING_STATE_RELEASED
        }
        bound |= {
            name: trainer.worker.worker_id
            for name, trainer in self.policies.items()
            if trainer.worker is not None
        }
        placed = placement.place_policies(costs, loads, bound=bound)
        return next(worker for worker in workers if worker.worker_id == placed[policy])

    async def republish(self, policy: str) -> None:
        """Publish a policy's weights again: they are not where they were."""
        trainer = self.policies[policy]
        await trainer.rebind(
            Patience(
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


class PolicyTrainer:
    """One policy: where it is bound, its weights, and its steps. It is the only one that binds
    this policy, so there is one binding at a time that the store listens to."""

    def __init__(self, job: JobContext, team: Trainers, policy: str, entry: Entry | None) -> None:
        self._job = job
        self._team = team
        self.policy = policy
        self.worker: Worker | None = None
        self._weights = None if entry is None else entry.weights
        # Progress of the step that runs, if one does.
        self.progress: tr.StepEvent | None = None
        self._binding = asyncio.Lock()
        # Where binding failed last: try another, if there is one.
        self._avoid: Worker | None = None
        self._victims = Victims(
            job.shared.workers,
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

    async def bind(self, patience: Patience) -> Worker:
        """Bind to a worker unless bound to a living one; try elsewhere when that fails."""
        attempts = Attempts(patience)
        async with self._binding:
            while self.worker is None or not self.worker.alive:
                self._victims.check()
                worker = await self._next_worker(patience)
                try:
                    await self._bind_to(worker, patience)
                except TroupeError as error:
                    if isinstance(error, Unavailable):
                        self._victims.note(worker)
                    self.worker, self._avoid = None, worker
                    await attempts.failed(error)
                    if attempts.worth_a_notice:
                        await self._job.warn(f"{self.policy} on {worker}: {error}")
            return self.worker

    async def rebind(self, patience: Patience) -> None:
        """Bind again, to publish again."""
        self.worker = None
        await self.bind(patience)

    async def run_step(self, step: int, patience: Patience) -> es.StepCommit:
        """The commit of this policy's step `step`, whatever workers come and go meanwhile."""
        attempts = Attempts(patience)
        try:
            while True:
                try:
                    if attempts.count and (commit := await self._committed(step)) is not None:
                        return self.adopt(commit)
                    worker = await self.bind(patience)
                    commit = await self._follow(worker, step, patience, attempts)
                    if commit.outcome == es.STEP_OUTCOME_APPLIED:
                        self._weights = commit.weights
                    self._victims.clear()
                    return commit
                except TroupeError as error:
                    self._unbind_after(error)
                    if (attempts.count + 1).bit_count() == 1:  # 1, 2, 4, ...
                        await self._job.warn(f"training of {self.policy}, step {step + 1}: {error}")
                    await attempts.failed(error)
        finally:
            self.progress = None

    def adopt(self, commit: es.StepCommit) -> es.StepCommit:
        """Take over a commit that the store knows and that no worker of ours has told of."""
        applied = commit.outcome == es.STEP_OUTCOME_APPLIED
        # A policy that leads may be further already.
        if applied and commit.weights.version > self.weights.version:
            self._weights = commit.weights
            # Whoever is bound may still be at the version before.
            self.worker = None
        return commit

    async def save_checkpoint(self) -> tr.SaveCheckpointResponse:
        """Write the newest weights as a checkpoint. Raises `TroupeError` when that fails."""
        patience = Patience(f"the checkpoint of {self.policy}", _CHECKPOINT_SECONDS, "checkpoint")
        attempts = Attempts(patience)
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
                self._unbind_after(error)
                await attempts.failed(error)

    async def release(self, seconds: float) -> None:
        """Give the devices back."""
        worker, self.worker = self.worker, None
        if worker is None or not worker.alive:
            return
        request = tr.ReleaseRequest(
            request_id=new_id("release"), job_id=self._job.job_id, policy=self.policy
        )
        await worker.trainer.Release(request, timeout=seconds)

    async def _next_worker(self, patience: Patience) -> Worker:
        while (worker := self._team.place(self.policy, self._avoid)) is None:
            patience.say(f"waiting for a trainer worker for {self.policy}")
            await patience.wait(self._job.shared.workers.change())
            self._victims.check()
        # From here on the placement of the others counts it.
        self.worker = worker
        return worker

    async def _bind_to(self, worker: Worker, patience: Patience) -> None:
        known = self._weights
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

    async def _follow(
        self, worker: Worker, step: int, patience: Patience, attempts: Attempts
    ) -> es.StepCommit:
        request = tr.RunStepRequest(
            request_id=f"{self._job.job_id}-{self.policy}-{step}",
            job_id=self._job.job_id,
            policy=self.policy,
            step=step,
            version=self.weights.version,
            oldest_version=max(0, self.weights.version - self._job.spec.alpha_of(self.policy)),
        )
        async with worker.while_alive():
            async for event in worker.trainer.RunStep(request, timeout=patience.left):
                if self.progress is None or event.samples > self.progress.samples:
                    attempts.reset()
                self.progress = event
                if event.HasField("commit"):
                    return event.commit
        raise Unavailable(f"{worker} ended the step of {self.policy} without a commit")

    async def _committed(self, step: int) -> es.StepCommit | None:
        """What the store knows: the one truth about commits."""
        request = es.GetStepRequest(job_id=self._job.job_id, step=step, counts_only=True)
        found = await self._job.shared.experience.GetStep(request)
        return next((one for one in found.commits if one.policy == self.policy), None)

    def _unbind_after(self, error: TroupeError) -> None:
        """Forget the binding if it is gone, or if the worker says that there is none."""
        if self.worker is not None and isinstance(error, Unavailable):
            self._victims.note(self.worker)
        if self.worker is not None and (not self.worker.alive or error.kind in RENEWABLE):
            self.worker = None
