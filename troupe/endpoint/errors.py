"""Errors in the shapes of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from starlette.responses import JSONResponse

from troupe.contracts import kinds
from troupe.workflow.errors import ContextOverflowError, TurnError, WorkflowError

# Error kinds of turns whose trajectory has ended.
_GONE: Final = frozenset({kinds.TRAJECTORY_ENDED, kinds.JOB_RELEASED})
# `error.type` of Anthropic's API by status.
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    504: "timeout_error",
}


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
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body that Anthropic's clients read; `param` and `code` are additions."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {**self.body["error"], "type": kind}, "request_id": None}

    def response(self, *, anthropic: bool = False) -> JSONResponse:
        """Return the HTTP response. It tells clients not to retry: Troupe has retried already."""
        body = self.anthropic_body if anthropic else self.body
        return JSONResponse(body, self.status, headers={"x-should-retry": "false"})


class FieldNames:
    """An API's names for the fields of chat completion requests. Its requests are translated to
    these, and errors are translated back."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = dict(names or {})

    def __setitem__(self, field: str, name: str) -> None:
        self._names[field] = name

    def of(self, param: str) -> str:
        """Return the API's name of `param`, which may be a path: `tools[0].function.parameters`."""
        for field in sorted(self._names, key=len, reverse=True):
            if param == field or param.startswith((f"{field}.", f"{field}[")):
                return self._names[field] + param[len(field) :]
        return param

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Raise errors of the block, including workflow errors, as `ApiError` with the API's
        names."""
        try:
            yield
        except (ApiError, WorkflowError) as error:
            known = of_workflow(error) if isinstance(error, WorkflowError) else error
            message = known.message
            for field, name in self._names.items():
                message = message.replace(f"`{field}`", f"`{name}`")
            raise ApiError(
                known.status,
                message,
                code=known.code,
                param=None if known.param is None else self.of(known.param),
                type=known.type,
            ) from error


def refused(message: str, param: str, remedy: str, *, code: str = "unsupported_value") -> ApiError:
    """Return a 400 response that names the field and the remedy."""
    return ApiError(400, f"{message}. {remedy}", code=code, param=param)


def unknown_address() -> ApiError:
    """Return the same 404 for a wrong address, an unknown agent and a trajectory that has ended."""
    return ApiError(
        404,
        "no agent is served here: its trajectory has ended, or the address is wrong. Take the "
        "address of this trajectory from the workflow's `agents[name].endpoint()`.",
        code="not_found",
    )


def of_workflow(error: WorkflowError) -> ApiError:
    """Return the response to a failed turn."""
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if not isinstance(error, TurnError):
        return ApiError(400, str(error), code=error.kind, param=error.field)
    if error.kind in _GONE:
        return unknown_address()
    if error.kind == kinds.BAD_TURN:
        return ApiError(400, str(error), code=error.kind, param=error.field)
    late = error.kind == kinds.DEADLINE
    return ApiError(504 if late else 500, str(error), code=error.kind, type="server_error")
