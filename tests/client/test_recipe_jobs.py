"""The job of a recipe's arm: named and tagged for comparisons, and cancelled with the recipe."""

from __future__ import annotations

import asyncio

import pytest

from examples.papers.turn_baselines.recipe import RECIPE
from tests.support.fake_orchestrator import FakeOrchestrator, S
from tests.support.waiting import until
from troupe.client import AsyncClient, JobFailed
from troupe.job import parse_job
from troupe.recipes.running import run_arm


def begun(client: AsyncClient, spec: str) -> asyncio.Task[object]:
    return asyncio.create_task(run_arm(RECIPE, client, "whole", 3, parse_job(spec)))


async def until_submitted(fake: FakeOrchestrator) -> str:
    await until(lambda: fake.requests("WatchJob"))
    [job_id] = fake.jobs
    return job_id


async def test_an_interrupted_arm_cancels_its_job(
    fake: FakeOrchestrator, client: AsyncClient, job_yaml: str
) -> None:
    running = begun(client, job_yaml)
    job_id = await until_submitted(fake)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fake.jobs[job_id].state == S.JOB_STATE_CANCELLED
    assert fake.jobs[job_id].name == "turn_baselines-whole-3"
    assert sorted(fake.jobs[job_id].tags) == ["papers/turn_baselines", "seed-3"]


async def test_a_failed_job_ends_the_recipe_and_is_not_cancelled(
    fake: FakeOrchestrator, client: AsyncClient, job_yaml: str
) -> None:
    running = begun(client, job_yaml)
    job_id = await until_submitted(fake)
    await fake.move(job_id, S.JOB_STATE_STARTING, S.JOB_STATE_FAILED)
    with pytest.raises(JobFailed):
        await running
    assert not fake.requests("CancelJob")
