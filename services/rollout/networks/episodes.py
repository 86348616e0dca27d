"""`EpisodeRunner`: a trajectory of a job of networks, whole episodes of every environment copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np

from services.rollout.engines.errors import EngineStale
from services.rollout.networks.arena import Arena, NetworkEngine, Play, Seating, ServedVersion
from services.rollout.serving.policy import ServedPolicy
from services.rollout.trajectories.clock import TrajectoryClock
from services.rollout.trajectories.records import LargeColumns
from services.rollout.trajectories.trajectory import RunningTrajectory, bounded
from troupe.contracts import kinds
from troupe.networks.actor import PlayedCopies
from troupe.networks.fragments import SEATS
from troupe.tensors import to_proto
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import TurnError, WorkflowError

# A fragment has no tokens; the store requires the columns.
_NO_IDS: Final = np.zeros(0, np.int32)
_NO_SCORES: Final = np.zeros(0, np.float32)
# Interval at which to check whether an engine serves again: its supervisor reloads lost weights.
_LOOK_SECONDS: Final = 0.05


def samples_of(
    played: PlayedCopies,
    *,
    rosters: Mapping[str, tuple[str, ...]],
    ticket: rollout_pb.Ticket,
    shelf: LargeColumns,
) -> list[store_pb.Sample]:
    """Return a sample for each policy in `rosters` (trained policies, with the agents that their
    networks were made for). Columns too large for a row are left on `shelf`."""
    samples = []
    for turn, (policy, fragment) in enumerate(sorted(played.fragments.items())):
        if policy not in rosters:
            continue
        arrays, roster = dict(fragment.arrays), rosters[policy]
        if fragment.agents != roster:
            arrays[SEATS] = np.array([roster.index(one) for one in fragment.agents], np.int32)
        sample_id = f"{ticket.query_id}_{turn}_{ticket.trajectory_id}"
        span = common_pb.VersionSpan(version=fragment.version, start=0, end=fragment.steps)
        samples.append(
            store_pb.Sample(
                sample_id=sample_id,
                policy=policy,
                query_id=ticket.query_id,
                trajectory_id=ticket.trajectory_id,
                agent=fragment.agents[0] if len(fragment.agents) == 1 else policy,
                turn=turn,
                group_id=f"{ticket.query_id}/{policy}",
                prompt_ids=to_proto(_NO_IDS),
                response_ids=to_proto(_NO_IDS),
                logprobs=to_proto(_NO_SCORES),
                versions=[span],
                reward=float(fragment.returns().mean()),
                finish_reason="stop",
                columns=shelf.columns_of(sample_id, arrays),
            )
        )
    return samples


def returns_of(played: PlayedCopies, agents: Collection[str]) -> dict[str, float]:
    """Return the mean undiscounted return by agent.

    Raises `WorkflowError` of kind `reward_not_finite`.
    """
    means: Mapping[str, Any] = dict(zip(agents, played.returns.mean(axis=0), strict=True))
    for agent, value in means.items():
        if not np.isfinite(value):
            raise WorkflowError(
                f"the rewards of agent '{agent}' add up to {value}",
                kind="reward_not_finite",
                field="environment.source",
                remedy="Let `step` return finite rewards.",
            )
    return {agent: float(value) for agent, value in means.items()}


def metrics_of(played: PlayedCopies, seconds: float) -> dict[str, float]:
    """Return metrics of a trajectory whose episodes took `seconds`."""
    steps = float(played.lengths.sum())
    return {
        "episodes": float(len(played.lengths)),
        "episode_steps": float(played.lengths.mean()),
        "episode_return": float(played.returns.sum(axis=1).mean()),
        "environment_steps": steps,
        "environment_steps_per_second": steps / max(seconds, 1e-9),
    }


class EpisodeRunner(RunningTrajectory):
    """Plays to the end with the versions served at its beginning: each row is of one version."""

    def __init__(self, *args: Any, arena: Arena) -> None:
        super().__init__(*args)
        self._arena = arena

    async def _attempt(self, clock: TrajectoryClock, number: int) -> list[Any]:
        job, ticket, arena = self._job, self._ticket, self._arena
        evaluating = ticket.purpose == rollout_pb.Ticket.PURPOSE_EVALUATE
        greedy = evaluating and job.spec.evaluation_of(ticket.evaluation).temperature == 0
        cast = job.casts.of(ticket.cast).policy_of
        seating = arena.seating({agent: policy.name for agent, policy in cast.items()})
        limits = job.spec.limits

        async def play() -> Any:
            with clock.outside():
                served = {
                    policy: await served_now(job.policies[policy], clock.bound(limits.turn_limit))
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
            return WorkflowError(f"its episodes did not end within {bound}", kind=kinds.DEADLINE)

        played, seconds = await bounded(play(), clock, late)
        self._move(common_pb.TRAJECTORY_STATE_SCORING)
        self._emit(self._event())
        self._rewards = returns_of(played, arena.agents)
        self._metrics = metrics_of(played, seconds)
        if not self._stored:
            return []
        trained = job.trained.intersection(ticket.learners or job.trained)
        rosters = {policy: arena.roster(policy) for policy in trained}
        return samples_of(played, rosters=rosters, ticket=ticket, shelf=self._shelf)

    def _earnest(self, seating: Seating) -> tuple[str, ...]:
        """Return policies that do not explore: members of a population, and policies without
        training."""
        if self._ticket.purpose == rollout_pb.Ticket.PURPOSE_MATCH:
            return tuple(policy for policy, _ in seating)
        learners = self._ticket.learners
        return tuple(policy for policy, _ in seating if learners and policy not in learners)


async def served_now(
    policy: ServedPolicy, seconds: float, version: int | None = None
) -> ServedVersion:
    """Return the served weights of the policy, once they are `version` if one is given. Raises
    `TurnError` of kind `deadline`."""
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
            kind=kinds.DEADLINE,
            field="limits.turn_seconds",
            remedy="Raise limits.turn_seconds, or look at the rollout worker's log.",
        ) from None
