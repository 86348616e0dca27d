"""Typed errors: the kind of a failure, the field at fault, and the remedy.

A service raises an error, gRPC carries it as a status with a `Problem`, and the caller gets the
same class back. Only this package handles `grpc.RpcError`.

A new kind of error is a subclass with `default_kind`, and with `default_field` and `default_remedy`
where all its instances share them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]

from troupe.contracts import kinds
from troupe.outcomes import safe_text
from troupe.rpc.addresses import without_secrets
from troupe.v1 import common_pb2 as common_pb

E = TypeVar("E", bound=Exception)

DETAILS_KEY: Final = "grpc-status-details-bin"
HEALTH_PROBLEM_KEY: Final = "troupe-problem-bin"
"""Trailing metadata of a health check: the problem that an operator has to fix, as UTF-8."""
# Bytes on the wire. All headers of a response must fit into 8 KiB, and the text is sent twice
# (status and detail), percent-encoded: up to twelve bytes per character.
_MESSAGE_LIMIT: Final = 1500
_FIELD_LIMIT: Final = 300
_PRINTABLE: Final = "".join(chr(one) for one in range(0x20, 0x7F) if one != ord("%"))
# Characters of a text in an error that is not sent.
_TEXT_LIMIT: Final = 16_000
_TOO_LARGE: Final = re.compile(r"(Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")


def _safe(value: object) -> str:
    """Return `value` as bounded text without secrets, which are removed before cutting."""
    given = without_secrets(value) if type(value) is str else value
    return without_secrets(safe_text(given, _TEXT_LIMIT))


class TroupeError(Exception):
    """A failure with a stable `kind` and, if known, the field, its value and the remedy.

    `code` is its gRPC status. `default_kind`, `default_field` and `default_remedy` apply unless the
    raiser gives others.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_kind: ClassVar[str] = "unknown"
    default_field: ClassVar[str | None] = None
    default_remedy: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        field: str | None = None,
        value: object | None = None,
        remedy: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        field = self.default_field if field is None else field
        remedy = self.default_remedy if remedy is None else remedy
        # Texts may quote user code, so they are made safe to send.
        self.message = _safe(message)
        super().__init__(self.message)
        self.kind = kind or self.default_kind
        self.field = None if field is None else _safe(field)
        self.value = None if value is None else _safe(value)
        self.remedy = None if remedy is None else _safe(remedy)
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        subject = ""
        if self.field is not None:
            shown = "" if self.value is None else f" = {_clip(self.value, _FIELD_LIMIT)}"
            subject = f"{self.field}{shown}: "
        text = f"{subject}{self.message}"
        if not self.remedy:
            return text
        return f"{text}{'' if text.endswith(('.', '!', '?')) else '.'} {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.to_problem().SerializeToString()))

    def to_problem(self) -> common_pb.Problem:
        """Return the message that describes this error in gRPC calls, job records and events."""

        def clip(text: str | None, limit: int = _FIELD_LIMIT) -> str | None:
            return None if text is None else _clip_bytes(text, limit)

        return common_pb.Problem(
            kind=self.kind,
            message=_clip_bytes(self.message, _MESSAGE_LIMIT),
            field=clip(self.field),
            value=clip(self.value),
            remedy=clip(self.remedy, _FIELD_LIMIT * 2),
            retry_after_ms=self.retry_after_ms,
        )

    @staticmethod
    def from_problem(
        problem: common_pb.Problem, code: grpc.StatusCode | None = None
    ) -> TroupeError:
        """Return the error that `problem` describes; its class is given by `code`, else by the
        kind."""
        if code is not None:
            cls = _BY_CODE.get(code, TroupeError)
        else:
            cls = _BY_KIND.get(problem.kind, TroupeError)
        return cls(
            problem.message,
            kind=problem.kind or None,
            field=problem.field if problem.HasField("field") else None,
            value=problem.value if problem.HasField("value") else None,
            remedy=problem.remedy if problem.HasField("remedy") else None,
            retry_after_ms=problem.retry_after_ms if problem.HasField("retry_after_ms") else None,
        )


