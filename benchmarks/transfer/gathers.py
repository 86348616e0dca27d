"""Gathers of a gang per version, while servers load it from the trainer's device: counted.

A real gang of two gloo ranks trains a tiny model; three processes stand in for inference servers
and receive its versions in a real process group. What the trainer's worker does for a step is done
here without one: it publishes a version, and sends it to the wave.

    python -m benchmarks.transfer.gathers HOST PORT GROUP RANK SIZE

is such a process: it joins the group, then receives as many elements as each line of its input
says, and answers with their number of bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from benchmarks.command import scratch
from benchmarks.sglang import TINY
from services.chassis.telemetry import Telemetry
from services.trainer.binding import PolicyBinding
from services.trainer.settings import TrainerSettings
from services.trainer.state.training_state import Frontier
from services.trainer.worker import TrainerWorker
from troupe.job import JobSpec
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb

_JOB: Final = "bench"
_POLICY: Final = "solver"
_SERVERS: Final = 3
_RANKS: Final = 2
_VERSIONS: Final = 2
_JOIN_SECONDS: Final = 300.0


class StandIn:
    """An inference server and its rollout service: it joins a group and receives every bucket."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._group = ""
        self.num_bytes = 0

    async def load(self, worker: TrainerWorker, binding: PolicyBinding, wave: str) -> None:
        """Receive the policy's committed version."""
        ref = binding.versions.weights
        wanted = trainer_pb.WantedWeights(
            job_id=_JOB,
            policy=_POLICY,
            version=ref.version,
            checksum=ref.checksum,
            way="broadcast",
            ranks=1,
            group=self._group,
            format="sglang",
            wave=trainer_pb.UpdateWave(wave_id=wave, servers=_SERVERS, workers=1),
        )
        messages: asyncio.Queue[trainer_pb.SendWeightsRequest] = asyncio.Queue()
        acknowledged = trainer_pb.WeightsAcknowledged()

        async def said() -> AsyncIterator[trainer_pb.SendWeightsRequest]:
            while True:
                yield await messages.get()

        self.num_bytes = 0
        async for event in worker.sender.serve(binding, wanted, said()):
            if event.HasField("group"):
                await self._join(event.group)
                continue
            if event.HasField("bucket"):
                await self._receive(event.bucket)
            messages.put_nowait(trainer_pb.SendWeightsRequest(acknowledged=acknowledged))

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    async def _join(self, group: trainer_pb.UpdateGroup) -> None:
        await self.close()
        self._group = group.name
        where = (group.host, group.port, group.name, group.rank_offset, group.world_size)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.transfer.gathers", *map(str, where)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _receive(self, bucket: trainer_pb.WeightBucket) -> None:
        assert self._process is not None, "it has joined a group"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        count = sum(torch.Size(one.shape).numel() for one in bucket.tensors)
        self._process.stdin.write(f"{bucket.dtype} {count}\n".encode())
        self.num_bytes += int(await self._process.stdout.readline())


async def gathers_per_version() -> float:
    """Return how often the ranks of a gang gather a version that is published, and that three
    servers load."""
    with scratch() as place:
        settings = TrainerSettings(
            trainer_device="cpu",
            gang_ranks=_RANKS,
            gang_start_seconds=_JOIN_SECONDS,
            transfer_dir=Path(place) / "transfer",
            data_dir=Path(place) / "runs",
        )
        worker = TrainerWorker(settings, Telemetry())
        servers = [StandIn() for _ in range(_SERVERS)]
        try:
            return await _measure(worker, servers)
        finally:
            for server in servers:
                await server.close()
            await worker.stop()


async def _measure(worker: TrainerWorker, servers: list[StandIn]) -> float:
    spec = _spec()
    binding = worker.bindings.shell((_JOB, _POLICY), spec, spec.model_dump_json())
    await asyncio.to_thread(binding.load, 0, "")
    orders: Counter[str] = Counter()
    gang: Any = binding.learner._gang  # type: ignore[attr-defined]
    order = gang.order

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        orders[name] += 1
        return order(name, *arguments, **options)

    gang.order = counted
    for version in range(1, _VERSIONS + 1):
        frontier = Frontier(version, version)
        ref = await asyncio.to_thread(binding.versions.persist, frontier, keeping=True)
        binding.versions.confirm(ref, frontier, keeping=True)
        wave = f"wave-{version}"
        await asyncio.gather(*(server.load(worker, binding, wave) for server in servers))
        _check(ref, servers)
    return orders["gather"] / _VERSIONS


def _check(ref: common_pb.WeightsRef, servers: list[StandIn]) -> None:
    received = [server.num_bytes for server in servers]
    assert received == [ref.num_bytes] * _SERVERS, (received, ref.num_bytes)


def _spec() -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": _JOB,
            "agents": {_POLICY: {"policy": _POLICY}},
            "policies": {
                _POLICY: {
                    "model": {"config": TINY, "tokenizer": "none"},
                    "trainer": {"gang": _RANKS},
                }
            },
            "workflow": "a.b:play",
            "pipeline": {"queries_per_step": 1, "steps": 1},
            "tasks": {"source": "a.b:Tasks"},
        }
    )


def receive(host: str, port: int, name: str, rank: int, size: int) -> None:
    """Join the group as a server's rank does, and receive what the input announces."""
    limit = timedelta(seconds=_JOIN_SECONDS)
    store = TCPStore(host, port, size, is_master=False, timeout=limit)
    group, _ = c10d._new_process_group_helper(
        *(size, rank, [], dist.Backend("gloo"), c10d.PrefixStore(name, store)),
        group_name=name,  # type: ignore[arg-type]
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}  # type: ignore[index]
    for line in sys.stdin:
        dtype, count = line.split()
        flat = torch.empty(int(count), dtype=getattr(torch, dtype))
        dist.broadcast(flat, 0, group)
        print(flat.nbytes, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        host, port, name, rank, size = sys.argv[1:]
        receive(host, int(port), name, int(rank), int(size))
    else:
        print(json.dumps({"gathers_per_version": asyncio.run(gathers_per_version())}))
