"""Errors in the shape of OpenAI's API, whatever raised them."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from troupe.workflow.errors import ContextOverflowError, TurnError, WorkflowError

# Which of our kinds are the caller's doing, and what OpenAI's clients know them as.
_GONE = frozenset({"trajectory_ended", "job_released"})


class ApiError(Exception):
    """An answer that is an error."""

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
        """As OpenAI's clients read it."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response. Clients are told not to repeat it: what could be has been, here."""
        return JSONResponse(self.body, self.status, headers={"x-should-retry": "false"})


def refused(message: str, param: str, remedy: str, *, code: str = "unsupported_value") -> ApiError:
    """A 400 that names the field and what to do about it."""
    return ApiError(400, f"{message}. {remedy}", code=code, param=param)


def no_such_place() -> ApiError:
    """A 404 that says the same of a wrong address, an unknown agent and a trajectory that ended."""
    return ApiError(
        404,
        "no agent is served here: its trajectory has ended, or the address is wrong. Ask the "
        "workflow's `agents[name].endpoint()` for the one of this trajectory.",
        code="not_found",
    )


def of_workflow(error: WorkflowError) -> ApiError:
    """What a turn's failure looks like from outside."""
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if not isinstance(error, TurnError):
        return ApiError(400, str(error), code=error.kind, param=error.field)
    if error.kind in _GONE:
        return no_such_place()
    if error.kind == "bad_turn":
        return ApiError(400, str(error), code=error.kind, param=error.field)
    late = error.kind == "deadline"
    return ApiError(504 if late else 500, str(error), code=error.kind, type="server_error")
