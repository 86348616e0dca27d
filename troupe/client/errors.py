"""Errors of the SDK beyond those that services send."""

from __future__ import annotations

from troupe.client.records import Job
from troupe.rpc.errors import FailedPrecondition


class JobFailed(FailedPrecondition):
    """The job ended without a result; `job` is its last record.

    Field, value and remedy are those of the problem that ended it.
    """

    default_kind = "job_failed"

    def __init__(self, job: Job) -> None:
        problem = job.problem
        said = problem.message if problem else "no reason was recorded"
        super().__init__(
            f"job {job.id} failed: {said}",
            kind=problem.kind if problem else None,
            field=problem.field if problem else None,
            value=problem.value if problem else None,
            remedy=problem.remedy if problem else None,
        )
        self.job = job


class JobCancelled(FailedPrecondition):
    """The job was cancelled; `job` is its last record."""

    default_kind = "job_cancelled"

    def __init__(self, job: Job) -> None:
        said = f": {job.problem.message}" if job.problem else ""
        super().__init__(
            f"job {job.id} was cancelled{said}",
            remedy=f"`troupe jobs resume {job.id}` goes on from its last committed step.",
        )
        self.job = job
