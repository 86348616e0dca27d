"""The weight versions of jobs, which the experience store owns.

A policy's version moves only there: by the commit of its next step, which the trainer sends, or
back to its first weights under the next number (`restart`). This module reads and moves versions by
calls of the store. It keeps only the newest numbers, in the job's record: lists of jobs show them,
and `load` compares the store with them, in case it has lost data.

How a version is admitted: a trainer commits it to the store, `pipeline.steps.StepRunner` learns of
it from the trainer, and `placement.engines.Engines.update` has the rollout workers load it.
`Engines.ready` names the workers that serve it, and `pipeline.steps.StepWindow` opens a step only
when every policy's served version is recent enough (`pipeline.alpha`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import JobRecord
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

if TYPE_CHECKING:
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub

# Versions read at once: the most that the store returns.
_PAGE_SIZE: Final = 1000


class WeightVersions:
    """The weight versions of all jobs."""

    def __init__(self, experience: ExperienceStoreAsyncStub, jobs: JobStore) -> None:
        self._experience = experience
        self._jobs = jobs

    async def load(self, record: JobRecord, epoch: int) -> dict[str, store_pb.PolicyVersion]:
        """Return the newest version of every policy that has one, for a runner of the job.

        Raises `FailedPrecondition` of kind `versions_lost` if the store has fewer versions or steps
        than the job's record.
        """
        found = await self.newest(record.job_id)
        check_kept(record, found)
        for policy, one in found.items():
            if record.versions.get(policy) != one.weights.version:
                await self._jobs.note_version(record.job_id, epoch, policy, one.weights.version)
        return found

    async def newest(
        self, job_id: str, *, timeout: float | None = None
    ) -> dict[str, store_pb.PolicyVersion]:
        """Return the newest version of every policy that has one."""
        request = store_pb.GetNewestVersionsRequest(job_id=job_id)
        found = await self._experience.GetNewestVersions(request, timeout=timeout)
        return {one.weights.policy: one for one in found.versions}

    async def all(
        self, job_id: str, policy: str, *, timeout: float | None = None
    ) -> list[store_pb.PolicyVersion]:
        """Return all versions of a policy, oldest first."""
        found: list[store_pb.PolicyVersion] = []
        token, more = "", True
        while more:
            request = store_pb.ListPolicyVersionsRequest(
                job_id=job_id, policy=policy, page_size=_PAGE_SIZE, page_token=token
            )
            page = await self._experience.ListPolicyVersions(request, timeout=timeout)
            found += page.versions
            token = page.next_page_token
            more = bool(token)
        return found

    async def adopt(self, job_id: str, epoch: int, commit: store_pb.StepCommit) -> None:
        """Note the version of a commit, which is in the store."""
        await self._jobs.note_version(job_id, epoch, commit.policy, commit.weights.version)

    async def open(
        self, job_id: str, epoch: int, weights: common_pb.WeightsRef
    ) -> store_pb.PolicyVersion:
        """Record a policy's first weights; return its newest version. Repeatable.

        Raises `FailedPrecondition` if the version has another checksum.
        """
        request = store_pb.OpenVersionRequest(
            request_id=new_id("open"), job_id=job_id, weights=weights
        )
        return await self._moved(
            job_id, epoch, (await self._experience.OpenVersion(request)).newest
        )

    async def restart(
        self, job_id: str, epoch: int, steps_done: int, weights: common_pb.WeightsRef
    ) -> store_pb.PolicyVersion:
        """Move a policy that has done `steps_done` steps to its next version without a step:
        `weights`, its first ones again. Return its newest version. Repeatable.

        Raises `FailedPrecondition` if it is not the next version, or has another checksum.
        """
        request = store_pb.RestartVersionRequest(
            request_id=new_id("restart"), job_id=job_id, steps_done=steps_done, weights=weights
        )
        return await self._moved(
            job_id, epoch, (await self._experience.RestartVersion(request)).newest
        )

    async def _moved(
        self, job_id: str, epoch: int, newest: store_pb.PolicyVersion
    ) -> store_pb.PolicyVersion:
        weights = newest.weights
        await self._jobs.note_version(job_id, epoch, weights.policy, weights.version)
        return newest


def check_kept(record: JobRecord, found: Mapping[str, store_pb.PolicyVersion]) -> None:
    """Raise `FailedPrecondition` of kind `versions_lost` if the store has fewer versions than the
    job's record has seen, or fewer steps of a trained policy than it counts."""
    trained = record.spec().trained_policies if record.step else ()
    for policy in sorted({*record.versions, *trained}):
        seen, least = record.versions.get(policy, 0), record.step if policy in trained else 0
        newest = found.get(policy)
        if newest is not None and newest.weights.version >= seen and newest.step >= least:
            continue
        has = (
            "no version"
            if newest is None
            else f"version {newest.weights.version} after {newest.step} steps"
        )
        raise FailedPrecondition(
            f"the experience store has {has} of policy {policy}, but job {record.job_id} was at "
            f"version {seen} after {record.step} steps: the store's Redis has lost data, or "
            "another release of Troupe ran the job",
            kind="versions_lost",
            field=f"policies.{policy}",
            value=seen,
            remedy="Restore the newest copy of the store's Redis and resume the job, or submit a "
            "new job whose policies start from this job's checkpoints.",
        )