class InvalidArgument(TroupeError):
    """The request is invalid; repeating it does not help."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_kind = "invalid_argument"


class NotFound(TroupeError):
    """The named object does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_kind = "not_found"


class AlreadyExists(TroupeError):
    """The name is in use by another object."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_kind = "already_exists"


class FailedPrecondition(TroupeError):
    """The call is not allowed in the current state of the system."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_kind = "failed_precondition"


class ResourceExhausted(TroupeError):
    """A capacity or limit is exceeded. With `retry_after_ms` the call may be repeated."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_kind = "resource_exhausted"


class DeadlineExceeded(TroupeError):
    """A deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_kind = "deadline_exceeded"


class Unavailable(TroupeError):
    """The service cannot be reached, is starting, or is shutting down."""

    code = grpc.StatusCode.UNAVAILABLE
    default_kind = "unavailable"


class Internal(TroupeError):
    """A bug or failure inside Troupe."""

    code = grpc.StatusCode.INTERNAL
    default_kind = "internal"


class Aborted(TroupeError):
    """The call lost against a concurrent one: a claim was superseded, a lease lost."""

    code = grpc.StatusCode.ABORTED
    default_kind = "aborted"


class Unauthenticated(TroupeError):
    """The bearer token is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_kind = "unauthenticated"


class Unimplemented(TroupeError):
    """The server does not know this call."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_kind = "unimplemented"


class DataLoss(TroupeError):
    """Stored bytes are corrupt."""

    code = grpc.StatusCode.DATA_LOSS
    default_kind = "data_loss"


_CLASSES: Final = tuple(TroupeError.__subclasses__())
_BY_CODE: Final = {cls.code: cls for cls in _CLASSES}
_BY_KIND: Final = {cls.default_kind: cls for cls in _CLASSES}


class Explained(Protocol):
    """An error with what a `TroupeError` says: errors of calls and of workflows are such."""

    message: str
    kind: str
    field: str | None
    value: str | None
    remedy: str | None


def recast(error: Explained, make: Callable[..., E]) -> E:
    """Return `error` as one of the class `make`, with the same kind, message, field, value and
    remedy, but without a hint when to retry."""
    return make(
        error.message, kind=error.kind, field=error.field, value=error.value, remedy=error.remedy
    )


def undecodable(raw: bytes, error: Exception) -> InvalidArgument:
    """Return the error of a request whose bytes `raw` cannot be decoded."""
    return InvalidArgument(
        f"these {len(raw):,} bytes are not a request of this call: {error}",
        kind="undecodable_request",
        field="request",
        remedy="Send the protobuf message that protos/troupe/v1 defines for this call; strings are "
        "UTF-8.",
    )


def to_status(error: TroupeError) -> status_pb2.Status:
    """Return the `google.rpc.Status` of `error`, with its `Problem` as the one detail."""
    # As in the header `grpc-message`.
    message = _clip_bytes(str(error), _MESSAGE_LIMIT, partial(quote, safe=_PRINTABLE))
    status = status_pb2.Status(code=_number(error.code), message=message)
    status.details.add().Pack(error.to_problem())
    return status


def from_status(text: bytes) -> TroupeError:
    """Return the error whose serialized `to_status` this is."""
    status = status_pb2.Status.FromString(text)
    if (problem := _problem_in(status)) is None:
        return Internal(status.message)
    code = next((code for code in grpc.StatusCode if _number(code) == status.code), None)
    return TroupeError.from_problem(problem, code)


