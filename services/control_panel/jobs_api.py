"""Jobs over REST: submit, show, control; metrics, trajectories, samples and populations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse, ServerSentEvent

from services.control_panel import views
from services.control_panel.access import JSON_TYPE, YAML_TYPES
from services.control_panel.calls import upstream
from services.control_panel.events import EVENT_STREAM, job_events
from troupe.client.conversion import numbers_by_word, to_json
from troupe.job import JobSpec, JobSpecError, parse_job_in_thread
from troupe.job.compatibility import advice
from troupe.job.spec import policy_of
from troupe.rpc.errors import InvalidArgument
from troupe.rpc.ids import check_event_id, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

MAX_SPEC_BYTES = 1 << 20
# An audit reads the log of every step.
_AUDIT_SECONDS = 300.0
_STATES = numbers_by_word(common_pb.JobState.DESCRIPTOR)
_SAMPLE_STATES = numbers_by_word(common_pb.SampleState.DESCRIPTOR)

router = APIRouter(prefix="/api/jobs", tags=["jobs"])
samples = APIRouter(prefix="/api/jobs", tags=["samples"])
populations = APIRouter(prefix="/api/jobs", tags=["populations"])
specifications = APIRouter(prefix="/api/specification", tags=["jobs"])


def specification_body(*, required: bool) -> dict[str, Any]:
    """Return the OpenAPI description of a body that is read as text."""
    schema = {"type": "string", "description": "The job's specification."}
    content = {kind: {"schema": schema} for kind in (*YAML_TYPES, JSON_TYPE)}
    return {"requestBody": {"required": required, "content": content}}


JobId = Annotated[str, Path(description="The job's id.")]
IdempotencyKey = Annotated[
    str | None,
    Header(description="A repeated call with the same key has no second effect."),
]


@router.get("")
async def list_jobs(
    request: Request,
    response: Response,
    state: Annotated[
        str | None, Query(pattern=f"^({'|'.join(_STATES)})$", description="Only in this state.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="From the header `Link` of the previous answer.")] = "",
) -> list[views.JobView]:
    """List jobs, newest first. The header `Link` has the address of the next page
    (`rel="next"`)."""
    wanted = orchestrator_pb.ListJobsRequest(page_size=limit, page_token=page)
    if state is not None:
        wanted.state = common_pb.JobState.ValueType(_STATES[state])
    reply = await upstream(request).stub.ListJobs(wanted)
    if reply.next_page_token:
        query = {"state": state, "limit": limit, "page": reply.next_page_token}
        given = {name: value for name, value in query.items() if value is not None}
        response.headers["Link"] = f'</api/jobs?{urlencode(given)}>; rel="next"'
    return [views.job(job) for job in reply.jobs]


@router.post("", status_code=201, openapi_extra=specification_body(required=True))
async def submit_job(
    request: Request,
    response: Response,
    job_id: Annotated[str, Query(description="Chosen id; default: made from the name.")] = "",
    tag: Annotated[
        list[str] | None, Query(description="A word to find the job by; may be repeated.")
    ] = None,
    notes: Annotated[str, Query(description="Text for people, kept with the job.")] = "",
    idempotency_key: IdempotencyKey = None,
) -> views.JobView:
    """Submit a job. The body is its YAML (or JSON) text."""
    spec = await read_specification(request)
    reply = await upstream(request).stub.SubmitJob(
        orchestrator_pb.SubmitJobRequest(
            request_id=idempotency_key or new_id("panel"),
            spec=spec,
            job_id=job_id,
            tags=tag or [],
            notes=notes,
        )
    )
    response.headers["Location"] = f"/api/jobs/{reply.job.job_id}"
    return views.job(reply.job)


@router.get("/{job_id}")
async def get_job(request: Request, job_id: JobId) -> views.JobView:
    """Return one job."""
    reply = await upstream(request).stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
    return views.job(reply.job)


@router.get("/{job_id}/specification")
async def get_specification(request: Request, job_id: JobId) -> views.Specification:
    """Return the job's specification as its author wrote it, and with its defaults filled in."""
    reply = await upstream(request).stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
    return views.specification(reply)


class Annotation(BaseModel):
    """A change of a job's tags and notes."""

    model_config = ConfigDict(extra="forbid")

    add_tags: list[str] = Field(default=[], max_length=100)
    remove_tags: list[str] = Field(default=[], max_length=100)
    notes: str | None = Field(default=None, description="Replaces the notes; null: they stay.")


@router.patch("/{job_id}")
async def annotate_job(
    request: Request, job_id: JobId, body: Annotation, idempotency_key: IdempotencyKey = None
) -> views.JobView:
    """Change the job's tags and notes, in any of its states."""
    reply = await upstream(request).stub.AnnotateJob(
        orchestrator_pb.AnnotateJobRequest(
            request_id=idempotency_key or new_id("panel"), job_id=job_id, **body.model_dump()
        )
    )
    return views.job(reply.job)


