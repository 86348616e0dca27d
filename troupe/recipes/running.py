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
from troupe.recipes.results import RESULTS, UNFINISHED, Results, commit_of, digest_of
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
    """Run all arms with each of `seeds` that `out` lacks; write results and page after each seed. A
    seed that was interrupted goes on with the arms that lack, at the same commit.

    `root`: the folder that contains `examples`, whose modules are sent with the jobs; `models`: a
    directory for the first models. A job that is interrupted is cancelled. Raises `JobFailed`,
    `DeadlineExceeded`, and what `begun` raises.
    """
    results = begun(recipe, out, quick=quick)
    commit = commit_of(root)  # now: files may change while the jobs run
    digest = digest_of(recipe, quick=quick)
    for seed in seeds:
        if results is not None and seed in {one.seed for one in results.seeds}:
            tell(f"{recipe.name}: seed {seed} has run already")
            continue
        # In a thread: they compute for a minute, and the client's calls go on.
        model = await asyncio.to_thread(recipe.model, models / f"{recipe.name}-{seed}", seed)
        empty = Results(recipe.name, digest, _parameters(model), quick)
        one = _interrupted(out, empty, seed, commit)
        if one is None:
            figures = await asyncio.to_thread(recipe.computed, seed, quick=quick)
            one = SeedRuns(seed, commit, "", {}, figures)
        else:
            tell(f"{recipe.name}: seed {seed} goes on after {', '.join(one.runs)}")
        for arm in recipe.arms:
            if arm in one.runs:
                continue
            spec = with_sources(recipe, recipe.job(arm, model, seed, quick=quick), root)
            done = await run_arm(recipe, client, arm, seed, spec)
            said = f"{recipe.curve} {done.end():.3f}"
            tell(f"{recipe.name}: seed {seed}, {arm}: {said}, {done.seconds:.0f} s")
            today = datetime.now(UTC).strftime("%Y-%m-%d")
            one = replace(one, date=today, runs={**one.runs, arm: done})
            empty.with_seed(one).write(out / UNFINISHED)
        results = (results or empty).with_seed(one)
        results.write(out / RESULTS)
        results = Results.read(out / RESULTS)  # as rounded there: the page shows what is stored
        (out / UNFINISHED).unlink(missing_ok=True)
        write_page(recipe, results, out, template=root / "examples/papers" / recipe.name)
    assert results is not None, "there is a seed"
    return results


def _interrupted(out: Path, like: Results, seed: int, commit: str) -> SeedRuns | None:
    """Return the finished arms of a seed that was interrupted. None if there are none of the same
    jobs and commit, or if files had been changed: then what has run is not known."""
    path = out / UNFINISHED
    if commit.endswith("+") or not path.exists():
        return None
    known = Results.read(path)
    found = [one for one in known.seeds if (one.seed, one.commit) == (seed, commit)]
    return found[0] if found and replace(known, seeds=()) == like else None


def with_sources(recipe: Recipe, spec: JobSpec, root: Path) -> JobSpec:
    """Return the job with the modules of the recipe and the folders that it needs, so that any
    cluster can run it."""
    include = ["examples/__init__.py", "examples/papers/__init__.py"]
    # Without pages and results, which change with every seed; others' folders have data files.
    include += [f"examples/papers/{recipe.name}/*.py"]
    include += [f"examples/{folder}" for folder in recipe.needs]
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
