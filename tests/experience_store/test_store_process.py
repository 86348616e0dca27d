"""The service as the process that operators start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.experience import ids_of
from tests.support.experience_client import Client
from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE
from troupe.rpc import ClientSettings, connect
from troupe.v1 import experience_store_pb2 as store_pb


class Process:
    """`python -m services.experience_store` on a port that it keeps."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._port_file = directory / "ports"
        self._env = os.environ | {
            "TROUPE_REDIS_URL": redis_url,
            "TROUPE_PORT_FILE": str(self._port_file),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    async def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        env = self._env | {"TROUPE_PORT": str(self.port)}
        command = [sys.executable, "-m", "services.experience_store"]
        self._process = subprocess.Popen(command, env=env)  # noqa: ASYNC220 - returns at once
        self.port, *_ = await asyncio.to_thread(ports_of, self._process, self._port_file)

    def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(PATIENCE)


async def test_a_killed_store_continues_where_it_was(redis_url: str, tmp_path: Path) -> None:
    process = Process(redis_url, tmp_path)
    await process.start()
    channel = connect(f"127.0.0.1:{process.port}", ClientSettings())
    client = Client(channel)
    await client.create()
    await client.stub.OpenStep(client.open_request())
    for trajectory in ("q0-t0", "q0-t1"):
        await client.stub.AppendTrajectory(client.append_request("q0", trajectory))
    request = client.claim_request()
    claim = await client.stub.ClaimMicroBatch(request)

    process.end(signal.SIGKILL)
    await process.start()

    # The claim's lease is in Redis: a repeated request finds the same samples.
    again = await client.stub.ClaimMicroBatch(request)
    assert ids_of(again) == ids_of(claim)
    commit = await client.stub.CommitStep(client.commit_request(claim.claim_id))
    assert commit.commit.num_samples == 2
    step = await client.stub.GetStep(store_pb.GetStepRequest(job_id=client.job, step=0))
    assert step.sealed
    await channel.close(None)
    assert process.end(signal.SIGTERM) == 0
