"""Training of a job's policies by trainer workers: bind, run steps, restart, save checkpoints.

`Trainers` are all policies of a job. Each `PolicyTrainer` waits for a worker that the trainer
scheduler assigns to its lease, binds the policy there, and goes on elsewhere when it is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

from services.orchestrator.context import JobContext
from services.orchestrator.crash_loops import CrashLoopGuard
from services.orchestrator.errors import RENEWABLE, Deadline, RetryBackoff, run_all, wait_for_first
from services.orchestrator.jobs.checkpoints import copy_to_job_directory
from services.orchestrator.placement.trainer_lease import TrainerLease
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import kinds
from troupe.rpc import DeadlineExceeded, FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import trainer_pb2 as trainer_pb

# Called with a step's weights before their commit, and with None if they may never be committed.
Stepped: TypeAlias = Callable[[common_pb.WeightsRef | None], None]
# Kinds of errors of a worker that cannot hold the policy; another one may.
_TOO_LARGE: Final = (kinds.POLICY_TOO_LARGE, kinds.GANG_TOO_LARGE, kinds.GANG_UNEVEN)
# Kinds of errors of a gang whose ranks have ended, or did not come.
_GANG_ENDED: Final = frozenset({kinds.GANG_LOST, kinds.GANG_INCOMPLETE})
# Time limit of a checkpoint, with all attempts: it must not hold up the job for long. Plus an
# allowance per byte of the weights, which are read, written and perhaps copied from another host.
_CHECKPOINT_SECONDS: Final = 300.0
_CHECKPOINT_BYTES_PER_SECOND: Final = 32e6


class Trainers:
    """The trainers of all policies of a job except its population's slots."""

    def __init__(
        self,
        job: JobContext,
        versions: Mapping[str, store_pb.PolicyVersion],
        tables: TableWatch | None = None,
    ) -> None:
        """`versions`: the newest version of each policy that has one. `tables` reports how much of
        a step is ready; without it no step can run."""
        self._job = job
        self.tables = tables
        self.policies = {
            name: PolicyTrainer(job, self, name, versions.get(name))
            for name in job.spec.policies
            if name not in job.spec.slots
        }

    async def bind_all(self, deadline: Deadline) -> dict[str, common_pb.WeightsRef]:
        """Bind every policy that is not bound; return the weights of each."""
        trainers = self.policies.values()
        await run_all(*(trainer.bind(deadline) for trainer in trainers))
        return {trainer.policy: trainer.weights for trainer in trainers}

    async def offload(self, policies: Collection[str], deadline: Deadline) -> None:
        """Have the training states of policies moved off their devices."""
        await run_all(*(self.policies[policy].offload(deadline) for policy in policies))

    async def republish(self, policy: str) -> None:
        """Publish a policy's weights again, since no host has them any more."""
        trainer = self.policies[policy]
        await trainer.rebind(
            Deadline(
                f"publishing {policy} again",
                self._job.shared.settings.bind_timeout_seconds,
                "bind_timeout_seconds",
            )
        )

    async def release(self, seconds: float) -> None:
        """Release all policies, as far as workers answer."""
        await asyncio.gather(
            *(trainer.release(seconds) for trainer in self.policies.values()),
            return_exceptions=True,
        )

    @property
    def wait_for_others(self) -> bool:
        """Whether policies have work, but all trainers that could do it have policies of other
        jobs."""
        leases = [trainer.lease for trainer in self.policies.values()]
        return any(one.waits for one in leases) and not any(one.workers.leader for one in leases)

    def began_with(self, versions: Mapping[str, int]) -> None:
        """Sets, by policy, the version of its restart: older versions' samples are not trained."""
        for policy, version in versions.items():
            self.policies[policy].oldest = version

    def close(self) -> None:
        """End all leases. Repeatable."""
        for trainer in self.policies.values():
            trainer.close()

    def swaps(self) -> dict[str, float]:
        """Return the metrics of suspensions and resumptions since the last call."""
        found: dict[str, float] = {}
        for name, trainer in self.policies.items():
            for what, value in trainer.take_swaps().items():
                found[f"{name}/train/{what}"] = value
        return found


