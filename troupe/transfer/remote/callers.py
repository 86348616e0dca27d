"""Who calls an owner: whether it may, and how it is told that something failed."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from pydantic import SecretStr

from troupe.rpc.addresses import is_loopback_host
from troupe.rpc.errors import (
    DETAILS_KEY,
    Internal,
    TroupeError,
    Unauthenticated,
    to_status,
    undecodable,
)

log = logging.getLogger(__name__)


def from_here(peer: str) -> bool:
    """Whether gRPC's name of a caller is one of this host's."""
    kind, _, place = peer.partition(":")
    if kind == "unix":
        return True
    host = place.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0].strip("[]")
    return is_loopback_host(host)


def abort(context: Any, error: TroupeError) -> NoReturn:
    """End the call with `error`."""
    status = to_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(error.code, status.message)
    raise AssertionError("abort raises")


class TypedErrors(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Answers with a typed status to whatever a handler raises, and to bytes that are no request;
    gRPC by itself says UNKNOWN."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        decode = handler.request_deserializer or bytes

        def unary(raw: bytes, context: Any) -> Any:
            with _typed(context):
                return handler.unary_unary(_decoded(decode, raw), context)

        def stream(raw: bytes, context: Any) -> Iterator[Any]:
            with _typed(context):
                yield from handler.unary_stream(_decoded(decode, raw), context)

        codec = (None, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, *codec)
        return grpc.unary_unary_rpc_method_handler(unary, *codec)


def _decoded(decode: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return decode(raw)
    except Exception as error:
        raise undecodable(raw, error) from None


@contextmanager
def _typed(context: Any) -> Iterator[None]:
    try:
        yield
    except TroupeError as error:
        abort(context, error)
    except Exception as error:
        if type(error) is Exception and not error.args:  # how gRPC's `abort` leaves a handler
            raise
        log.exception("a call failed")
        abort(context, Internal(f"{type(error).__name__}: {error}"))


class Bearer(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers without the cluster's token."""

    def __init__(self, token: SecretStr) -> None:
        self._expected = f"Bearer {token.get_secret_value()}".encode()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        sent = dict(details.invocation_metadata or ()).get("authorization", "")
        if hmac.compare_digest(str(sent).encode(), self._expected):
            return continuation(details)
        error = Unauthenticated(
            "the bearer token is wrong" if sent else "a bearer token is required",
            field="token",
            remedy="Set TROUPE_TOKEN to the token that the services were started with.",
        )

        def refuse(request: Any, context: Any) -> Any:
            abort(context, error)

        handler = continuation(details)
        if handler is not None and handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)
