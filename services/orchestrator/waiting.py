"""What the rows of a step that did not end in time were waiting for."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from services.orchestrator.context import JobContext
from troupe.rpc import DeadlineExceeded, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es

# The step is lost already: the store is asked once, briefly.
_ASK_SECONDS: Final = 5.0


async def name_missing_columns(
    job: JobContext, step: int, error: DeadlineExceeded
) -> DeadlineExceeded:
    """`error`, or one that names the required columns that nobody filled, and in which rows."""
    lacking: dict[str, list[str]] = {}
    for policy in job.spec.trained_policies:
        for column in await _missing(job, policy, step):
            lacking.setdefault(column, []).append(policy)
    if not lacking:
        return error
    what = "; ".join(
        f"rows of {' and '.join(policies)} wait for the column {column!r}, which nobody filled"
        for column, policies in lacking.items()
    )
    return DeadlineExceeded(
        f"{error.message}: {what}",
        kind=error.kind,
        field=error.field,
        value=error.value,
        remedy="Fill it (FillColumns) within this time, or submit a job without it in "
        "`pipeline.required_columns`.",
    )


async def _missing(job: JobContext, policy: str, step: int) -> list[str]:
    """Required columns that the first pending row of a policy lacks."""
    required = job.spec.pipeline.required_columns
    if not required:
        return []
    request = es.ListSamplesRequest(
        job_id=job.job_id,
        policy=policy,
        step=step,
        state=pb.SAMPLE_STATE_PENDING,
        page_size=1,
    )
    with suppress(TroupeError):
        found = await job.shared.experience.ListSamples(request, timeout=_ASK_SECONDS)
        return [name for row in found.samples for name in required if name not in row.columns]
    return []
