"""A service as a real process: signals, ports, its parent, its settings."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import grpc
import pytest
from echo_process import ECHO, Launch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import ports_of, runs
from tests.support.waiting import PATIENCE, block_until
from troupe.rpc import NO_RETRY, ClientSettings, Internal, connect_sync
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub


def test_sigterm_drains_and_exits_with_zero(launch: Launch, tmp_path: Path) -> None:
    port_file = tmp_path / "ports"
    process = launch(TROUPE_PORT_FILE=port_file)
    port, metrics_port = ports_of(process, port_file)
    assert port > 0 < metrics_port
    with connect_sync(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(1) as threads:
        begun = tmp_path / "begun"
        order = orchestrator_pb.GetJobRequest(job_id=f"note {begun}")
        slow = threads.submit(OrchestratorStub(channel).GetJob, order)
        block_until(begun.exists)
        process.send_signal(signal.SIGTERM)
        assert slow.result().job.step == 1
    assert process.wait(PATIENCE) == 0
    assert not port_file.exists()
    _, logged = process.communicate()
    assert '"event": "draining"' in logged
    assert '"event": "stopped"' in logged
    assert "Traceback" not in logged


@pytest.mark.parametrize(("soft", "hard", "warned"), [(256, 8192, False), (128, 512, True)])
def test_a_service_opens_as_many_files_as_it_may(
    launch: Launch, tmp_path: Path, soft: int, hard: int, warned: bool
) -> None:
    port_file = tmp_path / "ports"
    limited = ["prlimit", f"--nofile={soft}:{hard}"]
    process = launch(*limited, *ECHO, TROUPE_PORT_FILE=port_file)
    ports_of(process, port_file)
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert re.search(rf"Max open files +{hard} +{hard} ", limits), limits
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    _, logged = process.communicate()
    assert (f"may have {hard} open files" in logged) == warned


def test_sigint_while_starting_stops_cleanly(launch: Launch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = launch(ECHO_START_SECONDS=60, TROUPE_PORT=port)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=PATIENCE
        )
    assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("exit 3", "SystemExit: 3"),
        ("group", "BaseExceptionGroup: g (SystemExit: 1; KeyboardInterrupt)"),
        ("thread 4", "UserCodeExit: SystemExit: 4"),
        ("task", "SystemExit: of a task"),
        ("callback 5", None),
        ("terminate", "PermissionError: "),
    ],
)
def test_a_service_survives_whatever_a_call_raises(
    launch: Launch, tmp_path: Path, order: str, said: str | None
) -> None:
    port_file = tmp_path / "ports"
    process = launch(TROUPE_PORT_FILE=port_file)
    port, _ = ports_of(process, port_file)
    with connect_sync(f"127.0.0.1:{port}", ClientSettings(retry=NO_RETRY)) as channel:
        stub = OrchestratorStub(channel)
        with nullcontext() if said is None else pytest.raises(Internal, match=re.escape(said)):
            stub.GetJob(orchestrator_pb.GetJobRequest(job_id=order), timeout=PATIENCE)
        assert (
            stub.GetJob(orchestrator_pb.GetJobRequest(job_id="after"), timeout=PATIENCE).job.name
            == "after"
        )
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def test_port_in_use_is_one_clear_line(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = launch(TROUPE_PORT=port)
        assert process.wait(PATIENCE) == 1
    _, said = process.communicate()
    assert said.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert "TROUPE_PORT" in said


def test_bad_settings_and_failed_starts_are_one_clear_line(launch: Launch) -> None:
    wrong = launch(TROUPE_PORT=70000)
    failing = launch(ECHO_FAIL=1, TROUPE_LOG_LEVEL="error")
    assert wrong.wait(PATIENCE) == 2
    _, said = wrong.communicate()
    assert said.startswith("echo_service.py: TROUPE_PORT = '70000': ")
    assert failing.wait(PATIENCE) == 1
    _, said = failing.communicate()
    assert said == "echo_service.py: model.path: no model here. Give a path that exists.\n"


def test_a_service_stops_when_its_parent_is_gone(launch: Launch, tmp_path: Path) -> None:
    port_file = tmp_path / "ports"
    parent = launch(
        sys.executable,
        "-c",
        "import os, subprocess, sys, time\n"
        "env = {**os.environ, 'TROUPE_PARENT_PID': str(os.getpid())}\n"
        "child = subprocess.Popen(sys.argv[1:], env=env)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)",
        *ECHO,
        TROUPE_PORT_FILE=port_file,
    )
    ports_of(parent, port_file)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    block_until(lambda: not port_file.exists() and not runs(child))


def test_a_supervisor_that_nobody_has_waited_for_counts_as_gone() -> None:
    program = (
        "import subprocess, sys, threading\n"
        "from services.chassis.process import watch_parent\n"
        "ended = subprocess.Popen(['sleep', '600'])\n"
        "gone = threading.Event()\n"
        "watch_parent(ended.pid, gone.set)\n"
        "ended.kill()\n"
        f"sys.exit(0 if gone.wait({PATIENCE}) else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=2 * PATIENCE).returncode == 0
