"""The FastAPI application: REST under /api, the page at /, OpenAPI at /docs; checks of requests."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import AwareDatetime
from sse_starlette import EventSourceResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.control_panel import access, calls, functions_api, jobs_api, plan_api, views
from services.control_panel.access import Panel
from services.control_panel.calls import Upstream, upstream
from services.control_panel.events import EVENT_STREAM, ClusterFeed
from services.control_panel.views import Problem
from troupe import __version__
from troupe.client.conversion import to_json
from troupe.http.bodies import BodyReader, BodyTooLarge, BodyTooSlow, ClientGone
from troupe.rpc import ClientSettings
from troupe.rpc.errors import InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

STATIC = Path(__file__).parent / "static"


def create_app(
    orchestrator_address: str,
    token: str | None = None,
    client: ClientSettings | None = None,
    hosts: Iterable[str] = (),
) -> FastAPI:
    """Yield the panel of the orchestrator at `orchestrator_address`.

    With `token`, calls below /api need it as `Authorization: Bearer`, or need a session.
    `hosts`: host names, in addition to loopback, at which browsers reach the panel.
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
        description="Submit, watch and control jobs. Errors are `application/problem+json`.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(known_query)],
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}},
    )
    calls.install(app)
    describe = app.openapi
    app.openapi = lambda: openapi_of_errors(describe())  # type: ignore[method-assign]
    # Inside the access checks, so that the body of a refused request is not read.
    app.add_middleware(BoundedBodies)
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
        """Return whether the panel itself serves, regardless of the orchestrator's state."""
        return {"status": "serving"}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/cluster", tags=["cluster"])
    async def cluster(request: Request) -> dict[str, Any]:
        """Return the current state of workers, engines, bindings and services."""
        reply = await upstream(request).stub.GetCluster(orchestrator_pb.GetClusterRequest())
        return to_json(reply)

    @app.get("/api/engines", tags=["cluster"])
    async def engines(request: Request) -> list[dict[str, Any]]:
        """Return serving replicas with their state, version and load."""
        reply = await upstream(request).stub.GetCluster(orchestrator_pb.GetClusterRequest())
        return [to_json(engine) for engine in reply.engines]

    @app.get("/api/cluster/utilization", tags=["cluster"])
    async def utilization(
        request: Request,
        since: Annotated[
            AwareDatetime | None, Query(description="Default: an hour before `until`.")
        ] = None,
        until: Annotated[AwareDatetime | None, Query(description="Default: now.")] = None,
        points: Annotated[
            int, Query(ge=1, le=1000, description="At most so many values of a host.")
        ] = 240,
    ) -> views.Utilization:
        """Return the utilization of CPU, memory and GPUs of every host in a range of time. Samples
        of the last hours are 10 s apart, older ones are means."""
        wanted = orchestrator_pb.ListHostUseRequest(points=points)
        if since is not None:
            wanted.since.FromDatetime(since)
        if until is not None:
            wanted.until.FromDatetime(until)
        return views.utilization(await upstream(request).stub.ListHostUse(wanted))

    @app.get("/api/cluster/events", tags=["cluster"], **EVENT_STREAM)
    async def watch_cluster(request: Request) -> EventSourceResponse:
        """Stream the cluster and its newest jobs about every second: server-sent events
        `cluster`."""
        return EventSourceResponse(request.app.state.feed.events(), ping=15)

    return app


# Deployed functions come with their source; other bodies are small.
MAX_BODY_BYTES: Final = 16 * 2**20


class BoundedBodies:
    """ASGI middleware: reads a request's body before the application does, or refuses it."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._bodies = BodyReader(limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 to a body that is too large, 408 to one that arrives too slowly."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            client = scope["client"][0] if scope.get("client") else None
            async with self._bodies.read(scope["headers"], receive, client) as body:
                whole = [bytes(body)]
                del body

                async def replay() -> Message:
                    if whole:
                        return {"type": "http.request", "body": whole.pop(), "more_body": False}
                    return await receive()

                return await self._app(scope, replay, send)
        except BodyTooLarge as error:
            problem = Problem(
                title="body_too_large",
                status=413,
                detail=str(error),
                field="body",
                remedy="Send less; keep data in files that the cluster's services can read.",
            )
        except BodyTooSlow as error:
            problem = Problem(
                title="body_too_slow",
                status=408,
                detail=str(error),
                field="body",
                remedy="Send it again, faster or when the panel is less busy.",
            )
        except ClientGone:
            return None
        return await calls.answer(problem)(scope, receive, send)


async def known_query(request: Request) -> None:
    """Refuse unknown query parameters, since a misspelt one would have no effect.

    Raises InvalidArgument.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.path.startswith("/api/"):
        return
    known = sorted(field.alias for field in route.dependant.query_params)
    for name, value in request.query_params.items():
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        raise InvalidArgument(
            "is not a parameter of this call",
            field=f"query.{name}",
            value=value,
            remedy=f"Did you mean `{close[0]}`?"
            if close
            else f"This call takes: {', '.join(known) or 'none'}.",
        )


def openapi_of_errors(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` (OpenAPI) with `application/problem+json` as the type of every error
    answer."""
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if status[0] in "45" and "application/json" in answer.get("content", {}):
                    answer["content"] = {
                        "application/problem+json": answer["content"]["application/json"]
                    }
    return document