class PolicyTrainer:
    """The trainer of one policy. It alone binds the policy, so only one worker trains it at a
    time."""

    def __init__(
        self,
        job: JobContext,
        team: Trainers,
        policy: str,
        newest: store_pb.PolicyVersion | None,
    ) -> None:
        self._job = job
        self.policy = policy
        self.lease = TrainerLease(job, policy, team.tables)
        self._workers = self.lease.workers
        self._workers.was_bound = newest is not None
        self._weights = None if newest is None else newest.weights
        self._binding = asyncio.Lock()
        # The version of its latest restart (`population.restart`), if any.
        self.oldest = 0
        # Whether `Bind` must publish the weights again, since no host has them.
        self._publish = False
        self._crash_guard = CrashLoopGuard(
            job.shared.workers,
            job.shared.deaths,
            job.job_id,
            job.spec.limits.worker_deaths,
            f"loaded or trained {policy}",
            f"policies.{policy}",
            "Look into the trainers' logs for the cause. If it was memory, lower "
            "`pipeline.micro_batch_tokens`. Then resume the job.",
        )

    @property
    def weights(self) -> common_pb.WeightsRef:
        """The newest committed weights; only after it was bound."""
        assert self._weights is not None, "bound before"
        return self._weights

    @property
    def worker(self) -> WorkerHandle | None:
        """The worker assigned to it, which has bound it or is about to."""
        return self._workers.leader

    @property
    def progress(self) -> trainer_pb.StepEvent | None:
        """The newest event of the running step, if there is one."""
        return self.lease.demand.progress

    @property
    def shortage(self) -> str:
        """Text that says which gang is waited for while trainers form smaller ones; else empty."""
        few = self._workers.shortage
        what = (
            "" if few is None else f"its gang has {few.ranks}, the trainers form one of {few.most}"
        )
        return what and f"{self.policy} waits for devices: {what}"

    @property
    def suspended(self) -> bool:
        """Whether its training state is suspended and waits for a device."""
        return self.lease.suspension.state is not None

    def take_swaps(self) -> dict[str, float]:
        """Return the suspensions and resumptions since the last call, and the seconds they cost."""
        count, seconds = self.lease.suspension.take_swaps()
        return {"swaps": float(count), "swap_seconds": seconds} if count else {}

    async def bind(self, deadline: Deadline) -> WorkerHandle:
        """Return the worker that has bound the policy; bind it if there is none."""
        with self.lease.demand.needed():
            return await self._bind(deadline)

    async def _bind(self, deadline: Deadline) -> WorkerHandle:
        attempts, lease, deaths = RetryBackoff(deadline), self.lease, self._job.shared.deaths
        async with self._binding:
            while True:
                self._crash_guard.check()
                worker = await self._next_worker(deadline)
                if self._workers.bound:
                    return worker
                if not deaths.may_begin(self._job.job_id):
                    deadline.report(f"{self.policy} waits: workers died that several jobs were on")
                    await deadline.wait(deaths.turn(self._job.job_id))
                    continue
                try:
                    with lease.demand.in_use():
                        await self._bind_to(worker, deadline)
                except TroupeError as error:
                    if isinstance(error, Unavailable):
                        self._crash_guard.note(worker)
                    if isinstance(error, FailedPrecondition) and error.kind in _TOO_LARGE:
                        # Bytes; of a gang it is ranks.
                        value = (error.value or "") if error.kind == kinds.POLICY_TOO_LARGE else ""
                        lease.too_large_for(worker, int(value) if value.isdigit() else 0, error)
                        continue
                    self._leave(worker)
                    await attempts.failed(error)
                    if attempts.worth_a_notice:
                        await self._job.warn(f"{self.policy} on {worker}: {error}")

    async def rebind(self, deadline: Deadline) -> None:
        """Bind again, which publishes the weights again."""
        self._publish, self._workers.bound = True, False
        await self.bind(deadline)

    async def run_step(
        self, step: int, deadline: Deadline, stepped: Stepped = lambda weights: None
    ) -> store_pb.StepCommit:
        """Train a step and return its commit, on as many workers as it takes. `stepped` is called
        with the step's weights as soon as they can be sent, perhaps repeatedly; with None when
        they may never be committed."""
        attempts, lease = RetryBackoff(deadline), self.lease
        with lease.demand.training(step):
            while True:
                try:
                    if attempts.count and (commit := await self._committed(step)) is not None:
                        return self.adopt(commit)
                    worker = await self._bind(deadline)
                    commit = await self._follow(worker, step, deadline, attempts, stepped)
                    if commit.outcome == store_pb.STEP_OUTCOME_APPLIED:
                        self._weights = commit.weights
                    self._crash_guard.clear()
                    return commit
                except TroupeError as error:
                    stepped(None)
                    await deadline.wait(lease.settled())
                    if error.kind == kinds.STEP_SUSPENDED or self.suspended:
                        continue  # it is resumed when the scheduler assigns a worker
                    self.unbind_after(error)
                    if (attempts.count + 1).bit_count() == 1:  # 1, 2, 4, ...
                        await self._job.warn(f"training of {self.policy}, step {step + 1}: {error}")
                    await attempts.failed(error)

    def adopt(self, commit: store_pb.StepCommit) -> store_pb.StepCommit:
        """Take over a commit that is in the store and that no worker has reported to this
        process."""
        applied = commit.outcome == store_pb.STEP_OUTCOME_APPLIED
        # In mode async the policy may already be further.
        if applied and commit.weights.version > self.weights.version:
            self._weights = commit.weights
            # The bound worker, or the suspended state, may still be at the version before.
            self._workers.bound = False
            self.lease.suspension.discard()
        return commit

    async def restart(self, left: int, checksum: str, deadline: Deadline) -> common_pb.WeightsRef:
        """Make the first weights (`checksum`) the version after `left`, without a step.

        Repeatable; no step may be open.

        Raises `TroupeError`: FailedPrecondition of kind "state_not_found" or "weights_changed"
        when the first version is not there as it was.
        """
        attempts, weight_versions = RetryBackoff(deadline), self._job.shared.weight_versions
        while True:
            try:
                with self.lease.demand.needed():
                    worker = await self._bind(deadline)
                    if self.weights.version != left:
                        return self.weights  # an earlier attempt came this far
                    request = trainer_pb.RestartRequest(
                        request_id=f"{self._job.job_id}-{self.policy}-restart-{left}",
                        job_id=self._job.job_id,
                        policy=self.policy,
                        version=left,
                        checksum=checksum,
                    )
                    deadline.report(f"{self.policy} begins again")
                    with self.lease.demand.in_use():
                        async with self._workers.while_alive(worker):
                            response = await worker.trainer.Restart(request, timeout=deadline.left)
                job_id, epoch = self._job.job_id, self._job.epoch
                steps_done = (await weight_versions.newest(job_id))[self.policy].step
                newest = await weight_versions.restart(job_id, epoch, steps_done, response.weights)
                self._weights = newest.weights
                return newest.weights
            except TroupeError as error:
                self.unbind_after(error)
                await attempts.failed(error)

    async def save_checkpoint(self) -> trainer_pb.SaveCheckpointResponse:
        """Write the newest weights as a checkpoint. Raises `TroupeError` when that fails."""
        seconds = _CHECKPOINT_SECONDS + self.weights.num_bytes / _CHECKPOINT_BYTES_PER_SECOND
        deadline = Deadline(f"the checkpoint of {self.policy}", seconds, "checkpoint")
        attempts = RetryBackoff(deadline)
        while True:
            try:
                worker = await self.bind(deadline)
                request = trainer_pb.SaveCheckpointRequest(
                    request_id=new_id("checkpoint"),
                    job_id=self._job.job_id,
                    policy=self.policy,
                    version=self.weights.version,
                )
                async with self._workers.while_alive(worker):
                    saved = await worker.trainer.SaveCheckpoint(request, timeout=deadline.left)
                    return await copy_to_job_directory(
                        self._job, worker, request, saved, deadline.left
                    )
            except TroupeError as error:
                self.unbind_after(error)
                await attempts.failed(error)

    @property
    def checkpoint_progress(self) -> tuple[int, int]:
        """Written and all bytes of the checkpoint that its worker writes, as of its heartbeat."""
        key = (self._job.job_id, self.policy)
        worker = self.worker
        for one in () if worker is None else worker.beat.bindings:
            if (one.job_id, one.policy) == key:
                return one.checkpoint_written_bytes, one.checkpoint_bytes
        return 0, 0

    async def offload(self, deadline: Deadline) -> None:
        """Have the training state moved to the host's memory, since engines get its devices.

        Repeatable; no step may run. Raises `TroupeError` when that does not succeed in time.
        """
        attempts, lease = RetryBackoff(deadline), self.lease
        async with self._binding:
            await deadline.wait(lease.settled())
            while (worker := self.worker) is not None:
                deadline.report(f"moving the training state of {self.policy} off its devices")
                lease.suspend(free_device=True)
                await deadline.wait(lease.settled())
                if self.worker is worker:
                    await attempts.failed(
                        Unavailable(f"{worker} did not suspend {self.policy}; see its log")
                    )

    async def release(self, seconds: float) -> None:
        """Free devices and memory. Raises `TroupeError`."""
        await self.lease.release(seconds)

    def close(self) -> None:
        """End the lease."""
        self.lease.close()

    async def _next_worker(self, deadline: Deadline) -> WorkerHandle:
        """Wait for the worker that the scheduler assigns."""
        lease, registry = self.lease, self._job.shared.workers
        while True:
            self._workers.check()
            await deadline.wait(lease.settled())
            if (worker := self.worker) is not None and worker.alive:
                if not self._workers.broken:
                    return worker
                lease.give_up_group()
                continue
            if self.shortage:
                deadline.report(self.shortage)
            elif registry.usable(orchestrator_pb.WORKER_KIND_TRAINER):
                deadline.report(f"{self.policy} waits for its turn on a trainer worker")
            else:
                deadline.report(f"waiting for a trainer worker for {self.policy}")
            await deadline.wait(wait_for_first(self._workers.change(), registry.change()))
            self._crash_guard.check()

    async def _bind_to(self, worker: WorkerHandle, deadline: Deadline) -> None:
        known, lease = self._weights, self.lease
        if known is not None and (state := lease.suspension.state) is not None:
            resumed = state.version == known.version and await self._resume(worker, state, deadline)
            lease.suspension.discard()
            if resumed and not self._publish:
                return
        request = trainer_pb.BindRequest(
            request_id=new_id("bind"),
            job_id=self._job.job_id,
            policy=self.policy,
            spec_json=await lease.specification_on(worker),
            version=0 if known is None else known.version,
            checksum="" if known is None else known.checksum,
            hosts=self._workers.hosts,
        )
        limit = min(deadline.left, self._job.shared.settings.bind_timeout_seconds)
        deadline.report(f"loading {self.policy} on {worker}")
        async with self._workers.while_alive(worker):
            response = await worker.trainer.Bind(request, timeout=limit)
        resolved = self.lease.demand.memory.resolved(response.resolved)
        await self._job.shared.store.note_resolved(self._job.job_id, resolved)
        if known is None:
            newest = await self._job.shared.weight_versions.open(
                self._job.job_id, self._job.epoch, response.weights
            )
            self._weights = newest.weights
        elif response.weights.checksum != known.checksum:
            raise FailedPrecondition(
                f"{worker} loaded {self.policy}@{known.version} with checksum "
                f"{response.weights.checksum}; the committed version has {known.checksum}",
                kind="checksum_conflict",
                field=f"policies.{self.policy}",
                remedy="The training state was lost or changed; submit a new job.",
            )
        else:
            # The hosts that have the weights may have changed with the binding.
            self._weights = response.weights
        self._publish = False
        lease.mark_bound(response.state_bytes)

    async def _resume(
        self, worker: WorkerHandle, state: trainer_pb.SuspendedState, deadline: Deadline
    ) -> bool:
        """Resume the suspended state on `worker`; False: bind from the published weights instead.

        Called once per state, since after a call without an answer its owner is unknown. Raises
        `TroupeError` if the worker was lost.
        """
        request = trainer_pb.ResumeRequest(
            request_id=new_id("resume"),
            job_id=self._job.job_id,
            policy=self.policy,
            spec_json=await self.lease.specification_on(worker),
            version=self.weights.version,
            checksum=self.weights.checksum,
            state=state,
            hosts=self._workers.hosts,
        )
        deadline.report(f"resuming {self.policy} on {worker}")
        limit = min(deadline.left, self._job.shared.settings.bind_timeout_seconds)
        try:
            async with self._workers.while_alive(worker):
                response = await worker.trainer.Resume(request, timeout=limit)
        except TroupeError as error:
            self.lease.suspension.discard()
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                raise
            begins = f", step {state.step + 1} restarts" if state.HasField("step") else ""
            await self._job.warn(f"{self.policy} is reloaded on {worker}{begins}: {error}")
            return False
        resolved = self.lease.demand.memory.resolved(response.resolved)
        await self._job.shared.store.note_resolved(self._job.job_id, resolved)
        self.lease.suspension.resumed(response.seconds)
        self.lease.mark_bound(response.state_bytes)
        return True

    async def _follow(
        self,
        worker: WorkerHandle,
        step: int,
        deadline: Deadline,
        attempts: RetryBackoff,
        stepped: Stepped,
    ) -> store_pb.StepCommit:
        request = trainer_pb.RunStepRequest(
            request_id=f"{self._job.job_id}-{self.policy}-{step}",
            job_id=self._job.job_id,
            policy=self.policy,
            step=step,
            version=self.weights.version,
            oldest_version=max(
                self.oldest, self.weights.version - self._job.spec.alpha_of(self.policy)
            ),
        )
        async with self._workers.while_alive(worker):
            async for event in worker.trainer.RunStep(request, timeout=deadline.left):
                if self.progress is None or event.samples > self.progress.samples:
                    attempts.reset()
                self.lease.demand.note(event)
                if event.HasField("commit"):
                    return event.commit
                if event.HasField("stepped"):
                    stepped(event.stepped)
        raise Unavailable(f"{worker} ended the step of {self.policy} without a commit")

    async def _committed(self, step: int) -> store_pb.StepCommit | None:
        """Return the step's commit from the store."""
        request = store_pb.GetStepRequest(job_id=self._job.job_id, step=step, counts_only=True)
        found = await self._job.shared.experience.GetStep(request)
        return next((one for one in found.commits if one.policy == self.policy), None)

    def _leave(self, worker: WorkerHandle) -> None:
        """Give the worker up that could not bind the policy, or its group."""
        if len(self._workers.group) > 1:
            self._note_lost()
            self.lease.give_up_group()
        else:
            self._workers.unassign(avoid=worker)

    def unbind_after(self, error: TroupeError) -> None:
        """Forget the binding if the worker is lost or says that there is none, and the group of a
        gang that has ended."""
        workers = self._workers
        if self.worker is not None and isinstance(error, Unavailable):
            self._crash_guard.note(self.worker)
        if self.worker is not None and not self.worker.alive:
            workers.unassign()
        elif len(workers.group) > 1 and (workers.broken or error.kind in _GANG_ENDED):
            self._note_lost()
            self.lease.give_up_group()
        elif error.kind in RENEWABLE:
            workers.bound = False

    def _note_lost(self) -> None:
        for member in self._workers.group[1:]:
            if not member.alive:
                self._crash_guard.note(member)
