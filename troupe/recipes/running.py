"""Runs of a recipe: all arms of a seed on one cluster, seed after seed, stored as they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from troupe.checkpoints.reading import StoredTensors
from troupe.client.aio import AsyncClient
from troupe.job import JobSpec
from troupe.recipes.page import write_page
from troupe.recipes.recipe import Recipe, Run, SeedRuns
from troupe.recipes.results import RESULTS, Results, commit_of, digest_of
from troupe.rpc.errors import AlreadyExists, DeadlineExceeded

# The longest that one arm may take: what a recipe has for a whole seed on two free cores, and as
# much again for a machine that others use.
_JOB_SECONDS: Final = 3600.0


def begun(recipe: Recipe, out: Path, *, quick: bool) -> Results | None:
    """Return the results in `out` to which further seeds are added; None if there are none.

    Raises `AlreadyExists` for the results of other jobs.
    """
    path = out / RESULTS
    if not path.exists():
        return None
    known = Results.read(path)
    if (known.name, known.jobs) != (recipe.name, digest_of(recipe, quick=quick)):
        raise AlreadyExists(
            "has the results of other jobs",
            kind="recipe_results",
            field="--out",
            value=str(out),
            remedy=f"Remove {RESULTS} there, or name another directory.",
        )
    return known


async def run(
    recipe: Recipe,
    client: AsyncClient,
    seeds: Sequence[int],
    *,
    root: Path,
    out: Path,
    models: Path,
    quick: bool = False,
    tell: Callable[[str], None],
) -> Results:
    """Run all arms with each of `seeds` that `out` lacks; write results and page after each seed.

    `root`: the folder that contains `examples`, whose modules are sent with the jobs; `models`: a
    directory for the first models. A job that is interrupted is cancelled. Raises `JobFailed`,
    `DeadlineExceeded`, and what `begun` raises.
    """
    results = begun(recipe, out, quick=quick)
    commit = commit_of(root)  # now: files may change while the jobs run
    for seed in seeds:
        if results is not None and seed in {one.seed for one in results.seeds}:
            tell(f"{recipe.name}: seed {seed} has run already")
            continue
        # In a thread: they compute for a minute, and the client's calls go on.
        model = await asyncio.to_thread(recipe.model, models / f"{recipe.name}-{seed}", seed)
        figures = await asyncio.to_thread(recipe.computed, seed, quick=quick)
        runs = {}
        for arm in recipe.arms:
            spec = with_sources(recipe, recipe.job(arm, model, seed, quick=quick), root)
            runs[arm] = await run_arm(recipe, client, arm, seed, spec)
            said = f"{recipe.curve} {runs[arm].end():.3f}"
            tell(f"{recipe.name}: seed {seed}, {arm}: {said}, {runs[arm].seconds:.0f} s")
        if results is None:
            digest = digest_of(recipe, quick=quick)
            results = Results(recipe.name, digest, _parameters(model), quick)
        now = datetime.now(UTC).strftime("%Y-%m-%d")
        results = results.with_seed(SeedRuns(seed, commit, now, runs, figures))
        results.write(out / RESULTS)
        write_page(recipe, results, out, template=root / "examples/papers" / recipe.name)
    assert results is not None, "there is a seed"
    return results


def with_sources(recipe: Recipe, spec: JobSpec, root: Path) -> JobSpec:
    """Return the job with the modules of the recipe, so that any cluster can run it."""
    folders = [f"papers/{recipe.name}", *recipe.needs]
    include = ["examples/__init__.py", "examples/papers/__init__.py"]
    include += [f"examples/{folder}/*.py" for folder in folders]
    code = {"root": str(root), "include": include}
    return JobSpec.model_validate(spec.model_dump(exclude_unset=True) | {"code": code})


async def run_arm(recipe: Recipe, client: AsyncClient, arm: str, seed: int, spec: JobSpec) -> Run:
    """Run one job to its end and measure it; cancel it at its deadline, or if this is
    interrupted."""
    began = time.monotonic()
    named = spec.model_copy(update={"name": f"{recipe.name}-{arm}-{seed}"})
    handle = await client.submit(named, tags=[f"papers/{recipe.name}", f"seed-{seed}"])
    try:
        await handle.result(timeout=_JOB_SECONDS)
    except (asyncio.CancelledError, DeadlineExceeded):
        # Else it would go on when the cluster starts again, together with the jobs of the next run.
        await handle.cancel("the recipe was interrupted")
        raise
    found = await recipe.measured(handle, arm)
    return replace(found, seconds=time.monotonic() - began, job=handle.id)


def _parameters(model: Path) -> int:
    """Return the number of parameters of a saved model."""
    return sum(one.numel() for one in StoredTensors.of_checkpoint(model).layout.values())
