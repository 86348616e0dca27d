"""Repeated refusals are logged only from time to time."""

from __future__ import annotations

import grpc
import pytest
from echo_service import Echo
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.chassis.app import serve
from services.chassis.settings import ServiceSettings
from troupe.rpc import ClientSettings, NotFound, Unimplemented, connect
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub


async def test_refusals_of_one_kind_are_logged_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ServiceSettings(drain_seconds=0.5)
    async with serve(Echo(), settings) as server, connect(server.address) as channel:
        stub = OrchestratorStub(channel)
        for number in range(20):
            with pytest.raises(NotFound):
                await stub.GetJob(orchestrator_pb.GetJobRequest(job_id=f"refuse {number}"))
    told = [line for line in caplog.text.splitlines() if "call refused" in line]
    assert len(told) == 5, "the 1st, 2nd, 4th, 8th and 16th"


async def test_a_method_that_a_service_does_not_have_is_unimplemented(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ServiceSettings(drain_seconds=0.5, token="secret")
    async with (
        serve(Echo(), settings) as server,
        grpc.aio.insecure_channel(server.address) as plain,
        connect(server.address, ClientSettings(token="secret")) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(plain).List(health_pb2.HealthListRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(Unimplemented, match="does not") as missing:
            await OrchestratorStub(channel).ListJobs(orchestrator_pb.ListJobsRequest())
    assert "ListJobs" in (missing.value.field or "")
    assert "Traceback" not in caplog.text
