"""Metrics and traces of one server process."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Sequence
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

from services.chassis.settings import ServiceSettings
from troupe.rpc.errors import port_error

# Histogram buckets, from a fraction of a millisecond (a cached answer) to minutes (a model load).
SECONDS_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


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
