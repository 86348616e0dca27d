"""The FastAPI application: REST under /api, the page at /, OpenAPI at /docs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette import EventSourceResponse

from services.control_panel import access, calls, functions_api, jobs_api, limits, views
from services.control_panel.access import Panel
from services.control_panel.calls import Upstream
from services.control_panel.events import EVENT_STREAM, ClusterPicture
from services.control_panel.jobs_api import JobId, upstream
from troupe import __version__
from troupe.rpc import ClientSettings
from troupe.v1 import common_pb2
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as pb

populations = APIRouter(prefix="/api/jobs", tags=["populations"])


@populations.get("/{job_id}/population")
async def get_population(request: Request, job_id: JobId) -> dict[str, Any]:
    """Pools with their members, the payoff table, meta-strategies over time, ratings."""
    reply = await upstream(request).stub.GetPopulation(pb.GetPopulationRequest(job_id=job_id))
    return views.plain(reply.population)


@populations.get("/{job_id}/matches")
async def list_matches(
    request: Request,
    job_id: JobId,
    member: Annotated[str, Query(description="Only those in which this member played.")] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    page: Annotated[str, Query(description="`next_page` of the answer before.")] = "",
) -> dict[str, Any]:
    """Matches between members, newest first. A match is a trajectory of the same id."""
    reply = await upstream(request).stub.ListMatches(
        pb.ListMatchesRequest(job_id=job_id, member_id=member, page_size=limit, page_token=page)
    )
    return {
        "matches": [views.plain(match) for match in reply.matches],
        "next_page": reply.next_page_token,
    }


samples = APIRouter(prefix="/api/jobs", tags=["samples"])

_STATES = {
    name.removeprefix("SAMPLE_STATE_").lower(): number
    for name, number in common_pb2.SampleState.items()
    if number
}
# An audit reads the log of every step.
_AUDIT_SECONDS = 300.0


@samples.get("/{job_id}/tables")
async def describe_tables(request: Request, job_id: JobId) -> dict[str, Any]:
    """Samples by policy and state, the lag of each table, what waits longest, memory."""
    reply = await upstream(request).stub.DescribeTables(es.DescribeTablesRequest(job_id=job_id))
    return views.plain(reply)


@samples.get("/{job_id}/policies/{policy}/samples")
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


@samples.get("/{job_id}/audit")
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


STATIC = Path(__file__).parent / "static"


def create_app(
    orchestrator_address: str,
    token: str | None = None,
    client: ClientSettings | None = None,
    hosts: Iterable[str] = (),
) -> FastAPI:
    """The panel over the orchestrator at `orchestrator_address`.

    With `token`, calls below /api need it as `Authorization: Bearer`, or a session that it opened.
    `hosts`: names by which browsers reach it, besides loopback.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.upstream = Upstream(orchestrator_address, client)
        app.state.picture = ClusterPicture(app.state.upstream)
        yield
        await app.state.upstream.close()

    app = Panel(
        hosts=hosts,
        token=token,
        title="Troupe control panel",
        version=__version__,
        description="Submit, watch and steer jobs. Errors are `application/problem+json`.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(limits.known_query)],
        responses={"4XX": {"model": views.Problem}, "5XX": {"model": views.Problem}},
    )
    calls.install(app)
    describe = app.openapi
    app.openapi = lambda: limits.openapi_of_errors(describe())  # type: ignore[method-assign]
    # Inside of those that refuse a request for what it is: what they refuse is not read.
    app.add_middleware(limits.BoundedBodies)
    app.include_router(access.router)
    app.include_router(jobs_api.router)
    app.include_router(samples)
    app.include_router(functions_api.router)
    app.include_router(populations)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(STATIC / "docs.html")

    @app.get("/healthz", tags=["panel"])
    async def health() -> dict[str, str]:
        """The panel itself is up (whatever the orchestrator does)."""
        return {"status": "serving"}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/cluster", tags=["cluster"])
    async def cluster(request: Request) -> dict[str, Any]:
        """Workers, engines, bindings and services now."""
        reply = await request.app.state.upstream.stub.GetCluster(pb.GetClusterRequest())
        return views.plain(reply)

    @app.get("/api/engines", tags=["cluster"])
    async def engines(request: Request) -> list[dict[str, Any]]:
        """Serving replicas with their state, version and load."""
        reply = await request.app.state.upstream.stub.GetCluster(pb.GetClusterRequest())
        return [views.plain(engine) for engine in reply.engines]

    @app.get("/api/cluster/events", tags=["cluster"], **EVENT_STREAM)
    async def watch_cluster(request: Request) -> EventSourceResponse:
        """The cluster and its newest jobs about every second: server-sent events `cluster`."""
        return EventSourceResponse(request.app.state.picture.events(), ping=15)

    return app
