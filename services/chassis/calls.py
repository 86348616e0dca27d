"""One call seen from outside: its log context, its span, its metrics."""

from __future__ import annotations

import time
from typing import Any

import grpc
import structlog
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from services.chassis import logs
from services.chassis.telemetry import Telemetry
from troupe.rpc import Internal, TroupeError

log = structlog.get_logger("troupe.calls")


class ObservedCall:
    """Opened when a call arrives, ended with its outcome.

    What it binds stays bound: gRPC gives every call a context of its own.
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
        """Record the outcome; a unary call over `slow` seconds is reported as such."""
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
        # Whoever is pushed back asks again every second: the first refusals of a kind say it all.
        counts = self._telemetry.refused
        counts[self._method, error.kind] += 1
        times = counts[self._method, error.kind]
        report = log.warning if times & (times - 1) == 0 else log.debug
        report("call refused", error=str(error), times=times, **fields)
