"""Trains one job of the example and scores every version of its policy that it gets hold of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Final

from examples.self_play.kuhn import workflow
from troupe.client import AsyncClient
from troupe.job import JobSpec
from troupe.populations.arrangements import mixed
from troupe.populations.asking import probabilities, score_request
from troupe.populations.enumerated import Enumeration
from troupe.populations.games import Array
from troupe.populations.opponents import past_selves
from troupe.rpc import TroupeError, connect
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import orchestrator_pb2_grpc as orch_grpc

POLICY: Final = "player"
Plans = dict[int, list[Array]]
# A version lives for a step, which takes longer.
_PAUSE_SECONDS: Final = 0.1
_CALL_SECONDS: Final = 60.0


@dataclass
class Curve:
    """What came of one job. Exploitability is half of NashConv: what a best response gets per game,
    over the seats, against who plays so; the value of the game being 0 for who changes seats."""

    newest: dict[int, float] = field(default_factory=dict)
    """Exploitability of single versions, by version."""
    population: list[tuple[int, float]] = field(default_factory=list)
    """Steps done, and exploitability of the mixture over the pool, as its algorithm weighs it."""
    reported: list[tuple[int, float]] = field(default_factory=list)
    """The same as the job reports it."""
    illegal: dict[int, float] = field(default_factory=dict)
    """Mean probability of an answer that is no move, over information states."""
    seconds: float = 0.0

    @property
    def final(self) -> float:
        """Of the mixture where there is a pool, else of the newest version."""
        return self.population[-1][1] if self.population else self.newest[max(self.newest)]


async def measured(client: AsyncClient, spec: JobSpec) -> Curve:
    """Train `spec` to its end. Raises `JobFailed`."""
    game = Enumeration.of(workflow.make(), workflow.rules)  # type: ignore[arg-type]
    plans: Plans = {}
    curve = Curve()
    began = time.monotonic()
    channel = connect(client.address)
    api = orch_grpc.OrchestratorStub(channel)
    handle = await client.submit(spec)
    ask = orch.ScorePolicyRequest(request=score_request(game.questions, handle.id, POLICY))

    async def look() -> None:
        answer = (await api.ScorePolicy(ask, timeout=_CALL_SECONDS)).result
        if answer.version in plans:
            return
        said = probabilities(game.questions, answer)
        found = plans[answer.version] = game.plans(game.behaviours(said))
        curve.newest[answer.version] = game.form.nash_conv(found) / 2
        legal = sum(sum(one.values()) for one in said) / len(said)
        curve.illegal[answer.version] = 1.0 - legal

    async def keep_looking() -> None:
        while True:
            with contextlib.suppress(TroupeError):  # engines that are not there yet, or any more
                await look()
            await asyncio.sleep(_PAUSE_SECONDS)

    looking = asyncio.create_task(keep_looking())
    try:
        await handle.result()
        curve.seconds = time.monotonic() - began
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    await look()  # the last version: engines are made for it again
    if spec.population is not None:
        asked = orch.GetPopulationRequest(job_id=handle.id)
        found = (await api.GetPopulation(asked, timeout=_CALL_SECONDS)).population
        _read(found, game, spec, plans, curve)
    await channel.close(None)
    return curve


def _read(
    population: orch.Population, game: Enumeration, spec: JobSpec, plans: Plans, curve: Curve
) -> None:
    """What is played at every iteration's end, weighed with plans that were scored here."""
    assert spec.population is not None, "the job has one"
    members = sorted((m for pool in population.pools for m in pool.members), key=_age)
    version_of = {member.member_id: member.version for member in members}
    for number, meta in enumerate(population.history, 1):
        if meta.HasField("nash_conv"):
            curve.reported.append((meta.step, meta.nash_conv / 2))
        if spec.population.algorithm == "fictitious":
            there = [m.version for m in members if m.iteration <= meta.iteration]
            chances = past_selves(len(there), delta=spec.population.delta)
            shares = dict(zip(there, chances.tolist(), strict=True))
        else:
            [mixture] = meta.mixtures
            shares = {version_of[name]: share for name, share in mixture.probabilities.items()}
        missing = sorted(set(shares) - set(plans))
        if missing and number < len(population.history):
            continue  # gone before it was scored, on a loaded machine: one point less
        if missing:
            raise SystemExit(f"versions {missing} are played and were never scored")
        played = mixed([plans[version] for version in shares], list(shares.values()))
        curve.population.append((meta.step, game.form.nash_conv(played) / 2))


def _age(member: orch.PopulationMember) -> tuple[int, int]:
    return member.iteration, member.version
