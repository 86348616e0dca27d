"""Steps that learn from rows through the whole product: alone, and before RL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.standing import Standing, ended, stand_up, until_job
from troupe.client import AsyncJobHandle, MetricsLogged
from troupe.client.records.jobs import JobState
from troupe.cluster.state import running_state

SHOWN = {"source": "tests.support.tiny_team:Demonstrations"}
PAIRS = {"source": "tests.support.tiny_team:Pairs"}
JOINT_PAIRS = {"source": "tests.support.tiny_team:JointPairs"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with stand_up(tmp_path_factory.mktemp("standing")) as standing:
        yield standing


async def values_of(handle: Any) -> dict[int, dict[str, float]]:
    """The metrics of each step."""
    found: dict[int, dict[str, float]] = {}
    async for event in handle.watch():
        if isinstance(event, MetricsLogged):
            found.setdefault(event.step, {}).update(event.values)
    return found


async def lose_workers(cluster: Standing, handle: AsyncJobHandle) -> None:
    """Kill all trainers and rollout workers after the job's second step."""
    await until_job(handle, lambda one: one.step >= 2)
    state = running_state(cluster.data_dir)
    assert state is not None
    for service in state.services:
        if service.name.startswith(("trainer", "rollout")):
            cluster.kill(service.name)


@pytest.mark.slow
async def test_supervised_steps_come_first_and_rl_goes_on_from_them(cluster: Standing) -> None:
    text = cluster.yaml(
        "tests.support.tiny_team:play",
        **{
            "pipeline.steps": 14,
            "pipeline.mode": "micro_batch",
            "supervised": {"tasks": SHOWN, "steps": 12, "rows_per_step": 8, "lr": 0.02},
            "evaluation": {"queries": 8, "every": 12},
        },
    )
    async with cluster.client() as client:
        handle = await client.submit(text)
        end = await ended(handle)
        assert end.job.state == JobState.SUCCEEDED, end.job.problem
        steps = await values_of(handle)
        audit = await handle.audit()
    for policy in ("solver", "checker"):
        losses = [steps[n][f"{policy}/supervised/loss"] for n in range(1, 13)]
        assert losses[-1] < 0.3 * losses[0]
        assert steps[12][f"{policy}/samples"] == 4
        assert f"{policy}/supervised/loss" not in steps[13]
        assert f"{policy}/reward/mean" in steps[14]
    # They repeat the demonstrations before the first step of RL.
    assert steps[12]["evaluation/team/mean"] > steps[0]["evaluation/team/mean"] + 0.5
    assert audit.passed, audit


@pytest.mark.slow
async def test_a_job_of_demonstrations_alone_goes_on_after_its_services_die(
    cluster: Standing,
) -> None:
    job = yaml.safe_load(
        cluster.yaml(
            **{
                "pipeline.steps": 8,
                "pipeline.mode": "sync",
                "supervised": {"tasks": SHOWN, "steps": 8, "rows_per_step": 8, "lr": 0.02},
            }
        )
    )
    for name in ("workflow", "tasks", "tools", "rewards"):
        job.pop(name, None)
    async with cluster.client() as client:
        handle = await client.submit(yaml.safe_dump(job))
        await lose_workers(cluster, handle)
        end = await ended(handle)
        assert end.job.state == JobState.SUCCEEDED, end.job.problem
        steps = await values_of(handle)
        audit = await handle.audit()
    assert [steps[n]["solver/samples"] for n in range(1, 9)] == [4.0] * 8
    assert steps[8]["solver/supervised/loss"] < steps[1]["solver/supervised/loss"]
    assert audit.passed, audit


@pytest.mark.slow
async def test_preferences_are_learned_although_services_die_and_rl_goes_on_from_them(
    cluster: Standing,
) -> None:
    preferences = {"tasks": PAIRS, "steps": 8, "rows_per_step": 8, "lr": 0.01, "beta": 0.5}
    text = cluster.yaml(
        "tests.support.tiny_team:play",
        **{
            "pipeline.steps": 9,
            "pipeline.mode": "sync",
            # Also pairs whose sides are claimed apart.
            "pipeline.micro_batch_samples": 3,
            "preferences": preferences,
        },
    )
    async with cluster.client() as client:
        handle = await client.submit(text)
        await lose_workers(cluster, handle)
        end = await ended(handle)
        assert end.job.state == JobState.SUCCEEDED, end.job.problem
        steps = await values_of(handle)
        audit = await handle.audit()
    for policy in ("solver", "checker"):
        # Four rows of two replies each.
        assert [steps[n][f"{policy}/samples"] for n in range(1, 9)] == [8.0] * 8
        losses = [steps[n][f"{policy}/preference/loss"] for n in range(1, 9)]
        # The reference is the first version, also in restarted trainers.
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)
        assert losses[-1] < 0.5 * losses[0]
        assert steps[8][f"{policy}/preference/accuracy"] == 1
        assert f"{policy}/reward/mean" in steps[9]
        assert f"{policy}/preference/loss" not in steps[9]
    assert audit.passed, audit


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["serial", "micro_batch"])
async def test_policies_learn_joint_pairs_together_although_services_die(
    cluster: Standing, mode: str
) -> None:
    preferences = {"tasks": JOINT_PAIRS, "steps": 8, "rows_per_step": 8, "lr": 0.01, "beta": 0.5}
    text = cluster.yaml(
        "tests.support.tiny_team:play",
        **{
            "pipeline.steps": 9,
            "pipeline.mode": mode,
            "pipeline.micro_batch_samples": 3,
            "preferences": {**preferences, "joint": True},
        },
    )
    async with cluster.client() as client:
        handle = await client.submit(text)
        await lose_workers(cluster, handle)
        end = await ended(handle)
        assert end.job.state == JobState.SUCCEEDED, end.job.problem
        steps = await values_of(handle)
        audit = await handle.audit()
    losses = [steps[n]["solver/preference/loss"] for n in range(1, 9)]
    # Both policies learn from the same margins.
    assert losses == [steps[n]["checker/preference/loss"] for n in range(1, 9)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.5 * losses[0]
    for policy in ("solver", "checker"):
        assert [steps[n][f"{policy}/samples"] for n in range(1, 9)] == [16.0] * 8
        assert f"{policy}/preference/loss" not in steps[9]
    assert audit.passed, audit
