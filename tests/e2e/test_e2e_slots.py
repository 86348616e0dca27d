"""A team of two policies on one trainer that holds one of them at a time, through all services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import House
from tests.e2e.standing import final_states
from tests.support.tiny_team import job
from tests.support.waiting import PATIENCE
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster

STEPS = 3
POLICIES = ("checker", "solver")


@asynccontextmanager
async def one_trainer(directory: Path, slots: int) -> AsyncIterator[House]:
    """A cluster whose only trainer has this number of slots."""
    environment = {"TROUPE_TRAINER_SLOTS": str(slots)}
    settings = ClusterSettings(data_dir=directory, panel=False, environment=environment)
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        yield House(cluster, client, directory)


async def trained(house: House, models: Path, **sections: Any) -> tuple[Mapping[str, Any], float]:
    """Return the state from which each policy continues after the last step, and the number of
    swaps. `sections`: further ones of the job."""
    over: dict[str, Any] = {
        "pipeline.mode": "micro_batch",
        "pipeline.steps": STEPS,
        "pipeline.deterministic": True,
        # Small enough that a policy has something to compute several times in a step.
        "pipeline.micro_batch_samples": 8,
        **sections,
    }
    for policy in POLICIES:
        over[f"policies.{policy}.trainer"] = {"quantum_seconds": 0.05}
    handle = await house.client.submit(job(models, **over))
    record = await handle.wait(timeout=PATIENCE)
    assert record.state == "succeeded", record
    assert record.versions == dict.fromkeys(POLICIES, STEPS)
    assert not (await handle.audit()).violations
    states = final_states(house.data_dir, record)
    rows = await handle.metrics()
    swaps = sum(row.values.get(f"{policy}/train/swaps", 0.0) for row in rows for policy in POLICIES)
    return states, swaps


@pytest.mark.slow
async def test_policies_that_take_turns_learn_joint_pairs_with_the_same_bits(
    tmp_path: Path, models: Path
) -> None:
    """On one device each needs the other's sums in every step, for which it has to leave."""
    pairs = {
        "tasks": {"source": "tests.support.tiny_team:JointPairs"},
        "steps": STEPS,
        "rows_per_step": 16,
        "joint": True,
    }
    found = {}
    for slots in (1, 2):
        async with one_trainer(tmp_path / str(slots), slots) as house:
            found[slots] = await trained(house, models, preferences=pairs)
    (alternating, swaps), (together, none) = found[1], found[2]
    assert swaps >= 2 * STEPS
    assert none == 0
    assert alternating == together


@pytest.mark.slow
async def test_policies_that_take_turns_end_with_the_same_bits(
    tmp_path: Path, models: Path
) -> None:
    """Weights, optimizer moments and random generators, although one always waits suspended."""
    found = {}
    for slots in (1, 2):
        async with one_trainer(tmp_path / str(slots), slots) as house:
            found[slots] = await trained(house, models)
    (alternating, swaps), (together, none) = found[1], found[2]
    assert swaps >= 2 * STEPS
    assert none == 0
    assert alternating == together