@router.post("/{job_id}/pause")
async def pause_job(
    request: Request, job_id: JobId, idempotency_key: IdempotencyKey = None
) -> views.JobView:
    """Pause the job after the step in flight."""
    reply = await upstream(request).stub.PauseJob(
        orchestrator_pb.PauseJobRequest(
            request_id=idempotency_key or new_id("panel"), job_id=job_id
        )
    )
    return views.job(reply.job)


@router.post("/{job_id}/resume", openapi_extra=specification_body(required=False))
async def resume_job(
    request: Request,
    job_id: JobId,
    changes: Annotated[
        list[str] | None,
        Query(
            alias="set",
            description="`KEY.PATH=VALUE`: another value (YAML) of a field; may be repeated.",
        ),
    ] = None,
    idempotency_key: IdempotencyKey = None,
) -> views.JobView:
    """Continue from the last committed step, with the specification in the body if there is one,
    and with other values of its fields (`set`)."""
    spec = await read_specification(request)
    reply = await upstream(request).stub.ResumeJob(
        orchestrator_pb.ResumeJobRequest(
            request_id=idempotency_key or new_id("panel"),
            job_id=job_id,
            spec=spec,
            overrides=dict(map(_assignment, changes or [])),
        )
    )
    return views.job(reply.job)


@router.post("/{job_id}/cancel")
async def cancel_job(
    request: Request,
    job_id: JobId,
    reason: Annotated[str, Query(description="Kept with the job.")] = "",
    idempotency_key: IdempotencyKey = None,
) -> views.JobView:
    """Stop the job; checkpoints and metrics stay."""
    reply = await upstream(request).stub.CancelJob(
        orchestrator_pb.CancelJobRequest(
            request_id=idempotency_key or new_id("panel"), job_id=job_id, reason=reason
        )
    )
    return views.job(reply.job)


@router.post("/{job_id}/forget")
async def forget_job(
    request: Request, job_id: JobId, idempotency_key: IdempotencyKey = None
) -> views.JobView:
    """Delete an ended job from the cluster's memory, and its conversations; its directory stays.
    Answers with the job's last record."""
    reply = await upstream(request).stub.ForgetJob(
        orchestrator_pb.ForgetJobRequest(
            request_id=idempotency_key or new_id("panel"), job_id=job_id
        )
    )
    return views.job(reply.job)


@router.get("/{job_id}/events", **EVENT_STREAM)
async def watch_job(
    request: Request,
    job_id: JobId,
    after: Annotated[str, Query(description="Only events after this id.")] = "",
    recent_metrics: Annotated[
        int | None,
        Query(ge=1, le=10_000, description="From the start: metrics of only the newest events."),
    ] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventSourceResponse:
    """Stream the job's event log, then live events: server-sent events `state`, `metrics`,
    `notice`, `activity`. A browser that reconnects continues where it stopped; `recent_metrics`
    omits metrics that the browser reads as curves."""
    source = upstream(request)
    check_event_id(after, "query.after")
    check_event_id(last_event_id or "", "header.last-event-id")
    # Asked before the stream opens, so that an unknown job is a 404 and not a broken stream.
    await source.stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))

    async def stream() -> AsyncIterator[ServerSentEvent]:
        async for event in job_events(source, job_id, last_event_id or after, recent_metrics):
            yield event

    return EventSourceResponse(stream(), ping=15)


@router.get("/{job_id}/metrics")
async def list_metrics(
    request: Request,
    job_id: JobId,
    name: Annotated[list[str] | None, Query(description="Only these metrics.")] = None,
    after_step: Annotated[int, Query(ge=-1, lt=2**63, description="Only later steps.")] = -1,
) -> list[views.MetricsRowView]:
    """List metrics per step."""
    reply = await upstream(request).stub.ListMetrics(
        orchestrator_pb.ListMetricsRequest(job_id=job_id, names=name or [], after_step=after_step)
    )
    return [views.MetricsRowView(step=row.step, values=dict(row.values)) for row in reply.rows]


@router.get("/{job_id}/curves")
async def list_curves(
    request: Request,
    job_id: JobId,
    name: Annotated[list[str], Query(min_length=1, description="These metrics.")],
    after_step: Annotated[int, Query(ge=-1, lt=2**63, description="Only later steps.")] = -1,
    limit: Annotated[int, Query(ge=1, le=1_000, description="Logged rows of a page.")] = 1_000,
    page: Annotated[str, Query(description="`next_page` of the previous answer.")] = "",
) -> views.Curves:
    """Return metrics as columns over steps, for charts: the newest page first."""
    wanted = orchestrator_pb.ListMetricsRequest(
        job_id=job_id, names=name, after_step=after_step, page_size=limit, page_token=page
    )
    reply = await upstream(request).stub.ListMetrics(wanted)
    return views.curves(reply)


