"""The proxy in front of a real gRPC service: traffic that passes, hangs, breaks or is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from testbed.chaos.proxy import Link, ProxiedNetwork, wire
from tests.support.waiting import PATIENCE
from troupe.cluster.layout import ANYBODY
from troupe.rpc import NO_RETRY, ClientSettings, Unavailable, connect
from troupe.rpc.channel import channel_options
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

ONCE = ClientSettings(retry=NO_RETRY, deadline_seconds=60)
HANGING = ClientSettings(retry=NO_RETRY, deadline_seconds=0.7)


class Echo(orchestrator_grpc.OrchestratorServicer):
    """Answers with the requested id, and accepts any load."""

    def __init__(self) -> None:
        self.calls = 0

    async def GetJob(
        self, request: orchestrator_pb.GetJobRequest, context: Any
    ) -> orchestrator_pb.GetJobResponse:
        self.calls += 1
        return orchestrator_pb.GetJobResponse(job=orchestrator_pb.Job(job_id=request.job_id))

    async def SubmitJob(
        self, request: orchestrator_pb.SubmitJobRequest, context: Any
    ) -> orchestrator_pb.SubmitJobResponse:
        self.calls += 1
        return orchestrator_pb.SubmitJobResponse(job=orchestrator_pb.Job(step=len(request.spec)))


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, str]]:
    service, server = Echo(), grpc.aio.server(options=channel_options(64))
    orchestrator_grpc.add_OrchestratorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def link(echo: tuple[Echo, str]) -> AsyncIterator[Link]:
    async with Link(echo[1]) as link:
        yield link


async def ask(stub: Any, job_id: str = "x") -> str:
    reply = await stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
    return str(reply.job.job_id)


async def test_an_intact_link_passes_all_messages(link: Link) -> None:
    async with connect(link.address) as channel:
        stub = orchestrator_grpc.OrchestratorStub(channel)
        assert await asyncio.gather(*(ask(stub, str(i)) for i in range(50))) == [
            str(i) for i in range(50)
        ]
        big = orchestrator_pb.SubmitJobRequest(spec="x" * (8 << 20))
        assert (await stub.SubmitJob(big)).job.step == 8 << 20
    assert link.passed > 8 << 20


async def test_a_silent_partition_hangs_and_what_was_held_arrives(
    echo: tuple[Echo, str], link: Link
) -> None:
    service, _ = echo
    async with connect(link.address, ONCE) as channel:
        stub = orchestrator_grpc.OrchestratorStub(channel)
        await ask(stub)
        link.hold()
        waiting = asyncio.ensure_future(
            stub.GetJob(orchestrator_pb.GetJobRequest(job_id="held"), timeout=PATIENCE)  # type: ignore[arg-type]
        )
        await asyncio.sleep(0.3)  # the link holds the answer, however long this takes
        assert not waiting.done()
        assert service.calls == 1
        # A new connection hangs as well, until its deadline.
        async with connect(link.address, HANGING) as another:
            started = time.monotonic()
            with pytest.raises(Exception, match="GetJob"):
                await ask(orchestrator_grpc.OrchestratorStub(another))
            assert time.monotonic() - started >= 0.6
        link.heal()
        assert (await waiting).job.job_id == "held"


async def test_a_severed_wire_refuses_at_once_and_heals(link: Link) -> None:
    async with connect(link.address, ONCE) as channel:
        stub = orchestrator_grpc.OrchestratorStub(channel)
        await ask(stub)
        link.sever()
        with pytest.raises(Unavailable):
            await ask(stub)
        link.heal()
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    assert await ask(stub) == "x"
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)


async def test_late_messages_are_late_and_in_order(link: Link) -> None:
    async with connect(link.address) as channel:
        stub = orchestrator_grpc.OrchestratorStub(channel)
        await ask(stub)
        link.delay = 0.1
        started = time.monotonic()
        assert await ask(stub, "late") == "late"
        assert time.monotonic() - started >= 0.2  # there and back
        link.heal()
        assert await ask(stub, "on time") == "on time"


async def test_a_queue_that_nobody_empties_pushes_back(echo: tuple[Echo, str], link: Link) -> None:
    service, _ = echo
    async with connect(link.address, ONCE) as channel:
        stub = orchestrator_grpc.OrchestratorStub(channel)
        await ask(stub)
        link.hold(forth=True, back=False)
        passed = link.passed
        big = orchestrator_pb.SubmitJobRequest(spec="x" * (4 << 20))
        sending = [asyncio.ensure_future(stub.SubmitJob(big, timeout=PATIENCE)) for _ in range(4)]
        await asyncio.sleep(0.5)  # time to pile up in; nothing passes, however long this takes
        # 16 MiB are on their way, and none of them went through nor piled up in the proxy.
        assert link.passed - passed < 1000  # except for the answer
        assert service.calls == 1
        link.heal()
        assert [(await one).job.step for one in sending] == [4 << 20] * 4


async def test_a_service_that_is_away_is_refused_and_found_when_it_is_back(
    echo: tuple[Echo, str],
) -> None:
    network = ProxiedNetwork([("a", "b"), (ANYBODY, "b")])
    try:
        first = await network.route({"b": "127.0.0.1:1"})
        async with connect(first["a", "b"], ONCE) as channel:
            with pytest.raises(Unavailable):
                await ask(orchestrator_grpc.OrchestratorStub(channel))
        again = await network.route({"b": echo[1]})
        assert again == first  # callers keep the address that they were told
        async with connect(again["a", "b"]) as channel:
            assert await ask(orchestrator_grpc.OrchestratorStub(channel)) == "x"
    finally:
        await network.close()
    assert wire(("a", "b")) == "a > b"
