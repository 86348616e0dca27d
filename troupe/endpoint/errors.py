"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from troupe.workflow.errors import ContextOverflowError, TurnError, WorkflowError

# Kinds of failed turns that mean that the trajectory has ended.
_GONE = frozenset({"trajectory_ended", "job_released"})


class ApiError(Exception):
    """A response that reports an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type

    @property
    def body(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response. It tells clients not to retry: Troupe has retried already."""
        return JSONResponse(self.body, self.status, headers={"x-should-retry": "false"})


def refused(message: str, param: str, remedy: str, *, code: str = "unsupported_value") -> ApiError:
    """A 400 that names the field and the remedy."""
    return ApiError(400, f"{message}. {remedy}", code=code, param=param)


def unknown_address() -> ApiError:
    """The same 404 for a wrong address, an unknown agent and a trajectory that has ended."""
    return ApiError(
        404,
        "no agent is served here: its trajectory has ended, or the address is wrong. Ask the "
        "workflow's `agents[name].endpoint()` for the one of this trajectory.",
        code="not_found",
    )


def of_workflow(error: WorkflowError) -> ApiError:
    """The response to a failed turn."""
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if not isinstance(error, TurnError):
        return ApiError(400, str(error), code=error.kind, param=error.field)
    if error.kind in _GONE:
        return unknown_address()
    if error.kind == "bad_turn":
        return ApiError(400, str(error), code=error.kind, param=error.field)
    late = error.kind == "deadline"
    return ApiError(504 if late else 500, str(error), code=error.kind, type="server_error")
