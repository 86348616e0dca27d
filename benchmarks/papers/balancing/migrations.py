"""Engines that move continuously under load: is every turn answered once, by its own policy?"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.papers.balancing.workload import SIMULATED, model
from benchmarks.papers.pipeline.research_team import AGENTS
from services.chassis.app import serve
from services.rollout.server import RolloutService
from services.rollout.settings import RolloutSettings
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, connect, new_id
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1.rollout_pb2_grpc import RolloutStub

_NOBODY: Final = "127.0.0.1:9"
_ENGINES: Final = 3
_CLIENTS: Final = 40
_MOVERS: Final = 4
# Shorter than most turns, which are thus handed back and continue elsewhere.
_DRAIN_SECONDS: Final = 0.02
_MAX_TOKENS: Final = 60
_SECONDS: Final = 900.0


@dataclass
class Migrations:
    """Counts of turns and moves. `wrong`: answers from another policy's weights, and incomplete
    ones."""

    moves: int = 0
    asked: int = 0
    answered: int = 0
    wrong: int = 0
    handed_back: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Turns without a right answer."""
        return self.asked - self.answered + self.wrong


class _Phase:
    def __init__(self, rollout: Any, job_id: str, moves: int) -> None:
        self._rollout = rollout
        self._job_id = job_id
        self._wanted = moves
        self._begun = 0
        self.found = Migrations()

    async def run(self) -> None:
        """Request turns until all moves are done."""
        began = time.monotonic()
        clients = [asyncio.create_task(self._ask(number)) for number in range(_CLIENTS)]
        async with asyncio.timeout(_SECONDS):
            await asyncio.gather(*(self._move(number) for number in range(_MOVERS)))
            await asyncio.gather(*clients)
        self.found.seconds = time.monotonic() - began

    async def _ask(self, number: int) -> None:
        rng, found = random.Random(number), self.found
        while found.moves < self._wanted:
            policy = rng.choice(AGENTS)
            request = rollout_pb.GenerateRequest(
                request_id=new_id("ask"),
                job_id=self._job_id,
                policy=policy,
                input_ids=[rng.randrange(3, 90) for _ in range(20)],
            )
            found.asked += 1
            try:
                reply = await self._rollout.Generate(request, timeout=120)
            except Exception as error:  # all errors count
                found.failures[str(error)[:80]] += 1
                continue
            found.answered += 1
            found.wrong += not _right(policy, reply)

    async def _move(self, number: int) -> None:
        rng, found = random.Random(-1 - number), self.found
        listing = rollout_pb.ListEnginesRequest(job_id=self._job_id)
        while self._begun < self._wanted:
            listed = await self._rollout.ListEngines(listing)
            rich = {load.policy for load in listed.loads if load.engines > 1}
            engines = [
                engine
                for engine in listed.engines
                if engine.state == common_pb.ENGINE_STATE_HEALTHY and engine.policy in rich
            ]
            if not engines:
                await asyncio.sleep(0.002)
                continue
            engine = rng.choice(engines)
            target = rng.choice([name for name in AGENTS if name != engine.policy])
            self._begun += 1
            try:
                moved = await self._rollout.MoveEngine(
                    rollout_pb.MoveEngineRequest(
                        request_id=new_id("move"),
                        job_id=self._job_id,
                        engine_id=engine.engine_id,
                        policy=target,
                        drain_seconds=_DRAIN_SECONDS,
                    ),
                    timeout=60,
                )
            except FailedPrecondition:  # it is already moving, or its policy needs it
                self._begun -= 1
                await asyncio.sleep(0.002)
                continue
            found.moves += 1
            found.handed_back += moved.handed_back


def _right(policy: str, reply: rollout_pb.GenerateResponse) -> bool:
    count = len(reply.output_ids)
    return (
        reply.finish_reason in ("stop", "length")
        and 0 < count == len(reply.logprobs) <= _MAX_TOKENS
        and {span.version for span in reply.versions} == {_version(policy)}
    )


def _version(policy: str) -> int:
    """Return the version of a policy's weights, different for each policy, to identify answers."""
    return 10 + AGENTS.index(policy)


async def migrate(moves: int, directory: Path) -> Migrations:
    """Force `moves` moves on a rollout service in this process, while clients call over gRPC."""
    transfer = Transfer(directory / "moves")
    job_id = new_id("moves")
    refs = []
    for policy in AGENTS:
        key = f"{job_id}/{policy}/weights"
        manifest = transfer.set(key, {"w": torch.full((4,), float(_version(policy)))})
        refs.append(
            common_pb.WeightsRef(
                job_id=job_id,
                policy=policy,
                version=_version(policy),
                key=key,
                checksum=manifest.checksum,
            )
        )
    settings = RolloutSettings(
        transfer_dir=directory / "moves",
        experience_store_address=_NOBODY,
        reward_address=_NOBODY,
        orchestrator_address=_NOBODY,
        log_level="error",
    )
    async with serve(RolloutService, settings) as server:
        channel = connect(server.address)
        try:
            rollout: Any = RolloutStub(channel)
            prepare = rollout_pb.PrepareJobRequest(
                request_id=new_id("prepare"),
                job_id=job_id,
                spec_json=_job(directory).model_dump_json(),
                weights=refs,
            )
            await rollout.PrepareJob(prepare, timeout=60)
            phase = _Phase(rollout, job_id, moves)
            await phase.run()
            return phase.found
        finally:
            await channel.close(None)


def _job(directory: Path) -> JobSpec:
    made = model(directory)
    simulated = SIMULATED | {
        "decode_seconds": 0.002,
        "response_tokens_mean": 40,
        "load_seconds": 0.005,
    }
    return JobSpec.model_validate(
        {
            "name": "moves",
            "workflow": "benchmarks.papers.balancing.skewed_team:play",
            "tasks": {"source": "benchmarks.papers.balancing.skewed_team:Queries"},
            "agents": {
                name: {"policy": name, "sampling": {"max_new_tokens": _MAX_TOKENS}}
                for name in AGENTS
            },
            "policies": {
                name: {
                    "model": made,
                    "engine": {"replicas": _ENGINES, "max_running": 8, "max_context": 256},
                    "simulated": simulated,
                }
                for name in AGENTS
            },
            "pipeline": {"steps": 1, "queries_per_step": 1},
        }
    )
