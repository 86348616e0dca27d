"""Spans reach the collector that the environment names, in the caller's trace."""

from __future__ import annotations

import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from echo_process import Launch
from opentelemetry import context, trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE
from troupe.rpc import connect_sync
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.came = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.came.set()
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_are_exported_in_the_callers_trace(launch: Launch, tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    process = launch(
        TROUPE_PORT_FILE=tmp_path / "ports",
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    echo_port, _ = ports_of(process, tmp_path / "ports")
    parent = trace.SpanContext(0xABCDEF << 96, 0x1234 << 32, False, trace.TraceFlags(1))
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
    try:
        with connect_sync(f"127.0.0.1:{echo_port}") as channel:
            OrchestratorStub(channel).GetJob(orchestrator_pb.GetJobRequest(job_id="x"))
    finally:
        context.detach(token)
    assert collector.came.wait(PATIENCE)
    (span,) = collector.spans
    assert span.name == "troupe.v1.Orchestrator/GetJob"
    assert span.trace_id == parent.trace_id.to_bytes(16, "big")
    assert span.parent_span_id == parent.span_id.to_bytes(8, "big")
    server.stop(0)
