"""`python -m services.reward`: it leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from services.reward.cgroups import family
from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE, block_until
from troupe.processes.ending import descendants
from troupe.rpc import Unavailable, connect_sync, new_id
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

HERE = Path(__file__).resolve().parent


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {
        **os.environ,
        "TROUPE_PORT_FILE": str(tmp_path / "ports"),
        "TROUPE_DRAIN_SECONDS": "1",
        "TROUPE_REWARD_WORKERS": "1",
        "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}",
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "services.reward"], env=env, stderr=log)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_service(
    process: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    ports = tmp_path / "ports"
    address = f"127.0.0.1:{ports_of(process, ports)[0]}"
    with connect_sync(address) as channel, ThreadPoolExecutor(1) as threads:
        stub = RewardStub(channel)
        for name in ("pid", "hangs"):
            spec = reward_pb.FunctionSpec(
                name=name, entrypoint=f"reward_functions:{name}", timeout_seconds=60
            )
            stub.RegisterFunction(
                reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
            )
        answer = stub.Invoke(reward_pb.InvokeRequest(invocation_id=new_id(), name="pid"))
        worker = psutil.Process(json.loads(answer.result_json))
        family = psutil.Process(process.pid).children(recursive=True)
        assert worker in family
        # Light enough to have several.
        assert worker.memory_info().rss < 80 * 2**20
        order = reward_pb.InvokeRequest(invocation_id=new_id(), name="hangs")
        busy = threads.submit(stub.Invoke, order, timeout=PATIENCE)
        time.sleep(0.2)  # the call runs by then; one that has not begun fails alike
        process.send_signal(number)
        assert process.wait(PATIENCE) == (0 if number == signal.SIGTERM else -number)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive
        assert isinstance(busy.exception(), Unavailable)


def test_all_descendants_of_a_process_are_found() -> None:
    script = "sleep 60 & (sleep 60 & sleep 60; true) & echo; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        try:
            assert shell.stdout is not None
            shell.stdout.readline()
            theirs = psutil.Process(shell.pid)
            block_until(lambda: len(descendants(shell.pid)) >= 4)
            assert sorted(descendants(shell.pid)) == sorted(
                child.pid for child in theirs.children(recursive=True)
            )
            assert family(shell.pid)[0] == shell.pid
            assert len(family(shell.pid)) == 5
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert family(shell.pid) == descendants(shell.pid) == []
