"""Gathers of a gang per version, while servers load it from the trainer's device: counted.

    python -m benchmarks.transfer.gathers

A real gang of two gloo ranks holds a tiny model; three processes (`group_member`) stand in for
inference servers and receive its versions in a real process group. The trainer's worker does what
it does after a step: it publishes a version, and sends it to the wave.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.command import scratch
from benchmarks.sglang import TINY
from benchmarks.workloads.tokenizer import save_tokenizer
from services.chassis import logs
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

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._group = ""
        self.num_bytes = 0

    @classmethod
    async def started(cls) -> StandIn:
        """Start its process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.transfer.group_member"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        made = cls(process)
        assert await made._answer() == "ready"
        return made

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
        self._process.kill()
        await self._process.wait()

    async def _join(self, group: trainer_pb.UpdateGroup) -> None:
        self._group = group.name
        where = (group.host, group.port, group.name, group.rank_offset, group.world_size)
        assert await self._answer("join", *where) == "joined"

    async def _receive(self, bucket: trainer_pb.WeightBucket) -> None:
        count = sum(torch.Size(one.shape).numel() for one in bucket.tensors)
        self.num_bytes += int(await self._answer("receive", bucket.dtype, count))

    async def _answer(self, *words: object) -> str:
        """Send a line, if there are words, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if words:
            self._process.stdin.write(f"{' '.join(map(str, words))}\n".encode())
        return (await self._process.stdout.readline()).decode().strip()


async def gathers_per_version() -> int:
    """Return how often the ranks of a gang gather a version that is published, proved, and loaded
    by three servers: the most of two versions."""
    logs.configure("benchmark", "error", "console")
    with scratch() as place:
        settings = TrainerSettings(
            log_level="error",
            trainer_device="cpu",
            gang_ranks=_RANKS,
            gang_start_seconds=_JOIN_SECONDS,
            transfer_dir=Path(place) / "transfer",
            data_dir=Path(place) / "runs",
        )
        worker = TrainerWorker(settings, Telemetry())
        servers: list[StandIn] = []
        try:
            servers += await asyncio.gather(*(StandIn.started() for _ in range(_SERVERS)))
            return await _measure(worker, servers, _spec(Path(place) / "tokenizer"))
        finally:
            for server in servers:
                await server.close()
            await worker.stop()


async def _measure(worker: TrainerWorker, servers: list[StandIn], spec: JobSpec) -> int:
    binding = worker.bindings.shell((_JOB, _POLICY), spec, spec.model_dump_json())
    await asyncio.to_thread(binding.load, 0, "")
    orders: Counter[str] = Counter()
    most = 0
    gang: Any = binding.learner._gang  # type: ignore[attr-defined]
    order = gang.order

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        # A proof without a file of gathered tensors gathers every layer once more.
        gathers = name == "gather" or (name == "prove" and "path" not in options)
        orders["gather"] += gathers
        return order(name, *arguments, **options)

    gang.order = counted
    for version in range(1, _VERSIONS + 1):
        frontier = Frontier(version, version)
        ref = await asyncio.to_thread(binding.versions.persist, frontier, keeping=True)
        binding.versions.confirm(ref, frontier, keeping=True)
        wave = f"wave-{version}"
        await asyncio.gather(*(server.load(worker, binding, wave) for server in servers))
        _check(ref, servers)
        most = max(most, orders["gather"])
        orders.clear()
    return most


def _check(ref: common_pb.WeightsRef, servers: list[StandIn]) -> None:
    received = [server.num_bytes for server in servers]
    assert received == [ref.num_bytes] * _SERVERS, (received, ref.num_bytes)


def _spec(tokenizer: Path) -> JobSpec:
    config = TINY | {"vocab_size": save_tokenizer(tokenizer)}
    return JobSpec.model_validate(
        {
            "name": _JOB,
            "agents": {_POLICY: {"policy": _POLICY}},
            "policies": {
                _POLICY: {
                    "model": {"config": config, "tokenizer": str(tokenizer)},
                    "trainer": {"gang": _RANKS},
                }
            },
            "workflow": "a.b:play",
            "pipeline": {"queries_per_step": 1, "steps": 1},
            "tasks": {"source": "a.b:Tasks"},
        }
    )


if __name__ == "__main__":
    print(json.dumps({"gathers_per_version": asyncio.run(gathers_per_version())}))
