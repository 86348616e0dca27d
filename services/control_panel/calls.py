"""The panel's connection to the orchestrator, and errors as RFC 9457 problem answers."""

from __future__ import annotations

from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from services.control_panel.views import Problem
from troupe.job.loading import problem_of
from troupe.outcomes import described
from troupe.rpc import ClientSettings, connect
from troupe.rpc.errors import TroupeError
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import reward_pb2_grpc as reward_grpc

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 422,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}


def answer(problem: Problem, retry_after_ms: int | None = None) -> JSONResponse:
    """Return the HTTP response of a problem."""
    headers = {"Retry-After": str(-(-retry_after_ms // 1000))} if retry_after_ms else None
    return JSONResponse(
        _encodable(problem.model_dump(exclude_none=True)),
        status_code=problem.status,
        media_type="application/problem+json",
        headers=headers,
    )


def problem_answer(title: str, status: int, detail: str, **fields: Any) -> JSONResponse:
    """Return the HTTP response of a problem with these fields."""
    return answer(Problem(title=title, status=status, detail=detail, **fields))


def of_error(error: TroupeError) -> Problem:
    """Return the problem of a failed call of a service."""
    return Problem(
        title=error.kind,
        status=HTTP_STATUS.get(error.code, 500),
        detail=error.message,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )


def _encodable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with lone surrogates escaped: JSON requests may have them, UTF-8 cannot."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in fields.items()
    }


def install(app: FastAPI) -> None:
    """Make `app` answer every error as a problem."""

    @app.exception_handler(TroupeError)
    async def _typed(_: Request, error: TroupeError) -> JSONResponse:
        return answer(of_error(error), error.retry_after_ms)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where, *location = first["loc"]
        if first["type"] == "json_invalid":
            place, why = first["loc"][-1], first.get("ctx", {}).get("error", first["msg"])
            return problem_answer(
                "invalid_argument",
                422,
                f"the body is not JSON: {why} at character {place}",
                field="body",
                remedy="Correct the JSON syntax there.",
            )
        found = problem_of(
            first, tuple(location), _body_of(request), "See docs/rest-api.md or /docs."
        )
        return problem_answer(
            "invalid_argument",
            422,
            found.message,
            field=".".join([where, *map(str, location)]),
            value=found.value or None,
            remedy=found.remedy,
        )

    @app.exception_handler(UnicodeEncodeError)
    async def _lone_surrogate(_: Request, error: UnicodeEncodeError) -> JSONResponse:
        half = error.object[error.start].encode("unicode-escape").decode()
        return problem_answer(
            "invalid_argument",
            422,
            f"{half} alone is not a character, but half of a surrogate pair",
            remedy="Send, and return, text that UTF-8 can encode.",
        )

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback after this.
        remedy = "This is a fault of Troupe; the panel's log has the traceback."
        return problem_answer("internal", 500, described(error), remedy=remedy)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        title = "not_found" if error.status_code == 404 else "http_error"
        detail = f"{request.method} {request.url.path}: {error.detail}"
        remedy = "See /docs for the available calls."
        return problem_answer(title, error.status_code, detail, remedy=remedy)


def _body_of(request: Request) -> type[BaseModel] | None:
    """Return the model of the called route's body; None if it has no body."""
    route = request.scope.get("route")
    taken = route.dependant.body_params if isinstance(route, APIRoute) else []
    found = taken[0].field_info.annotation if taken else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


class Upstream:
    """Channel and stubs of the orchestrator at `address`; gRPC reconnects by itself."""

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        self.address = address
        self._channel = connect(address, settings)
        self.stub: orchestrator_grpc.OrchestratorAsyncStub = (
            orchestrator_grpc.OrchestratorStub(self._channel)  # type: ignore[assignment]
        )
        # The orchestrator also answers the reward service's calls.
        self.functions: reward_grpc.RewardAsyncStub = reward_grpc.RewardStub(self._channel)  # type: ignore[assignment]

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)


def upstream(request: Request) -> Upstream:
    """Return the application's connection to the orchestrator."""
    found: Upstream = request.app.state.upstream
    return found
