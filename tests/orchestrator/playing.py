"""Jobs with a population, and the queries of tests about them."""

from __future__ import annotations

import re
from typing import Any

from tests.support.cluster import Cluster, job_yaml
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb

MATCHES = {"least": 4}


def game(name: str = "game", **over: Any) -> str:
    """A symmetric game of two, one learner, two iterations of two steps."""
    changes = {
        "agents": {"alice": {"policy": "player"}, "bob": {"policy": "player"}},
        "pipeline__steps": 4,
        "pipeline__queries_per_step": 4,
        "population": {"algorithm": "psro", "iteration_steps": 2, "matches": MATCHES},
    }
    return job_yaml(name, policies=["player"], **(changes | over))


def version_of(cluster: Cluster, policy: str) -> int:
    """Return the version of a slot's member, or of the learner."""
    found = re.search(r"(\d+)(@0)?$", cluster.rollouts[0].keys[policy])
    assert found is not None
    return int(found[1])


def newer_wins(cluster: Cluster, *, zero_sum: bool = True) -> None:
    """Payoffs that identify the members: the more trained one gets 1, plus a little luck."""

    def reward(ticket: rollout_pb.Ticket) -> dict[str, float]:
        alice, bob = (
            version_of(cluster, ticket.cast.get(agent, "player")) for agent in ("alice", "bob")
        )
        luck = (ticket.seed % 1000) / 10_000 - 0.05
        gets = float(alice > bob) - float(alice < bob) + luck
        return {"alice": gets, "bob": -gets if zero_sum else 1.0}

    for worker in cluster.rollouts:
        worker.script.reward = reward


async def population(cluster: Cluster, job_id: str) -> orchestrator_pb.Population:
    request = orchestrator_pb.GetPopulationRequest(job_id=job_id)
    return (await cluster.api.GetPopulation(request)).population


async def matches(cluster: Cluster, job_id: str, **what: Any) -> list[orchestrator_pb.Match]:
    found, token = [], ""
    while True:
        page = await cluster.api.ListMatches(
            orchestrator_pb.ListMatchesRequest(job_id=job_id, page_size=7, page_token=token, **what)
        )
        found += page.matches
        if not (token := page.next_page_token):
            return found


def lasting(found: orchestrator_pb.Population) -> orchestrator_pb.Population:
    """Return the values that must not depend on timing."""
    kept = orchestrator_pb.Population()
    kept.CopyFrom(found)
    kept.ClearField("activity")
    for pool in kept.pools:
        for member in pool.members:
            member.ClearField("frozen_at")
    for slot in kept.slots:
        slot.ClearField("version")
    return kept
