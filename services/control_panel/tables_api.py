"""Rows over REST: counts, pages of samples, the audit."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from services.control_panel import views
from services.control_panel.jobs_api import JobId, upstream
from troupe.v1 import common_pb2
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as pb

router = APIRouter(prefix="/api/jobs", tags=["samples"])

_STATES = {
    name.removeprefix("SAMPLE_STATE_").lower(): number
    for name, number in common_pb2.SampleState.items()
    if number
}
# An audit reads the log of every step.
_AUDIT_SECONDS = 300.0


@router.get("/{job_id}/tables")
async def describe_tables(request: Request, job_id: JobId) -> dict[str, Any]:
    """Samples by policy and state, the lag of each table, what waits longest, memory."""
    reply = await upstream(request).stub.DescribeTables(es.DescribeTablesRequest(job_id=job_id))
    return views.plain(reply)


@router.get("/{job_id}/policies/{policy}/samples")
async def list_samples(
    request: Request,
    job_id: JobId,
    policy: str,
    step: Annotated[int | None, Query(ge=0, lt=2**63, description="Only this step.")] = None,
    state: Annotated[
        str | None, Query(pattern=f"^({'|'.join(_STATES)})$", description="Only in this state.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="`next_page` of the answer before.")] = "",
) -> dict[str, Any]:
    """Rows of a policy without their tensors, in order of step, query, group and id."""
    wanted = es.ListSamplesRequest(
        job_id=job_id, policy=policy, step=step, page_size=limit, page_token=page
    )
    if state is not None:
        wanted.state = common_pb2.SampleState.ValueType(_STATES[state])
    reply = await upstream(request).stub.ListSamples(wanted)
    return {
        "samples": [_row(sample) for sample in reply.samples],
        "next_page": reply.next_page_token,
    }


@router.get("/{job_id}/audit")
async def audit_job(request: Request, job_id: JobId) -> dict[str, Any]:
    """Was every sample trained once, or dropped with a reason? `violations` says what speaks
    against it."""
    reply = await upstream(request).stub.AuditJob(
        pb.AuditJobRequest(job_id=job_id), timeout=_AUDIT_SECONDS
    )
    return views.plain(reply)


def _row(sample: es.Sample) -> dict[str, Any]:
    """A sample without its tensors, which can be megabytes: their lengths instead."""
    lengths = {
        "prompt_tokens": sum(sample.prompt_ids.shape),
        "response_tokens": sum(sample.response_ids.shape),
        "columns": sorted(sample.columns),
    }
    sample.ClearField("prompt_ids")
    sample.ClearField("response_ids")
    sample.ClearField("logprobs")
    sample.ClearField("columns")
    row = views.plain(sample) | lengths
    for field in ("prompt_ids", "response_ids", "logprobs"):
        del row[field]
    return row
