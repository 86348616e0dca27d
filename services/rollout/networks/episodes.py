"""A trajectory of a job of networks: whole episodes of every copy of its environment."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

from services.rollout.clock import TrajectoryClock
from services.rollout.engines.errors import EngineStale
from services.rollout.networks.engine import NetworkEngine, Served
from services.rollout.networks.samples import metrics_of, returns_of, samples_of
from services.rollout.networks.table import Play, Seating
from services.rollout.policy import ServedPolicy
from services.rollout.trajectory import Trajectory
from services.rollout.workflow_call import bounded
from troupe.v1 import common_pb2 as pb
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import TurnError, WorkflowError

# An engine that lost its weights is brought back by its keeper.
_LOOK_SECONDS: Final = 0.05


class Episodes(Trajectory):
    """Plays with the versions that are served when it begins, to its end: each of its rows is of
    one version."""

    async def _attempt(self, clock: TrajectoryClock, number: int) -> list[Any]:
        job, ticket = self._job, self._ticket
        arena = job.arena
        assert arena is not None, "a job of networks"
        evaluating = ticket.purpose == rollout.Ticket.PURPOSE_EVALUATE
        greedy = evaluating and job.spec.evaluation.temperature == 0
        cast = job.casts.of(ticket.cast).policy_of
        seating = arena.seating({agent: policy.name for agent, policy in cast.items()})
        limits = job.spec.limits

        async def play() -> Any:
            with clock.elsewhere():
                served = {
                    policy: await served_now(job.policies[policy], clock.bound(limits.turn_seconds))
                    for policy, _ in seating
                }
            for policy, weights in served.items():
                self._turn_began(policy, weights.version)
            began = time.monotonic()
            how = Play(explore=not greedy, earnest=self._earnest(seating))
            played = await arena.play(seating, served, ticket.seed, how)
            return played, time.monotonic() - began

        def late() -> WorkflowError:
            bound = f"limits.trajectory_seconds = {limits.trajectory_seconds:g} s"
            return WorkflowError(
                f"its episodes did not end within {bound}",
                kind="deadline",
            )

        played, seconds = await bounded(play(), clock, late)
        self._move(pb.TRAJECTORY_STATE_SCORING)
        self._emit(self._event())
        self._rewards = returns_of(played, arena.agents)
        self._metrics = metrics_of(played, seconds)
        if not self._stored:
            return []
        trained = job.trained.intersection(ticket.learners or job.trained)
        rosters = {policy: arena.roster(policy) for policy in trained}
        return samples_of(played, rosters=rosters, ticket=ticket, shelf=self._shelf)

    def _earnest(self, seating: Seating) -> tuple[str, ...]:
        """Who explores nothing: members of a population, and whoever nobody learns of."""
        if self._ticket.purpose == rollout.Ticket.PURPOSE_MATCH:
            return tuple(policy for policy, _ in seating)
        learners = self._ticket.learners
        return tuple(policy for policy, _ in seating if learners and policy not in learners)


async def served_now(policy: ServedPolicy, seconds: float, version: int | None = None) -> Served:
    """What the policy is played with now, or as soon as it is `version`. Raises `TurnError` of kind
    `deadline`."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                for engine in policy.serving_engines:
                    assert isinstance(engine, NetworkEngine), "made for a network"
                    with suppress(EngineStale):
                        served = engine.served
                        if version in (None, served.version):
                            return served
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise TurnError(
            f"no weights of policy '{policy.name}' were served within {seconds:g} s",
            kind="deadline",
            field="limits.turn_seconds",
            remedy="Raise limits.turn_seconds, or look at the rollout worker's log.",
        ) from None
