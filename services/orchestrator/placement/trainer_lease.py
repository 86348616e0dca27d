"""The lease of one policy on trainer workers, as the trainer scheduler gives and takes it.

Combines the policy's demand, its workers and its suspended state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import RENEWABLE
from services.orchestrator.placement.leased_workers import LeasedWorkers
from services.orchestrator.placement.policy_demand import PolicyDemand
from services.orchestrator.placement.suspension import PolicySuspension
from services.orchestrator.placement.trainer_scheduler import TableWatch
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import kinds
from troupe.rpc import FailedPrecondition, TroupeError, Unavailable, new_id
from troupe.scheduling import binding
from troupe.v1 import trainer_pb2 as trainer_pb

_log = structlog.get_logger(__name__)
# Kinds of errors that mean that the policy is not bound there; nothing is left of a lost gang.
_UNBOUND: Final = RENEWABLE | {kinds.GANG_LOST}


class TrainerLease:
    """The lease of a policy: where it is bound or suspended, and its moves.

    `TrainerScheduler` assigns, suspends and releases. `PolicyTrainer` reports the policy's demand
    and the fate of its workers.
    """

    def __init__(self, job: JobContext, policy: str, tables: TableWatch | None) -> None:
        self._job, self._policy = job, policy
        self._scheduler = job.shared.trainer_scheduler
        touch, shared = self._scheduler.touch, job.shared
        self.name = f"{job.job_id}/{policy}"
        self.demand = PolicyDemand(job, policy, tables, touch)
        self.workers = LeasedWorkers(
            policy, shared.workers, shared.settings.gang_wait_seconds, touch
        )
        self.suspension = PolicySuspension(job.job_id, policy, shared.experience, touch)
        # The suspension or the end of a gang that is under way.
        self._leaving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduler.add(self)

    def scheduling_view(self, now: float) -> binding.Policy:
        """Return the policy for `binding.decide`; the scheduler adds where it is."""
        workers, suspension = self.workers, self.suspension
        view = self.demand.view(
            self.name, now, assigned=workers.leader is not None, suspended=suspension.state
        )
        leaving = self._leaving is not None
        return replace(
            view,
            bound_at=workers.bound_at,
            busy=view.busy or leaving or suspension.stuck(now),
            leaving=leaving,
            prefetched=frozenset(suspension.prefetched),
            barred=workers.barred,
            swap=suspension.swap_seconds,
        )

    @property
    def waits(self) -> bool:
        """Whether the policy has work, and no worker."""
        return self.workers.leader is None and self.demand.has_work

    def mark_bound(self, state_bytes: int) -> None:
        """Note that the leader has bound the policy; `state_bytes`: of its training state on each
        device, 0 if unknown."""
        self.demand.memory.measured(state_bytes)
        self.workers.mark_bound()

    def too_large_for(
        self, worker: WorkerHandle, state_bytes: int, error: FailedPrecondition
    ) -> None:
        """Give up `worker`, whose devices have no room for `state_bytes` (0: unknown)."""
        self.demand.memory.exceeds(state_bytes)
        self.workers.bar(worker, error)

    async def specification_on(self, worker: WorkerHandle) -> str:
        """Return the job's specification (JSON) for the group led by `worker`."""
        return await self.demand.memory.specification_on(worker, *self.workers.group[1:])

    def suspend(self, *, free_device: bool = False) -> None:
        """Have the policy suspended, so that another one may have its worker; `free_device`: or
        another process its device."""
        if self.workers.leader is not None and self._leaving is None:
            self._leaving = self._spawn(self._suspend(self.workers.leader, free_device))

    def give_up_group(self) -> None:
        """Have the leader release the policy, then give all of its workers up."""
        if self.workers.leader is not None and self._leaving is None:
            self.workers.bound = False
            self._leaving = self._spawn(self._give_up_group(self.workers.leader))

    async def settled(self) -> None:
        """Wait until a running suspension is over."""
        if self._leaving is not None:
            await asyncio.wait({self._leaving})

    def prefetch(self, worker: WorkerHandle) -> None:
        """Have the suspended state fetched to `worker`, where the policy will be bound next."""
        # Once: it is not repeated if it fails.
        self.suspension.prefetched.add(worker.worker_id)
        if (state := self.suspension.state) is not None:
            self.workers.touch(worker)
            self._spawn(self._prefetch(worker, state))
        # The worker fetches the state while the policy before is being suspended.
        self._scheduler.touch()

    def release_idle(self) -> None:
        """Release the policy, which has been idle for long."""
        self.demand.restart_idle_time()
        self._spawn(self._release_idle())

    async def release(self, seconds: float) -> None:
        """Free devices and memory of all workers that may hold the policy. Raises `TroupeError`."""
        touched = self.workers.take_touched()
        self.workers.unassign()
        self.suspension.discard()
        calls = [self._release_at(one, seconds) for one in touched if one.alive]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    def close(self) -> None:
        """End the lease with its job."""
        self._scheduler.remove(self)
        self.suspension.close()
        self.demand.memory.close()
        for task in self._tasks:
            task.cancel()

    async def _suspend(self, worker: WorkerHandle, free_device: bool) -> None:
        seconds = self._job.shared.settings.bind_timeout_seconds
        gone = False
        try:
            async with self.workers.while_alive(worker):
                if self._job.spec.policies[self._policy].trainable:
                    await self.suspension.suspend(worker, free_device=free_device, seconds=seconds)
                else:
                    # A frozen policy has no training state to keep.
                    await self._ask_release(worker, seconds)
        except TroupeError as error:
            gone = isinstance(error, Unavailable) or not worker.alive
            if not gone and error.kind not in _UNBOUND:
                self.suspension.failed()
                _log.warning("not suspended", policy=self.name, error=str(error))
                return
        finally:
            self._leaving = None
            self.workers.notify()
        if self.workers.leader is worker and gone and len(self.workers.group) > 1:
            self.give_up_group()
        elif self.workers.leader is worker:
            self.workers.unassign()
            self.workers.notify()

    async def _give_up_group(self, leader: WorkerHandle) -> None:
        try:
            if leader.alive:
                await self._release_at(leader, self._job.shared.settings.cleanup_seconds)
        except TroupeError as error:
            _log.warning("not released", policy=self.name, error=str(error))
        finally:
            self._leaving = None
            if self.workers.leader is leader:
                self.workers.unassign()
            self.workers.notify()

    async def _prefetch(self, worker: WorkerHandle, state: trainer_pb.SuspendedState) -> None:
        request = trainer_pb.PrefetchRequest(
            request_id=new_id("lease"),
            job_id=self._job.job_id,
            policy=self._policy,
            spec_json=await self.specification_on(worker),
            state=state,
        )
        try:
            async with self.workers.while_alive(worker):
                seconds = self._job.shared.settings.bind_timeout_seconds
                await worker.trainer.Prefetch(request, timeout=seconds)
        except TroupeError as error:
            _log.info("not prefetched", policy=self.name, error=str(error))

    async def _release_idle(self) -> None:
        try:
            await self.release(self._job.shared.settings.cleanup_seconds)
        except TroupeError as error:
            _log.warning("not released", policy=self.name, error=str(error))

    async def _release_at(self, worker: WorkerHandle, seconds: float) -> None:
        """Release the policy at `worker`, and ask until the worker answers."""
        try:
            await self._ask_release(worker, seconds)
        except TroupeError:
            self._scheduler.evict(self, worker, lambda: self._ask_release(worker, seconds))
            raise

    async def _ask_release(self, worker: WorkerHandle, seconds: float) -> None:
        request = trainer_pb.ReleaseRequest(
            request_id=new_id("lease"), job_id=self._job.job_id, policy=self._policy
        )
        await worker.trainer.Release(request, timeout=seconds)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