@router.get("/{job_id}/policies/{policy}/versions")
async def list_versions(request: Request, job_id: JobId, policy: str) -> list[dict[str, Any]]:
    """List published versions of a policy with their checksums."""
    reply = await upstream(request).stub.ListVersions(
        orchestrator_pb.ListVersionsRequest(job_id=job_id, policy=policy)
    )
    return [to_json(version) for version in reply.versions]


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(request: Request, job_id: JobId) -> list[dict[str, Any]]:
    """List checkpoints on disk."""
    reply = await upstream(request).stub.ListCheckpoints(
        orchestrator_pb.ListCheckpointsRequest(job_id=job_id)
    )
    return [to_json(checkpoint) for checkpoint in reply.checkpoints]


@router.get("/{job_id}/trajectories")
async def list_trajectories(
    request: Request,
    job_id: JobId,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="`next_page` of the previous answer.")] = "",
    text: Annotated[str, Query(description="Text in a message or a reply.")] = "",
    agent: Annotated[str, Query(description="An agent that acts in it.")] = "",
    reason: Annotated[str, Query(description="Text in the reason of its end.")] = "",
    from_step: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    to_step: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    min_reward: Annotated[
        float | None, Query(allow_inf_nan=False, description="Of `agent`; else team or mean.")
    ] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    evaluation: Annotated[
        bool | None, Query(description="Of evaluations (true) or of training (false).")
    ] = None,
    failed: Annotated[bool, Query(description="Only those that did not complete.")] = False,
) -> dict[str, Any]:
    """List kept trajectories that match all filters, newest first."""
    reply = await upstream(request).stub.ListTrajectories(
        orchestrator_pb.ListTrajectoriesRequest(
            job_id=job_id,
            page_size=limit,
            page_token=page,
            text=text,
            agent=agent,
            reason=reason,
            from_step=from_step,
            to_step=to_step,
            min_reward=min_reward,
            max_reward=max_reward,
            evaluation=evaluation,
            failed=failed,
        )
    )
    return {
        "trajectories": [to_json(item) for item in reply.trajectories],
        "next_page": reply.next_page_token,
    }


@router.get("/{job_id}/trajectories/{trajectory_id}")
async def get_trajectory(
    request: Request,
    job_id: JobId,
    trajectory_id: str,
    tokens: Annotated[bool, Query(description="With the tokens of its turns, if kept.")] = False,
) -> dict[str, Any]:
    """Return one trajectory with the conversation between its agents."""
    reply = await upstream(request).stub.GetTrajectory(
        orchestrator_pb.GetTrajectoryRequest(
            job_id=job_id, trajectory_id=trajectory_id, tokens=tokens
        )
    )
    found = to_json(reply)
    for turn in found["turns"]:
        for name in ("logprobs", "advantages", "ratios") if turn["tokens"] else ():
            # They were 32 bits wide; with 16 digits each they would make up most of the answer.
            turn["tokens"][name] = [float(f"{value:.6g}") for value in turn["tokens"][name]]
    return found


class MessageBody(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: str = "user"
    content: str


class GenerateBody(BaseModel):
    """A conversation for a policy to continue."""

    model_config = ConfigDict(extra="forbid")

    messages: list[MessageBody] = Field(
        min_length=1, examples=[[{"role": "user", "content": "hi"}]]
    )
    temperature: float | None = Field(default=None, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1, lt=2**31)


@router.post("/{job_id}/policies/{policy}/generate")
async def generate(
    request: Request, job_id: JobId, policy: str, body: GenerateBody
) -> views.Generated:
    """Generate with the policy's newest version."""
    sampling = common_pb.SamplingParams()
    if body.temperature is not None:
        sampling.temperature = body.temperature
    if body.max_new_tokens is not None:
        sampling.max_new_tokens = body.max_new_tokens
    reply = await upstream(request).stub.GeneratePolicy(
        orchestrator_pb.GeneratePolicyRequest(
            request_id=new_id("panel"),
            job_id=job_id,
            policy=policy,
            messages=[common_pb.ChatMessage(**one.model_dump()) for one in body.messages],
            sampling=sampling,
        )
    )
    result = reply.result
    return views.Generated(
        text=result.text,
        finish_reason=result.finish_reason,
        output_ids=list(result.output_ids),
        version=result.versions[-1].version if result.versions else None,
    )


def _assignment(text: str) -> tuple[str, str]:
    """Return path and value of `KEY.PATH=VALUE`. Raises `InvalidArgument`."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise InvalidArgument(
            "is not of the form KEY.PATH=VALUE",
            field="set",
            value=text,
            remedy="Write for example `?set=pipeline.steps=60`.",
        )
    return path.strip(), value


async def read_specification(request: Request) -> str:
    """Return the body as text: a job's YAML or JSON."""
    body = await request.body()
    if len(body) > MAX_SPEC_BYTES:
        raise InvalidArgument(
            f"the specification has {len(body)} bytes; the limit is {MAX_SPEC_BYTES}",
            field="body",
            remedy="Keep data out of the specification; name files instead.",
        )
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the body is not UTF-8: {error}", field="body", remedy="Send the job's YAML as text."
        ) from error


