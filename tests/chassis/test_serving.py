"""A server in this process, called over a real channel."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from echo_service import Echo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.chassis.app import RunningServer, serve
from services.chassis.settings import ServiceSettings
from tests.support.waiting import PATIENCE, until
from troupe.rpc import (
    NO_RETRY,
    AlreadyExists,
    ClientSettings,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RetryPolicy,
    Unauthenticated,
    Unavailable,
    connect,
    connect_sync,
    new_id,
)
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub

NOT_RETRIED = ClientSettings(retry=NO_RETRY)


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[RunningServer[ServiceSettings]]:
    async with serve(echo, ServiceSettings(drain_seconds=0.5, max_message_mib=1)) as running:
        yield running


@pytest.fixture
async def stub(
    server: RunningServer[ServiceSettings],
) -> AsyncIterator[orchestrator_grpc.OrchestratorAsyncStub]:
    async with connect(server.address) as channel:
        yield OrchestratorStub(channel)


def get(order: str) -> orchestrator_pb.GetJobRequest:
    return orchestrator_pb.GetJobRequest(job_id=order)


async def test_typed_errors_reach_the_caller(stub) -> None:
    with pytest.raises(NotFound) as caught:
        await stub.GetJob(get("refuse j1"))
    error = caught.value
    assert (error.kind, error.field, error.value, error.remedy) == (
        *("not_found", "job_id", "j1"),
        "Look again.",
    )


async def test_a_fault_is_internal_and_logged_with_its_traceback(stub, caplog) -> None:
    with pytest.raises(Internal, match="ValueError: broken"):
        await stub.GetJob(get("raise broken"))
    await until(lambda: "Traceback" in caplog.text)  # the answer may be here before the line is
    assert "in _obey" in caplog.text


async def test_streams_deliver_and_fail_typed(stub, echo: Echo) -> None:
    seen: list[Any] = []
    with pytest.raises(NotFound) as caught:
        await _read(stub.WatchJob(orchestrator_pb.WatchJobRequest(job_id="raise")), seen)
    assert [event.event_id for event in seen] == ["0", "1", "2"]
    assert caught.value.value == "raise"


async def test_sync_channel_does_the_same(server) -> None:
    def calls() -> list[str]:
        with connect_sync(server.address, NOT_RETRIED) as channel:
            stub = OrchestratorStub(channel)
            assert stub.GetJob(get("hello")).job.name == "hello"
            with pytest.raises(NotFound):
                stub.GetJob(get("refuse x"))
            with pytest.raises(DeadlineExceeded):
                stub.GetJob(get("sleep 5"), timeout=0.1)
            with pytest.raises(NotFound):
                list(stub.WatchJob(orchestrator_pb.WatchJobRequest(job_id="raise")))
            stream = stub.WatchJob(orchestrator_pb.WatchJobRequest())
            seen = [next(stream).event_id, next(stream).event_id]
            stream.cancel()
            list(stream)  # ends, although the server would continue
            return seen

    assert await asyncio.to_thread(calls) == ["0", "1"]


async def test_message_over_the_limit_names_the_limit(stub, server) -> None:
    with pytest.raises(ResourceExhausted, match="limit of 1,048,576 bytes") as caught:
        async with connect(server.address, ClientSettings(max_message_mib=8)) as channel:
            await OrchestratorStub(channel).SubmitJob(
                orchestrator_pb.SubmitJobRequest(spec="x" * 2**21)
            )
    assert caught.value.kind == "message_too_large"
    with pytest.raises(ResourceExhausted) as caught:
        await stub.GetJob(get(f"big {2**21}"))
    assert caught.value.kind == "message_too_large"
    assert "TROUPE_MAX_MESSAGE_MIB" in str(caught.value)
    assert (await stub.GetJob(get("still there"))).job.name == "still there"


async def test_a_client_that_vanishes_cancels_its_work(stub, echo: Echo, server) -> None:
    call = asyncio.ensure_future(stub.GetJob(get("sleep 30")))
    stream = stub.WatchJob(orchestrator_pb.WatchJobRequest())
    async for _ in stream:
        break
    stream.cancel()
    await until(lambda: echo.runs == 1)
    call.cancel()
    await until(lambda: echo.cancelled == 2)


async def test_deadlines(echo: Echo) -> None:
    settings = ServiceSettings(server_deadline_seconds=0.2, drain_seconds=0.2)
    async with serve(echo, settings) as server:
        async with connect(server.address) as channel:
            with pytest.raises(DeadlineExceeded, match=r"within 0.1 s .*GetJob at 127"):
                await OrchestratorStub(channel).GetJob(get("sleep 9"), timeout=0.1)
        quick = ClientSettings(deadline_seconds=0.1)
        async with connect(server.address, quick) as channel:
            with pytest.raises(DeadlineExceeded):  # the client's default
                await OrchestratorStub(channel).GetJob(get("sleep 9"))
        async with grpc.aio.insecure_channel(server.address) as channel:  # a client with none
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await OrchestratorStub(channel).GetJob(get("sleep 9"))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "GetJob did not end within 0.2 s" in str(caught.value.details())


async def test_repeating_a_request_id_has_one_effect(stub, echo: Echo) -> None:
    request = orchestrator_pb.SubmitJobRequest(request_id=new_id(), spec="sleep 0.1")
    first, joined = await asyncio.gather(stub.SubmitJob(request), stub.SubmitJob(request))
    replayed = await stub.SubmitJob(request)
    assert first == joined == replayed
    assert echo.runs == 1
    request.spec = "another"
    with pytest.raises(AlreadyExists) as caught:
        await stub.SubmitJob(request)
    assert caught.value.kind == "request_id_reused"
    await stub.SubmitJob(orchestrator_pb.SubmitJobRequest(spec="no id"))
    await stub.SubmitJob(orchestrator_pb.SubmitJobRequest(spec="no id"))
    assert echo.runs == 3


async def test_a_failed_call_can_be_repeated(stub, echo: Echo) -> None:
    request = orchestrator_pb.SubmitJobRequest(request_id=new_id(), spec="refuse x")
    for _ in range(2):
        with pytest.raises(NotFound):
            await stub.SubmitJob(request)
    assert echo.runs == 2


async def test_work_with_an_id_outlives_its_client(stub, echo: Echo) -> None:
    request = orchestrator_pb.SubmitJobRequest(request_id=new_id(), spec="sleep 0.3")
    with pytest.raises(DeadlineExceeded):
        await stub.SubmitJob(request, timeout=0.1)
    assert (await stub.SubmitJob(request)).job.step == 1
    assert (echo.runs, echo.cancelled) == (1, 0)


async def test_token(echo: Echo) -> None:
    async with serve(echo, ServiceSettings(token="secret", drain_seconds=0.2)) as server:
        for token, hint in (None, "required"), ("wrong", "wrong"):
            async with connect(server.address, ClientSettings(token=token)) as channel:
                with pytest.raises(Unauthenticated, match=hint) as caught:
                    await OrchestratorStub(channel).GetJob(get("x"))
                assert "TROUPE_TOKEN" in str(caught.value)
                with pytest.raises(Unauthenticated):
                    async for _ in OrchestratorStub(channel).WatchJob(
                        orchestrator_pb.WatchJobRequest()
                    ):
                        pass
                health = health_pb2_grpc.HealthStub(channel)  # probes carry no token
                await health.Check(health_pb2.HealthCheckRequest())
        async with connect(server.address, ClientSettings(token="secret")) as channel:
            await OrchestratorStub(channel).GetJob(get("x"))
    assert echo.runs == 1


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Key and certificate for `name`, which is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with the openssl program")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=troupe", "-keyout", key, "-out", certificate),
            *("-addext", f"subjectAltName={name}"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.fixture
def pem(tmp_path: Path) -> tuple[Path, Path]:
    """Key and self-signed certificate for 127.0.0.1."""
    (directory := tmp_path / "loopback").mkdir()
    return make_certificate(directory, "IP:127.0.0.1")


async def probe(address: str, variables: dict[str, str]) -> int:
    """Exit status of the health check of containers."""
    command = (sys.executable, "-m", "services.chassis.probe", address, "--timeout", "3")
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables})
    return await process.wait()


async def test_tls(echo: Echo, pem: tuple[Path, Path], tmp_path: Path) -> None:
    key, certificate = pem
    settings = ServiceSettings(
        tls_key=key, tls_cert=certificate, tls_ca=certificate, tls_client_auth=True, token="s"
    )
    async with serve(echo, settings) as server:
        async with connect(server.address, server.settings.client()) as channel:
            assert (await OrchestratorStub(channel).GetJob(get("x"))).job.name == "x"
        stranger = ClientSettings(tls_ca=certificate, token="s", retry=NO_RETRY)
        for client in (stranger, NOT_RETRIED):  # without a certificate; without TLS
            async with connect(server.address, client) as channel:
                with pytest.raises(Unavailable):
                    await OrchestratorStub(channel).GetJob(get("x"))
    # Pods have addresses that no certificate can know: all of them show one that has a name.
    key, certificate = make_certificate(tmp_path, "DNS:cluster.troupe")
    settings = settings.model_copy(update={"tls_key": key, "tls_cert": certificate})
    settings = settings.model_copy(update={"tls_ca": certificate, "tls_name": "cluster.troupe"})
    async with serve(echo, settings) as server:
        async with connect(server.address, server.settings.client()) as channel:
            assert (await OrchestratorStub(channel).GetJob(get("x"))).job.name == "x"
        tls = {"TROUPE_TLS_CA": certificate, "TROUPE_TLS_CERT": certificate, "TROUPE_TLS_KEY": key}
        for name, status in (("cluster.troupe", 0), ("another", 1)):
            variables = {k: str(v) for k, v in tls.items()} | {"TROUPE_TLS_NAME": name}
            assert await probe(server.address, variables) == status
    with pytest.raises(InvalidArgument, match="TROUPE_TLS_KEY"):
        async with serve(echo, ServiceSettings(tls_cert=certificate)):
            pass
    with pytest.raises(InvalidArgument, match="TROUPE_TLS_CA"):
        connect("127.0.0.1:1", ClientSettings(tls_ca=key.with_name("none.pem")))


async def test_not_serving_until_ready_then_drains(echo: Echo) -> None:
    settings = ServiceSettings(drain_seconds=60, stream_drain_seconds=0.1)
    server = RunningServer(echo, settings)
    echo.start_seconds = 0.3
    await server.open()
    async with connect(server.address, NOT_RETRIED) as channel:
        stub, health = OrchestratorStub(channel), health_pb2_grpc.HealthStub(channel)
        for name in ("", echo.name):
            response = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(Unavailable) as caught:
            await stub.GetJob(get("x"))
        assert caught.value.kind == "service_starting"
        starting = asyncio.ensure_future(server.become_ready())
        async with connect(server.address) as patient:  # the retry carries a caller over
            assert (await OrchestratorStub(patient).GetJob(get("x"))).job.name == "x"
        await starting
        response = await health.Check(health_pb2.HealthCheckRequest(service=echo.name))
        assert response.status == health_pb2.HealthCheckResponse.SERVING

        unary = asyncio.ensure_future(stub.GetJob(get("sleep 0.5")))
        stream = stub.WatchJob(orchestrator_pb.WatchJobRequest())
        watched: list[Any] = []
        probed: list[Any] = []
        watching = asyncio.ensure_future(_read(stream, watched))
        probe = asyncio.ensure_future(_read(health.Watch(health_pb2.HealthCheckRequest()), probed))
        # All three have reached the service.
        await until(lambda: echo.runs == 2 and watched and probed)
        await server.close()
        assert (await unary).job.name == "sleep 0.5"
        assert echo.stopped
        for task in (watching, probe):
            with pytest.raises(Unavailable) as caught:
                await task
            assert caught.value.kind == "service_draining"


async def test_a_stream_that_is_cut_while_it_sends_ends_with_the_reason() -> None:
    class Floods(Echo):
        async def WatchJob(self, request: orchestrator_pb.WatchJobRequest, context: Any) -> Any:
            while True:
                yield orchestrator_pb.JobEvent()

    settings = ServiceSettings(drain_seconds=60, stream_drain_seconds=0.1)
    async with serve(Floods(), settings) as server, connect(server.address, NOT_RETRIED) as channel:
        heard: list[Any] = []
        stream = OrchestratorStub(channel).WatchJob(orchestrator_pb.WatchJobRequest())
        reading = asyncio.ensure_future(_read(stream, heard))
        await until(lambda: heard)
        await server.close()
        with pytest.raises(Unavailable) as caught:
            await reading
        assert caught.value.kind == "service_draining"


async def test_a_drain_ends_though_a_call_does_not(echo: Echo) -> None:
    settings = ServiceSettings(drain_seconds=0.2)
    async with serve(echo, settings) as server, connect(server.address, NOT_RETRIED) as channel:
        stub = OrchestratorStub(channel)
        request = orchestrator_pb.SubmitJobRequest(request_id="r", spec="sleep 60")
        calls = [
            asyncio.ensure_future(stub.GetJob(get("sleep 60"))),
            asyncio.ensure_future(stub.SubmitJob(request)),
        ]
        await until(lambda: echo.runs == 2)
        await server.close()
        for call in calls:
            with pytest.raises(Unavailable):
                await call
    assert echo.cancelled == 2


async def test_metrics_and_slow_calls(stub, server, caplog) -> None:
    await stub.GetJob(get("hello"))
    with pytest.raises(NotFound):
        await stub.GetJob(get("refuse x"))
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://127.0.0.1:{server.metrics_port}/metrics")).text
    method = 'method="troupe.v1.Orchestrator/GetJob"'
    assert f'troupe_rpc_seconds_count{{code="OK",kind="unary",{method}}} 1.0' in page
    assert f'troupe_rpc_seconds_count{{code="NOT_FOUND",kind="unary",{method}}} 1.0' in page
    assert f"troupe_rpc_in_flight{{{method}}} 0.0" in page
    assert "process_resident_memory_bytes" in page


async def test_a_silent_client_of_the_metrics_is_not_kept(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.chassis.telemetry._SILENCE_SECONDS", 0.05)
    async with serve(echo, ServiceSettings()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.metrics_port)
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()


async def test_slow_calls_are_told_and_ids_are_bound(echo: Echo, caplog) -> None:
    settings = ServiceSettings(slow_call_seconds=0.05, drain_seconds=0.2)
    async with serve(echo, settings) as server, connect(server.address) as channel:
        with caplog.at_level(logging.WARNING, logger="troupe.calls"):
            await OrchestratorStub(channel).GetJob(
                get("sleep 0.1"), metadata=(("troupe-trajectory-id", "t7"),)
            )
        await until(lambda: "slow call" in caplog.text)
        assert "job_id='sleep 0.1'" in caplog.text
        assert "trajectory_id='t7'" in caplog.text


async def test_trace_context_passes_through(stub, echo: Echo) -> None:
    from opentelemetry import context, trace

    trace_id = 0x1234567890ABCDEF1234567890ABCDEF
    span = trace.NonRecordingSpan(
        trace.SpanContext(trace_id, 0x1234567890ABCDEF, False, trace.TraceFlags(1))
    )
    token = context.attach(trace.set_span_in_context(span))
    try:
        await stub.GetJob(get("x"))
    finally:
        context.detach(token)
    assert f"{trace_id:032x}" in echo.metadata["traceparent"]


async def test_reflection_lists_the_service(server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([request])):
            names = {s.name for s in response.list_services_response.service}
    assert {"troupe.v1.Orchestrator", "grpc.health.v1.Health"} <= names


async def test_port_in_use_names_port_and_remedy(server, echo: Echo) -> None:
    port = server.settings.port
    with pytest.raises(Unavailable) as caught:
        async with serve(Echo(), ServiceSettings(port=port)):
            pass
    assert caught.value.kind == "port_in_use"
    assert f"port {port} on 127.0.0.1" in str(caught.value)
    with pytest.raises(Unavailable, match="TROUPE_METRICS_PORT"):
        async with serve(Echo(), ServiceSettings(metrics_port=server.metrics_port)):
            pass
    with pytest.raises(Unavailable, match="TROUPE_HOST"):
        async with serve(Echo(), ServiceSettings(host="203.0.113.1")):
            pass


async def test_calls_survive_a_restart_of_the_server(echo: Echo) -> None:
    settings = ServiceSettings(drain_seconds=0.2)
    patient = ClientSettings(retry=RetryPolicy(max_attempts=None, max_backoff=0.2))
    async with serve(echo, settings) as server:
        port = server.settings.port
        channel = connect(server.address, patient)
        assert (await OrchestratorStub(channel).GetJob(get("x"))).job.step == 1
    call = asyncio.ensure_future(OrchestratorStub(channel).GetJob(get("x")))
    await asyncio.sleep(0.5)  # how long the server is away; any time will do
    async with serve(Echo(), settings.model_copy(update={"port": port})):
        assert (await call).job.step == 1
    await channel.close()


async def _read(stream, seen: list[Any] | None = None) -> None:
    async for event in stream:
        if seen is not None:
            seen.append(event)


METHODS = ("GetJob", "SubmitJob", "WatchJob")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff",
        b"\x0a\x05ab",
        b"\x0a\x02\xff\xfe",
        b"\x08" + b"\x80" * 10,
    ],
    ids=["no tag", "cut off", "a string that is not UTF-8", "an endless number"],
)
async def test_malformed_requests_are_refused_as_invalid_arguments(
    server: RunningServer[ServiceSettings], method: str, body: bytes
) -> None:
    path = f"/troupe.v1.Orchestrator/{method}"
    async with connect(server.address, NOT_RETRIED) as channel:
        call = channel.unary_stream if method == "WatchJob" else channel.unary_unary
        answered = call(path, lambda raw: raw, lambda raw: raw)(body)
        with pytest.raises(InvalidArgument) as caught:
            await (anext(aiter(answered)) if method == "WatchJob" else answered)
    assert caught.value.kind == "undecodable_request"
    assert caught.value.field == "request"
    assert caught.value.remedy


async def test_malformed_requests_of_a_stream_are_refused_as_invalid_arguments(
    server: RunningServer[ServiceSettings],
) -> None:
    async with connect(server.address, NOT_RETRIED) as channel:
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call = channel.stream_stream(method, lambda raw: raw, lambda raw: raw)

        async def requests() -> AsyncIterator[bytes]:
            yield b"\xff\xff"

        with pytest.raises(InvalidArgument):
            async for _ in call(requests()):
                pass


async def test_ids_that_calls_brought_are_not_kept_whole(
    server: RunningServer[ServiceSettings], stub: OrchestratorStub
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await stub.SubmitJob(orchestrator_pb.SubmitJobRequest(request_id="r" * 600_000, spec="ok"))
    assert caught.value.field == "request_id"
    before = resident_mib()
    for number in range(150):
        request = orchestrator_pb.SubmitJobRequest(
            request_id=f"r{number}", spec="ok", job_id="j" * 900_000
        )
        await stub.SubmitJob(request)
    gc.collect()
    assert resident_mib() - before < 60, "150 ids of 0.9 MB"


def resident_mib() -> float:
    """Return the resident memory of this process."""
    return psutil.Process().memory_info().rss / 2**20


async def test_a_start_that_is_cancelled_at_any_moment_ends_cleanly() -> None:
    for turns in range(12):
        server = RunningServer(Echo(), ServiceSettings())
        start = asyncio.create_task(server.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        try:
            await start
        except asyncio.CancelledError:
            continue
        await server.close()
