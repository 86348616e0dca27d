"""Calls that come twice and late (TROUPE_FAULTS), against a real server: one effect per id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from echo_service import Echo

from services.chassis.app import RunningServer, serve
from services.chassis.interceptor import ChassisInterceptor
from services.chassis.settings import ServiceSettings
from troupe.rpc import InvalidArgument, NotFound, connect, connect_sync, new_id
from troupe.rpc.channel import FAULTS_VARIABLE, Faults, FaultSettings, Twice, faults_of
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub


@pytest.fixture
async def server() -> AsyncIterator[RunningServer[ServiceSettings]]:
    async with serve(Echo(), ServiceSettings(drain_seconds=0.5)) as running:
        yield running


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_duplicate_has_no_second_effect(
    server: RunningServer[ServiceSettings], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, f"duplicate=1,seed={seed}")
    async with connect(server.address) as channel:
        stub = OrchestratorStub(channel)
        requests = [
            orchestrator_pb.SubmitJobRequest(request_id=new_id("submit"), spec="sleep 0.4")
            for _ in range(12)
        ]
        replies = await asyncio.gather(*(stub.SubmitJob(request) for request in requests))
        # `step` is how often the handler has run by then; they all run at once.
        assert {reply.job.step for reply in replies} == {12}
        # A call without a request id changes nothing and is sent once.
        assert (await stub.GetJob(orchestrator_pb.GetJobRequest(job_id="look"))).job.step == 13
        with pytest.raises(NotFound, match="no such job"):
            await stub.SubmitJob(
                orchestrator_pb.SubmitJobRequest(request_id=new_id(), spec="refuse me")
            )


async def test_every_duplicate_really_arrives(
    server: RunningServer[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    observe = ChassisInterceptor._observe

    def counting(self: ChassisInterceptor, method: str, *rest: Any) -> Any:
        counted.append(method)
        return observe(self, method, *rest)

    monkeypatch.setattr(ChassisInterceptor, "_observe", counting)
    monkeypatch.setenv(FAULTS_VARIABLE, "duplicate=1,seed=3")
    async with connect(server.address) as channel:
        stub = OrchestratorStub(channel)
        for _ in range(5):
            await stub.SubmitJob(
                orchestrator_pb.SubmitJobRequest(request_id=new_id("submit"), spec="x")
            )
    assert len(counted) == 10


async def test_the_blocking_channel_sends_twice_too(
    server: RunningServer[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "duplicate=1,delay=1:0.01")

    def calls() -> list[int]:
        with connect_sync(server.address) as channel:
            stub = OrchestratorStub(channel)
            return [
                stub.SubmitJob(
                    orchestrator_pb.SubmitJobRequest(request_id=new_id("s"), spec="x")
                ).job.step
                for _ in range(5)
            ]

    assert await asyncio.to_thread(calls) == [1, 2, 3, 4, 5]


async def test_a_late_call_is_late_and_right(
    server: RunningServer[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_VARIABLE, "delay=1:0.2,seed=5")
    async with connect(server.address) as channel:
        stub = OrchestratorStub(channel)
        started = time.monotonic()
        for _ in range(5):
            await stub.GetJob(orchestrator_pb.GetJobRequest(job_id="x"))
        # The same draws as the channel's own.
        faults = Faults(FaultSettings.parse("delay=1:0.2,seed=5"), server.address)
        assert time.monotonic() - started >= _sum_of_pauses(faults, 5)


def _sum_of_pauses(faults: Faults, calls: int) -> float:
    return sum(faults.pause() for _ in range(calls))


def test_no_faults_are_injected_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS_VARIABLE, raising=False)
    assert faults_of("127.0.0.1:1") is None


def test_the_same_seed_draws_the_same_faults() -> None:
    def drawn(seed: int, address: str) -> list[object]:
        faults = Faults(FaultSettings(0.3, 0.3, 1.0, seed), address)
        request = orchestrator_pb.SubmitJobRequest(request_id="r")
        return [(faults.pause(), faults.twice(request)) for _ in range(50)]

    assert drawn(1, "a:1") == drawn(1, "a:1")
    assert drawn(1, "a:1") != drawn(2, "a:1")
    assert drawn(1, "a:1") != drawn(1, "b:1")
    assert {twice for _, twice in drawn(1, "a:1")} == set(Twice)  # type: ignore[misc]


def test_settings_are_read_as_they_are_written() -> None:
    settings = FaultSettings(duplicate=0.05, delay=0.1, delay_seconds=0.2, seed=7)
    assert settings.text() == "duplicate=0.05,delay=0.1:0.2,seed=7"
    assert FaultSettings.parse(settings.text()) == settings
    assert FaultSettings.parse("") == FaultSettings()


@pytest.mark.parametrize(
    "text",
    ["duplicate=2", "duplicate=often", "delay=0.1", "delay=0.1:-1", "seed=x", "drop=0.5"],
)
def test_bad_settings_are_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match=FAULTS_VARIABLE) as caught:
        FaultSettings.parse(text)
    assert text in str(caught.value)
    assert "Write for example" in str(caught.value)
