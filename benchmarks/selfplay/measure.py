"""Trains one job of the example, and takes from it how exploitable its population was and when."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from troupe.client import AsyncClient
from troupe.job import JobSpec
from troupe.rpc import TroupeError, connect
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

# For people only: what is measured is read when the job is over.
_LOOK_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 60.0


@dataclass
class Curve:
    """What came of one job. Exploitability is half of NashConv: what a best response gets per game,
    over the seats, against who plays so; the value of the game being 0 for who changes seats."""

    points: list[tuple[int, float]] = field(default_factory=list)
    """Steps done, and exploitability of what the job's meta-solver makes of its members: of naive
    self-play the newest one, else an equilibrium between them."""
    seconds: float = 0.0

    @property
    def untrained(self) -> float:
        """Before the first step."""
        step, value = self.points[0]
        if step:
            raise ValueError(f"the first of these members was made after step {step}")
        return value

    @property
    def final(self) -> float:
        """After the last step."""
        return self.points[-1][1]

    @property
    def tail(self) -> float:
        """Mean over the last quarter of the steps."""
        since = 0.75 * self.points[-1][0]
        return statistics.fmean(value for step, value in self.points if step >= since)


def points_of(population: orchestrator_pb.Population) -> list[tuple[int, float]]:
    """The curve that the job has computed so far."""
    return [
        (one.step, one.nash_conv / 2) for one in population.history if one.HasField("nash_conv")
    ]


def progress(text: str) -> None:
    """For who waits."""
    print(text, file=sys.stderr, flush=True)


async def measured(
    client: AsyncClient, spec: JobSpec, tell: Callable[[str], None] = progress
) -> Curve:
    """Train `spec` to its end. Raises `JobFailed`."""
    began = time.monotonic()
    channel = connect(client.address)
    api = orchestrator_grpc.OrchestratorStub(channel)
    handle = await client.submit(spec)
    asked = orchestrator_pb.GetPopulationRequest(job_id=handle.id)

    async def look() -> list[tuple[int, float]]:
        answer = await api.GetPopulation(asked, timeout=_CALL_SECONDS)
        return points_of(answer.population)

    async def keep_telling() -> None:
        told = 0
        while True:
            with contextlib.suppress(TroupeError):  # nothing is known before it has begun
                found = await look()
                for step, value in found[told:]:
                    tell(f"{spec.name}: step {step}, exploitability {value:.3f}")
                told = len(found)
            await asyncio.sleep(_LOOK_SECONDS)

    telling = asyncio.create_task(keep_telling())
    try:
        await handle.result()
        seconds = time.monotonic() - began
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    curve = Curve(await look(), seconds)
    await channel.close(None)
    return curve