def from_rpc_error(
    error: grpc.RpcError, *, target: str = "", timeout: float | None = None
) -> TroupeError:
    """Return the typed error of a failed call, of the service or of gRPC itself.

    `target` ("method at address") and `timeout` (seconds that the caller gave it) are named in
    errors that gRPC itself made: no server, no answer in time, a message over the size limit.
    """
    code = _call(error, "code", grpc.StatusCode.UNKNOWN)
    details = str(_call(error, "details", "") or "")
    problem = _problem_of(error)
    if problem is not None:
        return TroupeError.from_problem(problem, code)
    where = f" ({target})" if target else ""
    if too_large := _TOO_LARGE.search(details):
        verb, size, limit = too_large.groups()
        what = "request" if (verb == "Sent") == ("CLIENT" in details) else "response"
        return ResourceExhausted(
            f"the {what} of {int(size):,} bytes is over the message limit of "
            f"{int(limit):,} bytes{where}",
            kind=kinds.MESSAGE_TOO_LARGE,
            field="max_message_mib",
            value=int(limit) // 2**20,
            remedy="Send less at once, or raise TROUPE_MAX_MESSAGE_MIB on both sides.",
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(
            f"no service answers{where}: {details or 'connection failed'}",
            remedy="Check that the service runs and that the address is right.",
        )
    if code is grpc.StatusCode.CANCELLED:
        # A cancellation by the peer; the caller's own is an asyncio.CancelledError.
        return Unavailable(f"the server cancelled the call{where}", kind="cancelled_by_server")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        limit = "in time" if timeout is None else f"within {timeout:g} s"
        return DeadlineExceeded(f"no answer {limit}{where}")
    cls = _BY_CODE.get(code, TroupeError)
    return cls(f"{details or code.name}{where}")


def port_error(
    host: str, port: int, variable: str, error: Exception, host_variable: str = "TROUPE_HOST"
) -> TroupeError:
    """Return the error of a port that cannot be bound, with a remedy.

    `variable` and `host_variable` are the settings of the port and of the host.
    """
    number = getattr(error, "errno", errno.EADDRINUSE)
    if number == errno.EADDRINUSE:
        return Unavailable(
            f"port {port} on {host} is in use by another process",
            kind="port_in_use",
            remedy=f"Stop that process or set {variable} to a free port (0 takes any).",
        )
    variable = variable if number == errno.EACCES else host_variable
    return Unavailable(
        f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}",
        kind="cannot_listen",
        remedy=f"Set {variable} to a value that this process may listen on.",
    )


def _problem_of(error: grpc.RpcError) -> common_pb.Problem | None:
    for key, value in _call(error, "trailing_metadata", ()) or ():
        if key != DETAILS_KEY:
            continue
        try:
            return _problem_in(status_pb2.Status.FromString(value))
        except DecodeError:
            return None
    return None


def _problem_in(status: Any) -> common_pb.Problem | None:
    for detail in status.details:
        problem = common_pb.Problem()
        if detail.Unpack(problem):
            return problem
    return None


def _call(error: grpc.RpcError, name: str, default: Any) -> Any:
    method = getattr(error, name, None)
    return default if method is None else method()


def _number(code: grpc.StatusCode) -> int:
    return int(code_pb2.Code.Value(code.name))


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _clip_bytes(text: str, limit: int, encoded: Callable[[str], bytes | str] = str.encode) -> str:
    """Cut `text` to at most `limit` bytes after `encoded`; halves of surrogate pairs become
    `\\udXXX`."""
    text = _clip(text, limit).encode(errors="backslashreplace").decode()
    if len(encoded(text)) <= limit:
        return text
    short, long = 0, len(text)
    while long - short > 1:
        middle = (short + long) // 2
        fits = len(encoded(text[:middle])) + 3 <= limit
        short, long = (middle, long) if fits else (short, middle)
    return text[:short] + "..."


def _rebuild(cls: type[TroupeError], problem: bytes) -> TroupeError:
    error = TroupeError.from_problem(common_pb.Problem.FromString(problem), cls.code)
    error.__class__ = cls
    return error
