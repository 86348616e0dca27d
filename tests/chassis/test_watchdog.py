"""A process with a blocked event loop ends; a stopped or slow process does not."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.chassis.watchdog import EXIT_STATUS
from tests.chassis.echo_process import Launch
from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE
from troupe.rpc import NO_RETRY, ClientSettings, Unavailable, connect_sync
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub

ONCE = ClientSettings(retry=NO_RETRY)


# Long enough that a busy machine does not block a loop for this time.
@pytest.mark.slow
def test_a_process_whose_loop_stands_still_ends_and_shows_its_threads(
    launch: Launch, tmp_path: Path
) -> None:
    port_file = tmp_path / "ports"
    process = launch(TROUPE_PORT_FILE=port_file, TROUPE_STALL_EXIT_SECONDS=10)
    port, _ = ports_of(process, port_file)
    with connect_sync(f"127.0.0.1:{port}", ONCE) as channel, pytest.raises(Unavailable):
        OrchestratorStub(channel).GetJob(
            orchestrator_pb.GetJobRequest(job_id="block 600"), timeout=PATIENCE
        )
    assert process.wait(PATIENCE) == EXIT_STATUS
    _, said = process.communicate()
    assert "the event loop has been blocked for 10 s (TROUPE_STALL_EXIT_SECONDS)" in said
    assert "in _obey" in said  # where it stands


@pytest.mark.slow
def test_a_process_that_was_stopped_goes_on(launch: Launch, tmp_path: Path) -> None:
    port_file = tmp_path / "ports"
    process = launch(TROUPE_PORT_FILE=port_file, TROUPE_STALL_EXIT_SECONDS=20)
    port, _ = ports_of(process, port_file)
    process.send_signal(signal.SIGSTOP)
    time.sleep(25)
    process.send_signal(signal.SIGCONT)
    with connect_sync(f"127.0.0.1:{port}", ONCE) as channel:
        reply = OrchestratorStub(channel).GetJob(
            orchestrator_pb.GetJobRequest(job_id="x"), timeout=PATIENCE
        )
    assert reply.job.name == "x"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def test_a_process_without_a_limit_waits_for_its_loop(launch: Launch, tmp_path: Path) -> None:
    port_file = tmp_path / "ports"
    process = launch(TROUPE_PORT_FILE=port_file, TROUPE_STALL_EXIT_SECONDS=0)
    port, _ = ports_of(process, port_file)
    with connect_sync(f"127.0.0.1:{port}", ONCE) as channel, ThreadPoolExecutor(1) as threads:
        order = orchestrator_pb.GetJobRequest(job_id="block 1")
        reply = threads.submit(OrchestratorStub(channel).GetJob, order, timeout=PATIENCE)
        assert reply.result().job.name == "block 1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def test_a_call_that_gets_no_memory_is_unavailable(launch: Launch, tmp_path: Path) -> None:
    port_file = tmp_path / "ports"
    process = launch(TROUPE_PORT_FILE=port_file)
    port, _ = ports_of(process, port_file)
    with (
        connect_sync(f"127.0.0.1:{port}", ONCE) as channel,
        pytest.raises(Unavailable, match="does not have enough memory for this call") as caught,
    ):
        OrchestratorStub(channel).GetJob(
            orchestrator_pb.GetJobRequest(job_id="starve"), timeout=PATIENCE
        )
    assert caught.value.kind == "no_memory"
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
