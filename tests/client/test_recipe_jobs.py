"""The job of a recipe's arm: named and tagged for comparisons, and cancelled with the recipe."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from examples.papers.turn_baselines.recipe import RECIPE
from tests.support.fake_orchestrator import FakeOrchestrator, S
from tests.support.waiting import until
from troupe.client import AsyncClient, JobFailed
from troupe.client.handle import AsyncJobHandle
from troupe.job import JobSpec, parse_job
from troupe.recipes.page import BEGIN, END, PAGE
from troupe.recipes.recipe import Recipe, SeedRuns, Verdict
from troupe.recipes.recipe import Run as RecipeRun
from troupe.recipes.results import RESULTS, UNFINISHED, Results
from troupe.recipes.running import run, run_arm


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


class Pair(Recipe):
    """Two arms of the test's job, whose measurement is a constant."""

    number, name, title, curve = "r0", "pair", "A pair", "share"
    arms: ClassVar = {"one": "the first", "two": "the second"}

    def __init__(self, job_yaml: str) -> None:
        self._job_yaml = job_yaml
        self.computations = 0

    def model(self, directory: Path, seed: int) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({"weight": torch.zeros(3)}, directory / "model.safetensors")
        return directory

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        return parse_job(self._job_yaml)

    async def measured(self, job: AsyncJobHandle, arm: str) -> RecipeRun:
        return RecipeRun([(1.0, 0.5)])

    def computed(self, seed: int, *, quick: bool = False) -> dict[str, float]:
        self.computations += 1
        return {"exact": 0.25}

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        return [Verdict("a share", tuple(one.end("one") for one in seeds), True)]


async def test_a_seed_that_broke_off_goes_on_with_the_arms_that_lack(
    fake: FakeOrchestrator, client: AsyncClient, job_yaml: str, tmp_path: Path
) -> None:
    recipe, out = Pair(job_yaml), tmp_path / "out"
    folder = tmp_path / "examples/papers/pair"
    folder.mkdir(parents=True)
    for package in (folder.parent.parent, folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / PAGE).write_text(f"{BEGIN}\n{END}\n")
    said: list[str] = []

    def running() -> asyncio.Task[Results]:
        paths = {"root": tmp_path, "out": out, "models": tmp_path / "models"}
        return asyncio.create_task(run(recipe, client, [0], tell=said.append, **paths))

    async def until_submitted_as(name: str) -> str:
        def found() -> list[str]:
            return [job_id for job_id, job in fake.jobs.items() if job.name == name]

        await until(found)
        return found()[-1]

    first = running()
    succeeded = await until_submitted_as("pair-one-0")
    await fake.move(succeeded, S.JOB_STATE_STARTING, S.JOB_STATE_RUNNING, S.JOB_STATE_SUCCEEDED)
    failed = await until_submitted_as("pair-two-0")
    await fake.move(failed, S.JOB_STATE_STARTING, S.JOB_STATE_FAILED)
    with pytest.raises(JobFailed):
        await first
    assert (out / UNFINISHED).exists()
    assert not (out / RESULTS).exists()

    second = running()
    await until(lambda: len(fake.jobs) == 3)
    repeated = [one for one in fake.jobs if one not in (succeeded, failed)]
    assert [fake.jobs[one].name for one in repeated] == ["pair-two-0"]
    await fake.move(repeated[0], S.JOB_STATE_STARTING, S.JOB_STATE_RUNNING, S.JOB_STATE_SUCCEEDED)
    [one] = (await second).seeds
    assert [one.runs[arm].job for arm in recipe.arms] == [succeeded, repeated[0]]
    assert one.figures == {"exact": 0.25}
    assert recipe.computations == 1
    assert "pair: seed 0 goes on after one" in said
    assert (out / RESULTS).exists()
    assert not (out / UNFINISHED).exists()
