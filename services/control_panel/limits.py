"""Checks of requests: the size of bodies, and unknown query parameters; OpenAPI of errors."""

from __future__ import annotations

import difflib
from typing import Any, Final

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.control_panel import calls
from services.control_panel.views import Problem
from troupe.http_bodies import BodyReader, BodyTooLarge, BodyTooSlow, ClientGone
from troupe.rpc.errors import InvalidArgument

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
            async with self._bodies.read(scope["headers"], receive) as body:
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
                remedy="Send it again, faster or when the panel has less to do.",
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
            "there is no such parameter",
            field=f"query.{name}",
            value=value,
            remedy=f"Did you mean `{close[0]}`?"
            if close
            else f"This call takes: {', '.join(known) or 'none'}.",
        )


def openapi_of_errors(document: dict[str, Any]) -> dict[str, Any]:
    """`document` (OpenAPI) with `application/problem+json` as the type of every error answer."""
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if status[0] in "45" and "application/json" in answer.get("content", {}):
                    answer["content"] = {
                        "application/problem+json": answer["content"]["application/json"]
                    }
    return document