@specifications.get("/schema")
async def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job's specification, for editors."""
    return JobSpec.model_json_schema()


@specifications.post("/check", openapi_extra=specification_body(required=True))
async def check_specification(request: Request) -> views.CheckedSpecification:
    """Return the faults of a specification, and its settings without effect. Nothing is submitted,
    and its code is not imported."""
    text = await read_specification(request)
    try:
        spec = await parse_job_in_thread(text)
    except JobSpecError as error:
        problems = [views.FieldFault(**asdict(one)) for one in error.problems]
        return views.CheckedSpecification(problems=problems, advice=[], summary="")
    return views.CheckedSpecification(problems=[], advice=advice(spec), summary=spec.summary)


@samples.get("/{job_id}/tables")
async def describe_tables(request: Request, job_id: JobId) -> dict[str, Any]:
    """Return samples by policy and state, the lag of each table, the oldest pending sample, and
    memory."""
    reply = await upstream(request).stub.DescribeTables(
        store_pb.DescribeTablesRequest(job_id=job_id)
    )
    return to_json(reply)


@samples.get("/{job_id}/policies/{policy}/samples")
async def list_samples(
    request: Request,
    job_id: JobId,
    policy: str,
    step: Annotated[int | None, Query(ge=0, lt=2**63, description="Only this step.")] = None,
    state: Annotated[
        str | None,
        Query(pattern=f"^({'|'.join(_SAMPLE_STATES)})$", description="Only in this state."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="`next_page` of the previous answer.")] = "",
) -> dict[str, Any]:
    """List rows of a policy without their tensors, in order of step, query, group and id."""
    job = (await upstream(request).stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))).job
    policy = policy_of(json.loads(job.spec_json or "{}"), policy)
    wanted = store_pb.ListSamplesRequest(
        job_id=job_id, policy=policy, step=step, page_size=limit, page_token=page
    )
    if state is not None:
        wanted.state = common_pb.SampleState.ValueType(_SAMPLE_STATES[state])
    reply = await upstream(request).stub.ListSamples(wanted)
    return {
        "samples": [_row(sample) for sample in reply.samples],
        "next_page": reply.next_page_token,
    }


@samples.get("/{job_id}/audit")
async def audit_job(request: Request, job_id: JobId) -> dict[str, Any]:
    """Check that every sample was trained once or dropped with a reason; `violations` lists the
    contradictions."""
    reply = await upstream(request).stub.AuditJob(
        orchestrator_pb.AuditJobRequest(job_id=job_id), timeout=_AUDIT_SECONDS
    )
    return to_json(reply)


def _row(sample: store_pb.Sample) -> dict[str, Any]:
    """Return a sample with the lengths of its tensors instead of the tensors, which can be
    megabytes."""
    lengths = {
        "prompt_tokens": sum(sample.prompt_ids.shape),
        "response_tokens": sum(sample.response_ids.shape),
        "columns": sorted(sample.columns),
    }
    sample.ClearField("prompt_ids")
    sample.ClearField("response_ids")
    sample.ClearField("logprobs")
    sample.ClearField("columns")
    row = to_json(sample) | lengths
    for field in ("prompt_ids", "response_ids", "logprobs"):
        del row[field]
    return row


@populations.get("/{job_id}/population")
async def get_population(request: Request, job_id: JobId) -> dict[str, Any]:
    """Return pools with their members, the payoff table, meta-strategies over time, ratings."""
    reply = await upstream(request).stub.GetPopulation(
        orchestrator_pb.GetPopulationRequest(job_id=job_id)
    )
    return to_json(reply.population)


@populations.get("/{job_id}/matches")
async def list_matches(
    request: Request,
    job_id: JobId,
    member: Annotated[str, Query(description="Only matches of this member.")] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="`next_page` of the previous answer.")] = "",
) -> dict[str, Any]:
    """List matches between members, newest first. A match is a trajectory of the same id."""
    reply = await upstream(request).stub.ListMatches(
        orchestrator_pb.ListMatchesRequest(
            job_id=job_id, member_id=member, page_size=limit, page_token=page
        )
    )
    return {
        "matches": [to_json(match) for match in reply.matches],
        "next_page": reply.next_page_token,
    }
