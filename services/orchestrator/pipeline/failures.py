"""Failed trajectories of a step or an evaluation: when they end the job, and warnings to the
user."""

from __future__ import annotations

from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.errors import job_fault
from services.orchestrator.pipeline.metrics import NO_TURNS_REMEDY, Tally
from troupe.rpc.errors import ResourceExhausted, TroupeError
from troupe.scheduling import admission

# Failures, and their queries, from which on a common problem is not a coincidence.
_FEWEST_FAILURES: Final = 4
_FEWEST_QUERIES: Final = 2


class CommonFailure:
    """A check that ends a job whose steps fail as a whole with one problem, regardless of
    `max_failed_fraction`.

    Such a problem is a fault of the job's code, for example a misspelled agent name. In a small
    step it may also be chance, so small steps are counted together with later ones.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._failures = self._queries = 0

    def add(self, name: str, tally: Tally, queries: int) -> None:
        """Count the ended step `name`, which had so many queries.

        Raises `FailedPrecondition` with the problem's field and remedy when every trajectory of
        the step, and of enough steps before it, failed with a problem of one kind.
        """
        problem = tally.common_problem
        if problem is None:
            if tally.completed or tally.failed:
                self._kind, self._failures, self._queries = "", 0, 0
            return
        if problem.kind != self._kind:
            self._kind, self._failures, self._queries = problem.kind, 0, 0
        self._failures += tally.failed
        self._queries += queries
        if self._failures >= _FEWEST_FAILURES and self._queries >= _FEWEST_QUERIES:
            raise _fault_of_all(name, tally)


def _fault_of_all(name: str, tally: Tally) -> TroupeError:
    """Return the job's error for the common problem of its failures."""
    assert tally.common_problem is not None
    error = job_fault(tally.common_problem)
    error.message += f" ({name}: all {tally.failed} ended trajectories failed with this)"
    return error


def check_failures(
    job: JobContext, name: str, tally: Tally, total: int, *, forgiven: int = 0
) -> None:
    """Raise `ResourceExhausted`, or the common problem of all failures, as soon as more
    trajectories failed than the job allows.

    `total` trajectories are run; `forgiven` failed ones in `tally` do not count.
    """
    limit = job.spec.limits.max_failed_fraction
    failed = tally.failed - forgiven
    if admission.too_many_failed(failed, total, limit):
        if tally.common_problem is not None:
            raise _fault_of_all(name, tally)
        raise ResourceExhausted(
            f"{name}: {failed} of {total} trajectories failed (at most {limit:.0%} may), "
            f"most of them with: {tally.most_common_reason}",
            kind="too_many_failed_trajectories",
            field="limits.max_failed_fraction",
            value=limit,
            remedy="Fix the cause (the panel and `job.trajectories()` show the failures), then "
            "resume the job.",
        )


async def report_failures(job: JobContext, name: str, tally: Tally, total: int) -> None:
    """Warn that some trajectories failed, although not too many, or completed with a remark."""
    if tally.failed:
        reason = tally.most_common_reason
        await _warn_rarely(
            job,
            reason.partition(":")[0],
            f"{name}: {tally.failed} of {total} trajectories failed{{again}}, "
            f"most of them with: {reason}",
        )
    count, remark = tally.remark
    if count:
        await _warn_rarely(
            job,
            remark.partition(":")[0],
            f"{name}: {count} of {total} trajectories completed with a remark{{again}}, "
            f"most of them with: {remark}",
        )


async def report_unused_endpoints(job: JobContext, name: str, tally: Tally) -> None:
    """Warn that trajectories opened an endpoint, were rewarded, and made no turn there."""
    if tally.without_turns:
        await _warn_rarely(
            job,
            "endpoint_unused",
            f"{name}: {tally.without_turns} of {tally.completed} trajectories opened an endpoint "
            f"and were rewarded{{again}}, but made no turn. {NO_TURNS_REMEDY}",
        )


async def _warn_rarely(job: JobContext, kind: str, text: str) -> None:
    """Warns of a `kind` of trouble at its occurrences 1, 2, 4, ...; `text` has `{again}` in it."""
    job.complaints[kind] += 1
    count = job.complaints[kind]
    if count & (count - 1) == 0:
        again = f" (for the {count}th time)" if count > 2 else " (again)" if count == 2 else ""
        await job.warn(text.replace("{again}", again))
