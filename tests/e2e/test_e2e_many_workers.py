"""Several rollout workers play one job; one of them dies in the middle of a step."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.workloads.tokenizer import save_tokenizer
from tests.e2e.conftest import House
from tests.support.noted_turns import noted
from troupe.client import AsyncClient
from troupe.cluster import ClusterSettings, EmbeddedCluster
from troupe.job import JobSpec

QUERIES, GROUP, TURNS = 24, 2, 6
PACE = {
    "prefill_tokens_per_second": 100_000,
    "decode_seconds": 0.05,
    "decode_seconds_per_turn": 0.0,
    "response_tokens_mean": 40,
    "response_tokens_sigma": 0.4,
    "step_seconds": 0.01,
    "load_seconds": 0.01,
}


def job(directory: Path, notes: Path) -> JobSpec:
    """One step of conversations on engines that take seconds per turn."""
    vocabulary = save_tokenizer(directory / "tokenizer", ends=False)
    values = {
        "name": "many-workers",
        "workflow": "tests.support.noted_turns:play",
        "tasks": {
            "source": "tests.support.noted_turns:Questions",
            "args": {"notes": str(notes), "turns": TURNS},
        },
        "agents": {"player": {"policy": "policy", "sampling": {"max_new_tokens": 80}}},
        "policies": {
            "policy": {
                "model": {
                    "config": {"model_type": "qwen3", "vocab_size": vocabulary},
                    "tokenizer": str(directory / "tokenizer"),
                },
                "engine": {"max_running": 64, "max_context": 4096},
                "simulated": PACE,
            }
        },
        "pipeline": {
            "steps": 1,
            "queries_per_step": QUERIES,
            "group_size": GROUP,
            "micro_batch_samples": 64,
            "mode": "micro_batch",
        },
        "evaluation": {"queries": 0},
        "limits": {"turn_seconds": 600, "trajectory_seconds": 600},
        "logging": {"tensorboard": False},
    }
    return JobSpec.model_validate(values)


@pytest.mark.slow
async def test_a_worker_that_dies_costs_its_own_trajectories_only(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    settings = ClusterSettings(data_dir=tmp_path / "data", rollouts=3, panel=False)
    async with (
        EmbeddedCluster(settings) as cluster,
        AsyncClient(cluster.state.orchestrator_address) as client,
    ):
        house = House(cluster, client, tmp_path)
        handle = await client.submit(job(tmp_path, notes))
        workers = {house.pid(f"rollout-{number}") for number in range(3)}
        count = QUERIES * GROUP
        async with asyncio.timeout(300):
            # All have begun, on all three, and no one is at its end.
            while len(before := noted(notes)) < count:  # noqa: ASYNC110 - other processes write it
                await asyncio.sleep(0.05)
        assert {one.what for one in before} == {"start"}
        shares = Counter(one.pid for one in before)
        assert shares.keys() == workers
        assert max(shares.values()) - min(shares.values()) <= GROUP
        victim = house.pid("rollout-1")
        os.kill(victim, signal.SIGKILL)
        record = await handle.wait(timeout=300)
        assert record.state == "succeeded", record
        audit = await handle.audit()
    after = noted(notes)[len(before) :]
    lost = {one.name for one in before if one.pid == victim}
    unharmed = {one.name: one.pid for one in before if one.pid != victim}
    # Lost trajectories restart once, elsewhere; no others do.
    again = [one for one in after if one.what == "start"]
    assert Counter(one.name for one in again) == Counter(lost)
    assert victim not in {one.pid for one in after}
    # Every trajectory ends once; the other workers' trajectories end where they began.
    ends = [one for one in after if one.what == "end"]
    assert Counter(one.name for one in ends) == Counter([*unharmed, *lost])
    assert all(unharmed.get(one.name, one.pid) == one.pid for one in ends)
    assert audit.passed, audit
    (policy,) = audit.policies
    assert policy.trained == policy.appended == count * TURNS
    assert audit.trajectories_by_state == {"COMPLETED": count}
