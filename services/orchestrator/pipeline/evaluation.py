"""Evaluations on the held-out split, and the limit on failed trajectories of any batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from services.orchestrator.context import JobContext
from services.orchestrator.errors import Deadline
from services.orchestrator.pipeline.dispatch import Dispatch, TicketBatch, run_batch
from services.orchestrator.pipeline.metrics import Tally
from troupe.rpc import ResourceExhausted
from troupe.scheduling import admission
from troupe.v1 import rollout_pb2 as ro

NO_TURNS_REMEDY: Final = (
    "The client answered from a cache of its own, or asked another model: switch its cache off "
    "(DSPy: `cache=False`; LangChain: `set_llm_cache(None)`) and give it the endpoint's base_url."
)


class EvaluationRunner:
    """An evaluation after `step` steps, of the same held-out queries each time.

    Its samples are neither stored nor trained on.
    """

    def __init__(self, job: JobContext, dispatch: Dispatch, step: int) -> None:
        self._job = job
        self._dispatch = dispatch
        self._step = step
        self._name = f"the evaluation after {step} steps"
        self._plan: Sequence[admission.QueryPlan] = ()
        self.tally = Tally(job.spec.agents, {})
        self._recent = job.shared.trajectories.buffer(job.job_id, step, "evaluate")

    async def run(self) -> dict[str, float]:
        """The evaluation's metrics, `evaluation/...`; `tally.scores()` are for comparison."""
        began = time.monotonic()
        # In a thread: planning thousands of queries would block the event loop.
        self._plan = await asyncio.to_thread(
            admission.plan_evaluation,
            job_seed=self._job.spec.seed,
            step=self._step,
            queries=self._job.spec.evaluation.queries,
        )
        deadline = Deadline(self._name, self._job.spec.limits.step_seconds, "limits.step_seconds")
        batch = TicketBatch(self._step, deadline, self._on_end)
        tickets = (evaluation_ticket(query) for query in self._plan)
        try:
            await run_batch(self._dispatch, batch, tickets, self._show_progress())
        finally:
            await self._recent.flush()
        await report_failures(self._job, self._name, self.tally, len(self._plan))
        values = self.tally.values(time.monotonic() - began)
        return {f"evaluation/{name}": value for name, value in values.items()}

    def _on_end(self, event: ro.TrajectoryEvent) -> None:
        self.tally.add(event)
        self._recent.add(event)
        check_failures(self._job, self._name, self.tally, len(self._plan))

    async def _show_progress(self) -> None:
        while True:
            self._job.show(
                f"evaluating: {self.tally.ended} of {len(self._plan)} held-out queries",
                step=self._step,
                done=self.tally.ended,
                total=len(self._plan),
            )
            await asyncio.sleep(self._job.shared.settings.activity_seconds)


def evaluation_ticket(query: admission.QueryPlan) -> ro.Ticket:
    """The ticket of a held-out query."""
    return ro.Ticket(
        query_id=query.query_id,
        trajectory_id=query.trajectory_ids[0],
        split="held_out",
        index=query.index,
        seed=query.seeds[0],
        purpose=ro.Ticket.PURPOSE_EVALUATE,
    )


def check_failures(
    job: JobContext, name: str, tally: Tally, total: int, *, forgiven: int = 0
) -> None:
    """Raises `ResourceExhausted` as soon as more trajectories failed than the job allows.

    `total` trajectories are run; `forgiven` of the failed ones in `tally` are not counted.
    """
    limit = job.spec.limits.max_failed_fraction
    failed = tally.failed - forgiven
    if admission.too_many_failed(failed, total, limit):
        raise ResourceExhausted(
            f"{name}: {failed} of {total} trajectories failed (at most {limit:.0%} may), "
            f"most of them so: {tally.most_common_reason}",
            kind="too_many_failed_trajectories",
            field="limits.max_failed_fraction",
            value=limit,
            remedy="Mend the cause (the panel and `job.trajectories()` show what failed), then "
            "resume the job.",
        )


async def report_failures(job: JobContext, name: str, tally: Tally, total: int) -> None:
    """Warns that some trajectories failed, though not too many, or completed with a remark."""
    if tally.failed:
        reason = tally.most_common_reason
        await _warn_rarely(
            job,
            reason.partition(":")[0],
            f"{name}: {tally.failed} of {total} trajectories failed{{again}}, "
            f"most of them so: {reason}",
        )
    count, remark = tally.remark
    if count:
        await _warn_rarely(
            job,
            remark.partition(":")[0],
            f"{name}: {count} of {total} trajectories completed with a remark{{again}}, "
            f"most of them with this: {remark}",
        )


async def report_unused_endpoints(job: JobContext, name: str, tally: Tally) -> None:
    """Warns that trajectories opened an endpoint, were rewarded, and made no turn there."""
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
