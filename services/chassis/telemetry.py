"""Metrics and traces of one server process."""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Final

from opentelemetry import trace
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from services.chassis.settings import ServiceSettings
from troupe.rpc.errors import port_error

# Histogram buckets, from a fraction of a millisecond (a cached answer) to minutes (a model load).
SECONDS_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)

# Buckets of delays of an event loop: fine about those at which heartbeats and deadlines suffer.
LOOP_BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 30.0),
)
# How often an event loop that computes is looked at: short against the stalls that matter.
_LOOK_SECONDS: Final = 0.025
# And one that does next to nothing, which is woken for each look: forty looks a second took 4
# thousandths of a core of every service without work.
_IDLE_LOOK_SECONDS: Final = 0.1
# The part of the time between two looks from which on a loop computes.
_BUSY: Final = 0.1


class Telemetry:
    """The Prometheus registry and the tracer of one server."""

    def __init__(self, service: str = "troupe") -> None:
        self.service = service
        self.registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.registry.register(collector)
        self.tracer = trace.get_tracer("troupe.chassis")
        self.rpc_seconds = self.histogram(
            "troupe_rpc_seconds", "Duration of a call.", ["method", "kind", "code"]
        )
        self.rpc_in_flight = self.gauge(
            "troupe_rpc_in_flight", "Calls being answered now.", ["method"]
        )
        self.rpc_slow = self.counter(
            "troupe_rpc_slow", "Unary calls longer than slow_call_seconds.", ["method"]
        )
        # Number of refused calls, by method and kind of error.
        self.refused: collections.Counter[tuple[str, str]] = collections.Counter()
        self._httpd: Any = None

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A counter in this server's registry; Prometheus appends `_total`."""
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A gauge in this server's registry."""
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """A histogram in this server's registry; by default of seconds."""
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def serve_metrics(self, settings: ServiceSettings) -> int:
        """Serve `/metrics` in a thread; returns the port. Raises `TroupeError`."""
        try:
            self._httpd, _ = start_http_server(
                settings.metrics_port, settings.host, registry=self.registry
            )
        except OSError as error:
            raise port_error(
                settings.host, settings.metrics_port, "TROUPE_METRICS_PORT", error
            ) from None
        return int(self._httpd.server_port)

    def close(self) -> None:
        """Stop serving `/metrics`; the port is free half a second later."""
        httpd, self._httpd = self._httpd, None
        if httpd is None:
            return

        def shut() -> None:
            httpd.shutdown()  # waits for the server's thread, which polls twice a second
            httpd.server_close()

        threading.Thread(target=shut, name="metrics-close", daemon=True).start()


class _Counts:
    """A histogram with `LOOP_BUCKETS`."""

    def __init__(self) -> None:
        self._counts = [0.0] * (len(LOOP_BUCKETS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(LOOP_BUCKETS, seconds)] += 1
        self.seconds += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many were at most that."""
        bounds = (*map(str, LOOP_BUCKETS), "+Inf")
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))


class LoopWatch(Collector):
    """Measures for how long a server's event loop advances nothing else.

    A timer that comes late shows the time in which no other call, heartbeat or deadline was looked
    at. Two clocks tell why: `cpu` is what the loop's own thread computed of it; the rest it waited
    for a core, for the interpreter lock, or for a blocking call.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        # Counted here: observing a histogram of prometheus_client forty times a second took most of
        # what an idle service computes.
        self._wall, self._cpu = _Counts(), _Counts()
        telemetry.registry.register(self)
        self._due = self._computed = self._interval = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to watch the running loop, in the thread that runs it."""
        self._look_later(asyncio.get_running_loop(), time.thread_time(), _LOOK_SECONDS)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The metric families of the counts; called by the registry, in another thread."""
        family = HistogramMetricFamily(
            "troupe_event_loop_late_seconds",
            "By how much a timer of the event loop, forty times a second, ten where the loop does "
            "next to nothing, came late (wall), and what the loop's thread computed meanwhile "
            "(cpu).",
            labels=["clock"],
        )
        for clock, counts in (("wall", self._wall), ("cpu", self._cpu)):
            family.add_metric([clock], counts.cumulative(), counts.seconds)
        yield family

    def stop(self) -> None:
        """Stop watching. Repeatable."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self, loop: asyncio.AbstractEventLoop, computed: float, seconds: float) -> None:
        self._computed, self._interval = computed, seconds
        self._due = time.monotonic() + seconds
        self._timer = loop.call_later(seconds, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        late = max(0.0, time.monotonic() - self._due)
        now = time.thread_time()
        computed = now - self._computed
        self._wall.add(late)
        self._cpu.add(min(late, computed))
        busy = computed > _BUSY * self._interval
        self._look_later(loop, now, _LOOK_SECONDS if busy else _IDLE_LOOK_SECONDS)


def configure_tracing(service: str) -> Any:
    """Export spans to the collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names, if it is set.

    Returns the provider (shut it down to flush), or None: then trace context is only propagated.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not any(os.environ.get(name) for name in names):
        return None
    # The SDK and its exporter take a third of a second to import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider
