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

# Buckets of event loop delays, fine around the delays that affect heartbeats and deadlines.
LOOP_BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 30.0),
)
# Interval of checks of a busy event loop, short compared with relevant stalls.
_LOOK_SECONDS: Final = 0.025
# How long a client of `/metrics` may be silent.
_SILENCE_SECONDS: Final = 10.0
# Interval for an idle event loop, which each check wakes: forty checks per second took 0.4 % of a
# core in every idle service.
_IDLE_LOOK_SECONDS: Final = 0.1
# Busy fraction of the time between two checks from which a loop counts as busy.
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
        """Return a counter in this server's registry; Prometheus appends `_total`."""
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Return a gauge in this server's registry."""
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """Return a histogram in this server's registry; by default of seconds."""
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def serve_metrics(self, settings: ServiceSettings) -> int:
        """Serve `/metrics` in a thread, and return the port. Raises `TroupeError`."""
        try:
            self._httpd, _ = start_http_server(
                settings.metrics_port, settings.host, registry=self.registry
            )
            # By default a silent client keeps its thread and its open file forever.
            handler = self._httpd.RequestHandlerClass
            self._httpd.RequestHandlerClass = type(
                handler.__name__, (handler,), {"timeout": _SILENCE_SECONDS}
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
        """Return upper bounds, and the number of values up to each."""
        bounds = (*map(str, LOOP_BUCKETS), "+Inf")
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))


class LoopWatch(Collector):
    """A measurement of how long a server's event loop is blocked.

    A late timer shows the time in which no other call, heartbeat or deadline was handled. Two
    clocks show the reason: `cpu` is the computing time of the loop's own thread; for the rest it
    waited for a core, for the interpreter lock, or for a blocking call.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        # Counted here, since observing a histogram of prometheus_client forty times per second took
        # most of an idle service's computing time.
        self._wall, self._cpu = _Counts(), _Counts()
        telemetry.registry.register(self)
        self._due = self._computed = self._interval = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start watching the running loop; call it in the loop's thread."""
        self._look_later(asyncio.get_running_loop(), time.thread_time(), _LOOK_SECONDS)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric families of the counts; called by the registry, in another thread."""
        family = HistogramMetricFamily(
            "troupe_event_loop_late_seconds",
            "Delay of an event-loop timer (wall), checked forty times a second, or ten in an idle "
            "loop, and the computing time of the loop's thread meanwhile "
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
