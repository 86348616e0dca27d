"""The jobs that this worker is prepared for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from services.rollout.garbage import settle
from services.rollout.job_setup import (
    Preparation,
    by_policy,
    computes_here,
    share_servers,
)
from services.rollout.prepared_job import PreparedJob
from troupe.contracts import kinds
from troupe.job import JobSpec
from troupe.rpc.errors import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb


class JobTable:
    """Prepared jobs by id."""

    def __init__(self, preparation: Preparation, worker_id: str) -> None:
        self._preparation = preparation
        self._worker_id = worker_id
        self.before_release: Callable[[str], Awaitable[None]] | None = None
        """Called with the id of a job before its engines stop."""
        self._jobs: dict[str, PreparedJob] = {}
        # Kept only while held or waited for, since there may have been many jobs.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    def all(self) -> list[PreparedJob]:
        """Return every prepared job."""
        return list(self._jobs.values())

    def get(self, job_id: str) -> PreparedJob:
        """Return a prepared job. Raises `FailedPrecondition` of kind `job_not_prepared`."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise FailedPrecondition(
                f"worker {self._worker_id} is not prepared for job '{job_id}'",
                kind=kinds.JOB_NOT_PREPARED,
                field="job_id",
                value=job_id,
                remedy="Call PrepareJob first; a restarted worker has forgotten its jobs.",
            ) from None

    async def prepare(
        self,
        job_id: str,
        asked: JobSpec,
        weights: Sequence[common_pb.WeightsRef],
        servers: Sequence[rollout_pb.SharedServer] = (),
    ) -> PreparedJob:
        """Load the code of the job that was `asked` for, and start its engines at `weights`.
        `servers`: attached servers that other workers may also use.

        Idempotent: a job that was prepared with the same specification only gets the weights.
        Raises `InvalidArgument` and `FailedPrecondition` naming the field at fault, and the error
        of an engine that does not start; nothing keeps running then.
        """
        spec = await self._preparation.with_defaults(asked)
        refs = by_policy(spec, weights)
        async with self._locks.setdefault(job_id, asyncio.Lock()):
            known = self._jobs.get(job_id)
            if known is not None and known.spec == spec:
                share_servers(job_id, self._worker_id, known.policies, servers)
                await self._update_weights(known, refs)
                return known
            if known is not None:
                await self._release(job_id, "the job's specification has changed")
            job = await self._preparation.make(job_id, spec, refs, servers)
            self._jobs[job_id] = job
            return job

    async def release(self, job_id: str, *, collect: bool = True) -> None:
        """Stop the job's engines and forget it; no effect for an unknown job. `collect`: also free
        its memory."""
        async with self._locks.setdefault(job_id, asyncio.Lock()):
            job = self._jobs.get(job_id)
            if job is None:
                return
            models = computes_here(job.spec)
            del job
            await self._release(job_id, "the job was released")
            if collect and models:
                settle()
            elif collect and not self._jobs:
                # Without imported objects; with trajectories of other jobs running, it could wait.
                gc.collect()

    async def close(self) -> None:
        """Release every job, before the process ends."""
        jobs = list(self._jobs)
        await asyncio.gather(*(self.release(job_id, collect=False) for job_id in jobs))

    async def _release(self, job_id: str, reason: str) -> None:
        job = self._jobs.pop(job_id)
        if self.before_release is not None:
            await self.before_release(job_id)
        await job.moves.close()
        await asyncio.gather(*(policy.release(reason) for policy in job.policies.values()))
        await asyncio.to_thread(job.program.close)

    async def _update_weights(
        self, job: PreparedJob, refs: Mapping[str, common_pb.WeightsRef]
    ) -> None:
        async def one(name: str, ref: common_pb.WeightsRef) -> None:
            policy = job.policies[name]
            if ref.version < policy.weights.version:
                # The orchestrator keeps the weight versions: an older one belongs to a resumed job.
                policy.retarget(ref)
            await policy.update(ref)

        await asyncio.gather(*(one(name, ref) for name, ref in refs.items()))
