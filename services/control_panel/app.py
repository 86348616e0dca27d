"""The FastAPI application: REST under /api, the page at /, OpenAPI at /docs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette import EventSourceResponse

from services.control_panel import access, calls, functions_api, jobs_api, limits, plan_api, views
from services.control_panel.access import Panel
from services.control_panel.calls import Upstream, upstream
from services.control_panel.events import EVENT_STREAM, ClusterFeed
from troupe import __version__
from troupe.client.conversion import to_json
from troupe.rpc import ClientSettings
from troupe.v1 import orchestrator_pb2 as pb

STATIC = Path(__file__).parent / "static"


def create_app(
    orchestrator_address: str,
    token: str | None = None,
    client: ClientSettings | None = None,
    hosts: Iterable[str] = (),
) -> FastAPI:
    """The panel of the orchestrator at `orchestrator_address`.

    With `token`, calls below /api need it as `Authorization: Bearer`, or a session that it opened.
    `hosts`: host names besides loopback at which browsers reach the panel.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.upstream = Upstream(orchestrator_address, client)
        app.state.feed = ClusterFeed(app.state.upstream)
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
    # Inside the access checks, so that the body of a refused request is not read.
    app.add_middleware(limits.BoundedBodies)
    app.include_router(access.router)
    app.include_router(jobs_api.router)
    app.include_router(jobs_api.samples)
    app.include_router(functions_api.router)
    app.include_router(jobs_api.populations)
    app.include_router(jobs_api.specifications)
    app.include_router(plan_api.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(STATIC / "docs.html")

    @app.get("/healthz", tags=["panel"])
    async def health() -> dict[str, str]:
        """Whether the panel itself serves, whatever the state of the orchestrator."""
        return {"status": "serving"}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/cluster", tags=["cluster"])
    async def cluster(request: Request) -> dict[str, Any]:
        """The current state of workers, engines, bindings and services."""
        reply = await upstream(request).stub.GetCluster(pb.GetClusterRequest())
        return to_json(reply)

    @app.get("/api/engines", tags=["cluster"])
    async def engines(request: Request) -> list[dict[str, Any]]:
        """Serving replicas with their state, version and load."""
        reply = await upstream(request).stub.GetCluster(pb.GetClusterRequest())
        return [to_json(engine) for engine in reply.engines]

    @app.get("/api/cluster/events", tags=["cluster"], **EVENT_STREAM)
    async def watch_cluster(request: Request) -> EventSourceResponse:
        """The cluster and its newest jobs about every second: server-sent events `cluster`."""
        return EventSourceResponse(request.app.state.feed.events(), ping=15)

    return app
