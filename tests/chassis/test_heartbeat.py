"""Workers tell that they live, also after the orchestrator was away."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.chassis.app import serve
from services.chassis.heartbeat import Heartbeat, host_cpu, host_id
from services.chassis.settings import ServiceSettings
from tests.support.waiting import PATIENCE, block_until, until
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc


class Listener(orchestrator_grpc.OrchestratorServicer):
    """An orchestrator that keeps every heartbeat."""

    name = "troupe.v1.Orchestrator"

    def __init__(self, next_seconds: float = 0.05) -> None:
        self.heard: list[orchestrator_pb.HeartbeatRequest] = []
        self.next_seconds = next_seconds

    def add_to(self, server: grpc.aio.Server) -> None:
        orchestrator_grpc.add_OrchestratorServicer_to_server(self, server)

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None: ...

    async def Heartbeat(
        self, request: orchestrator_pb.HeartbeatRequest, context: Any
    ) -> orchestrator_pb.HeartbeatResponse:
        self.heard.append(request)
        return orchestrator_pb.HeartbeatResponse(next_seconds=self.next_seconds)


async def test_a_heartbeat_beats_fills_in_and_says_goodbye() -> None:
    listener = Listener()
    async with serve(listener, ServiceSettings(drain_seconds=0.2)) as server:
        worker = ServiceSettings(orchestrator_address=server.address, port=7, worker_id="w1")
        beat = Heartbeat(
            worker,
            lambda: orchestrator_pb.HeartbeatRequest(kind=orchestrator_pb.WORKER_KIND_ROLLOUT),
        )
        await beat.start()
        await until(lambda: len(listener.heard) >= 3)
        assert beat.reached
        await beat.stop()
    first, last = listener.heard[0], listener.heard[-1]
    assert (first.worker_id, first.address, first.host_id) == ("w1", "127.0.0.1:7", host_id())
    assert first.kind == orchestrator_pb.WORKER_KIND_ROLLOUT
    assert first.rss_bytes > 2**20
    assert not first.draining
    assert last.draining


async def test_a_late_answer_does_not_keep_it_from_beating() -> None:
    class Slow(Listener):
        async def Heartbeat(
            self, request: orchestrator_pb.HeartbeatRequest, context: Any
        ) -> orchestrator_pb.HeartbeatResponse:
            answer = await super().Heartbeat(request, context)
            await asyncio.sleep(60)
            return answer

    listener = Slow()
    async with serve(listener, ServiceSettings(drain_seconds=0.2)) as server:
        worker = ServiceSettings(orchestrator_address=server.address, port=7, worker_id="w1")
        beat = Heartbeat(worker, orchestrator_pb.HeartbeatRequest, interval=0.05)
        await beat.start()
        await until(lambda: len(listener.heard) >= 5)
        await beat.stop()
        assert listener.heard[-1].draining


async def test_a_busy_event_loop_is_reported_and_does_not_keep_it_from_beating() -> None:
    listener = Listener()
    heard = listener.heard
    with in_a_thread(listener) as address:
        worker = ServiceSettings(orchestrator_address=address, port=7, worker_id="w1")
        built = 0

        def message() -> orchestrator_pb.HeartbeatRequest:
            nonlocal built
            built += 1
            return orchestrator_pb.HeartbeatRequest(doing=str(built))

        beat = Heartbeat(worker, message, interval=0.05)
        await beat.start()
        await until(lambda: len(heard) >= 3)
        assert all(one.loop_seconds < 1 for one in heard)
        fresh = {one.doing for one in heard}
        assert len(fresh) > 1, "every beat of a loop that advances has news"
        # The event loop does not advance meanwhile.
        block_until(lambda: heard[-1].loop_seconds > 0.5)
        busy = [one for one in heard if one.doing == heard[-1].doing]
        assert len(busy) >= 4, "it beats on"
        assert [one.loop_seconds for one in busy] == sorted(one.loop_seconds for one in busy)
        await until(lambda: heard[-1].doing != busy[-1].doing)
        assert heard[-1].loop_seconds < busy[-1].loop_seconds
        await beat.stop()
        assert heard[-1].draining


@contextmanager
def in_a_thread(service: Listener) -> Iterator[str]:
    """Serves in another event loop than the test's; its address."""
    address: Future[str] = Future()
    end = threading.Event()

    async def run() -> None:
        async with serve(service, ServiceSettings(drain_seconds=0.2)) as server:
            address.set_result(server.address)
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield address.result(PATIENCE)
    finally:
        end.set()
        thread.join()


async def test_a_heartbeat_survives_the_orchestrator_s_absence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ServiceSettings(drain_seconds=0.2)
    async with serve(Listener(), settings) as server:
        port = server.settings.port
        worker = ServiceSettings(orchestrator_address=server.address)
        failures = [True]

        def message() -> orchestrator_pb.HeartbeatRequest:
            if failures and failures.pop():
                raise RuntimeError("a bug, once")
            return orchestrator_pb.HeartbeatRequest()

        beat = Heartbeat(worker, message, interval=0.05)
        with caplog.at_level(logging.INFO):
            await beat.start()
            await until(lambda: beat.reached)
            await server.close()
            await until(lambda: not beat.reached)
            await asyncio.sleep(0.2)  # several further beats fail, which is logged once
            back = Listener()
            async with serve(back, settings.model_copy(update={"port": port})):
                await until(lambda: bool(back.heard))
            await beat.stop()
    assert caplog.text.count("orchestrator unreachable") == 1
    assert caplog.text.count("orchestrator reached") == 2


def test_the_cpu_of_a_host_counts_what_its_cores_compute() -> None:
    before = host_cpu(Path("/does/not/exist"))
    assert before.cores == len(os.sched_getaffinity(0))
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = host_cpu(Path("/does/not/exist"))
    assert after.busy_seconds - before.busy_seconds > 0.2
    # The system counts in hundredths of a second.
    assert after.busy_seconds - before.busy_seconds < before.cores * (after.at - before.at + 0.1)


def test_the_cpu_of_a_container_is_its_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 7500000\nuser_usec 1\n")
    found = host_cpu(tmp_path)
    assert (found.cores, found.busy_seconds) == (0.5, 7.5)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host_cpu(tmp_path).cores == len(os.sched_getaffinity(0))
