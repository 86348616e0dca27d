"""What is kept of episodes: one row per trained policy, its arrays as columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from services.rollout.columns import Shelf
from troupe.networks.actor import Played
from troupe.networks.fragments import SEATS
from troupe.tensors import to_proto
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store
from troupe.v1 import rollout_pb2 as rollout
from troupe.workflow import WorkflowError

# A fragment has no tokens; the store wants to be told so.
_NO_IDS: Final = np.zeros(0, np.int32)
_NO_SCORES: Final = np.zeros(0, np.float32)


def samples_of(
    played: Played,
    *,
    rosters: Mapping[str, tuple[str, ...]],
    ticket: rollout.Ticket,
    shelf: Shelf,
) -> list[store.Sample]:
    """A row for each policy in `rosters` (by trained policy: whom its network was made for), of the
    agents that it played. Columns too large for a row are left on `shelf`."""
    samples = []
    for turn, (policy, fragment) in enumerate(sorted(played.fragments.items())):
        if policy not in rosters:
            continue
        arrays, roster = dict(fragment.arrays), rosters[policy]
        if fragment.agents != roster:
            arrays[SEATS] = np.array([roster.index(one) for one in fragment.agents], np.int32)
        sample_id = f"{ticket.query_id}_{turn}_{ticket.trajectory_id}"
        span = pb.VersionSpan(version=fragment.version, start=0, end=fragment.steps)
        samples.append(
            store.Sample(
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


def returns_of(played: Played, agents: Collection[str]) -> dict[str, float]:
    """By agent the mean undiscounted return of its episodes.

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


def metrics_of(played: Played, seconds: float) -> dict[str, float]:
    """What a trajectory reports of its episodes, which took `seconds`."""
    steps = float(played.lengths.sum())
    return {
        "episodes": float(len(played.lengths)),
        "episode_steps": float(played.lengths.mean()),
        "episode_return": float(played.returns.sum(axis=1).mean()),
        "environment_steps": steps,
        "environment_steps_per_second": steps / max(seconds, 1e-9),
    }
