"""gRPC interceptor around every handler: authentication, deadlines, idempotency, typed errors."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import structlog
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from services.chassis import logs
from services.chassis.idempotency import IdempotencyCache
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from troupe.outcomes import described
from troupe.rpc import (
    DeadlineExceeded,
    Internal,
    TroupeError,
    Unavailable,
    Unimplemented,
    to_status,
)
from troupe.rpc.authentication import HEADER, authentication_of, require
from troupe.rpc.errors import DETAILS_KEY, undecodable

log = structlog.get_logger("troupe.calls")


class ObservedCall:
    """Log context, span and metrics of one call, from its arrival to its outcome.

    The log context is never unbound, since gRPC runs every call in its own context.
    """

    def __init__(
        self, telemetry: Telemetry, method: str, kind: str, request: Any, context: Any
    ) -> None:
        self._telemetry = telemetry
        self._method = method
        self._kind = kind
        self._start = time.perf_counter()
        metadata = [(k, v) for k, v in context.invocation_metadata() or () if isinstance(v, str)]
        logs.bind_call(request, metadata)
        parent = propagate.extract(dict(metadata))
        self._span = telemetry.tracer.start_span(method, parent, kind=SpanKind.SERVER)
        otel_context.attach(trace.set_span_in_context(self._span, parent))
        telemetry.rpc_in_flight.labels(method).inc()

    def end(self, code: grpc.StatusCode, error: TroupeError | None, slow: float) -> None:
        """Record the outcome; a unary call longer than `slow` seconds is logged as slow."""
        seconds = time.perf_counter() - self._start
        telemetry = self._telemetry
        telemetry.rpc_in_flight.labels(self._method).dec()
        telemetry.rpc_seconds.labels(self._method, self._kind, code.name).observe(seconds)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
            self._report(error, seconds)
        elif self._kind == "unary" and seconds > slow:
            log.warning("slow call", method=self._method, seconds=round(seconds, 3))
        else:
            log.debug("call", method=self._method, seconds=round(seconds, 6), code=code.name)
        if self._kind == "unary" and seconds > slow:
            telemetry.rpc_slow.labels(self._method).inc()
        self._span.end()

    def _report(self, error: TroupeError, seconds: float) -> None:
        fields = {"method": self._method, "kind": error.kind, "seconds": round(seconds, 3)}
        cause = error.__cause__
        if isinstance(error, Internal) and cause is not None:
            log.error("call failed", error=str(error), exc_info=cause, **fields)
            return
        # A caller that is pushed back retries every second: only the 1st, 2nd, 4th ... refusal is
        # logged as a warning.
        counts = self._telemetry.refused
        counts[self._method, error.kind] += 1
        times = counts[self._method, error.kind]
        report = log.warning if times & (times - 1) == 0 else log.debug
        report("call refused", error=str(error), times=times, **fields)


_HEALTH: Final = "/grpc.health."
_UNIMPLEMENTED: Final = grpc.StatusCode.UNIMPLEMENTED
# Methods that are answered at any time, also before the service is ready and while it drains.
_INFRASTRUCTURE: Final = (_HEALTH, "/grpc.reflection.")
# Decoder: received bytes -> the request (or stream of requests), and the error if it is invalid.
Decode = Callable[[Any], tuple[Any, TroupeError | None]]


class ChassisInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor that wraps the handlers of a server. `state` moves "starting" -> "serving" ->
    "draining"."""

    def __init__(self, settings: ServiceSettings, telemetry: Telemetry) -> None:
        self.state = "starting"
        # Why the service is not ready yet, for the errors of calls refused meanwhile.
        self.problem: Callable[[], str | None] = lambda: None
        self.idempotency = IdempotencyCache(settings.idempotency_seconds)
        self._settings = settings
        self._telemetry = telemetry
        self._authentication = authentication_of(settings.token)
        self._wrapped: dict[str, Any] = {}
        # Tasks of the calls in flight, and of those that are cancelled at the end of a drain.
        self._streams: set[asyncio.Task[Any]] = set()
        self._unary: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        # Streams with a message that gRPC is sending. If cancelled there, they would end without a
        # status, and their clients would wait until the server stops.
        self._sending: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the wrapped handler of the called method; gRPC itself refuses unknown methods."""
        wrapped = self._wrapped.get(details.method)
        if wrapped is None:
            handler = await continuation(details)
            if handler is None:
                return None
            wrapped = self._wrapped[details.method] = self._wrap(details.method, handler)
        return wrapped

    def cut_streams(self) -> None:
        """End every open stream with UNAVAILABLE, so that its client reconnects elsewhere."""
        self._cut_all(self._streams)

    def cut_unary(self) -> None:
        """End every unary call in flight with UNAVAILABLE."""
        self._cut_all(self._unary)

    def _cut_all(self, tasks: set[asyncio.Task[Any]]) -> None:
        self._cut |= tasks
        for task in tasks - self._sending:
            task.cancel()

    def _wrap(self, method: str, handler: Any) -> Any:
        # Requests are decoded here, because gRPC answers UNKNOWN if it cannot decode a request.
        codec = (None, _unless_bytes(handler.response_serializer))
        decode = handler.request_deserializer
        if handler.unary_unary is not None:
            unary = self._wrap_unary(method, handler.unary_unary, _decoded(decode))
            return grpc.unary_unary_rpc_method_handler(unary, *codec)
        if handler.unary_stream is not None:
            stream = self._wrap_stream(method, handler.unary_stream, _decoded(decode))
            return grpc.unary_stream_rpc_method_handler(stream, *codec)  # type: ignore[arg-type]
        if handler.stream_stream is not None:  # reflection
            stream = self._wrap_stream(method, handler.stream_stream, _all_decoded(decode))
            return grpc.stream_stream_rpc_method_handler(stream, *codec)  # type: ignore[arg-type]
        raise NotImplementedError(f"{method}: Troupe has no client-streaming calls")

    def _wrap_unary(self, method: str, behavior: Any, decode: Decode) -> Callable[[Any, Any], Any]:
        once = self.idempotency
        repeatable = getattr(behavior, "repeatable", False)
        compared = getattr(behavior, "compares", _all_of)

        async def unary(raw: Any, context: Any) -> Any:
            request, fault = decode(raw)
            call = self._observe(method, "unary", request, context)
            task = _current_task()
            self._unary.add(task)
            code, error = grpc.StatusCode.OK, None
            try:
                self._admit(method, context)
                if fault is not None:
                    raise fault
                request_id = getattr(request, "request_id", "")
                if repeatable or not request_id:
                    return await self._bounded(method, behavior, request, context)
                return await once.run(
                    (method, request_id),
                    compared(request),
                    lambda: self._bounded(method, behavior, request, context),
                    size=len(raw),
                )
            except BaseException as raised:
                code, error = self._judge(raised, method, context)
                if error is None:
                    raise
                await _abort(context, error)
            finally:
                self._unary.discard(task)
                self._cut.discard(task)
                if call is not None:
                    call.end(code, error, self._settings.slow_call_seconds)

        return unary

    def _wrap_stream(
        self, method: str, behavior: Any, decode: Decode
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def stream(raw: Any, context: Any) -> AsyncIterator[Any]:
            request, fault = decode(raw)
            call = self._observe(method, "stream", request, context)
            task = _current_task()
            self._streams.add(task)
            code, error = grpc.StatusCode.OK, None
            try:
                self._admit(method, context)
                if fault is not None:
                    raise fault
                responses = behavior(request, context)
                if inspect.isawaitable(responses):  # a handler that writes on the context
                    await responses
                else:
                    async for response in responses:
                        self._sending.add(task)
                        yield response
                        self._sending.discard(task)
                        if task in self._cut:
                            await responses.aclose()
                            raise self._cut_short()
            except BaseException as raised:
                code, error = self._judge(raised, method, context)
                if error is None:
                    raise
                await _abort(context, error)
            finally:
                for tasks in (self._streams, self._cut, self._sending):
                    tasks.discard(task)
                if call is not None:
                    call.end(code, error, self._settings.slow_call_seconds)

        return stream

    def _observe(self, method: str, kind: str, request: Any, context: Any) -> ObservedCall | None:
        if method.startswith(_INFRASTRUCTURE):
            return None
        return ObservedCall(self._telemetry, method.lstrip("/"), kind, request, context)

    def _admit(self, method: str, context: Any) -> None:
        """Raise `TroupeError` unless this caller may call this method now."""
        if self._authentication is not None and not method.startswith(_HEALTH):
            sent = dict(context.invocation_metadata() or ()).get(HEADER, "")
            require(self._authentication, str(sent))
        if self.state != "serving" and not method.startswith(_INFRASTRUCTURE):
            problem = self.problem() if self.state == "starting" else None
            raise Unavailable(
                f"{self._telemetry.service} is {self.state}" + (f": {problem}" if problem else ""),
                kind=f"service_{self.state}",
            )

    async def _bounded(self, method: str, behavior: Any, request: Any, context: Any) -> Any:
        """Await the handler's response, bounded by the call's deadline."""
        given = context.time_remaining()
        limit = self._settings.server_deadline_seconds
        if given is not None:
            # gRPC itself cancels at the client's deadline; a call that continues without its client
            # (idempotency) is bounded here.
            limit = max(limit, given)
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                return await behavior(request, context)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise DeadlineExceeded(
                f"{method.lstrip('/')} did not end within {limit:g} s",
                remedy="Give the call a longer deadline, or find the cause of the delay.",
            ) from error

    def _judge(
        self, raised: BaseException, method: str, context: Any
    ) -> tuple[grpc.StatusCode, TroupeError | None]:
        """Return the status and typed error for a handler's exception; no error if gRPC has
        replied."""
        if isinstance(raised, TroupeError):
            return raised.code, raised
        if isinstance(raised, grpc.aio.AbortError):
            return grpc.StatusCode.UNKNOWN, None
        if isinstance(raised, asyncio.CancelledError):
            task = _current_task()
            if task not in self._cut:
                return grpc.StatusCode.CANCELLED, None
            task.uncancel()
            cut = self._cut_short()
            return cut.code, cut
        if isinstance(raised, GeneratorExit):  # of a stream that is closed
            return grpc.StatusCode.UNKNOWN, None
        if isinstance(raised, MemoryError):
            # The caller repeats the call; `watchdog` meanwhile ends a process without memory, and
            # another process replaces it.
            starved = Unavailable(
                f"{self._telemetry.service} does not have enough memory for this call",
                kind="no_memory",
            )
            return starved.code, starved
        if isinstance(raised, NotImplementedError) and context.code() == _UNIMPLEMENTED:
            # The base class that gRPC generates for a contract has set this code.
            missing = Unimplemented(
                "the contract has this method, but this service does not",
                field=method.lstrip("/"),
                remedy="Call another method; server reflection lists the contracts.",
            )
            return missing.code, missing
        error = Internal(
            described(raised),
            field=method.lstrip("/"),
            remedy="This is a bug in Troupe; the service's log has the traceback.",
        )
        error.__cause__ = raised
        return error.code, error

    def _cut_short(self) -> Unavailable:
        return Unavailable(
            f"{self._telemetry.service} shut down before the call ended", kind="service_draining"
        )


def _unless_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a serializer that passes bytes through, for handlers that serialize their responses
    themselves."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)


def _decoded(decode: Callable[[bytes], Any]) -> Decode:
    """Return a decoder of one request."""

    def decoded(raw: bytes) -> tuple[Any, TroupeError | None]:
        try:
            return decode(raw), None
        except Exception as error:
            return None, undecodable(raw, error)

    return decoded


def _all_decoded(decode: Callable[[bytes], Any]) -> Decode:
    """Return a decoder of a stream of requests, which raises the error of an invalid one."""
    decoded = _decoded(decode)

    async def messages(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in requests:
            request, fault = decoded(raw)
            if fault is not None:
                raise fault
            yield request

    return lambda requests: (messages(requests), None)


def _all_of(request: Any) -> bytes:
    payload: bytes = request.SerializeToString(deterministic=True)
    return payload


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "handlers run in tasks"
    return task


async def _abort(context: Any, error: TroupeError) -> None:
    status = to_status(error)
    await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
