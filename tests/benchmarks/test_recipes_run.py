"""`troupe examples run` and `benchmarks.recipes`: tiny seeds of all recipes; the stored pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.recipes import PAPERS, judged, main
from tests.benchmarks.quick import figures
from troupe.recipes.page import PAGE, PICTURE, draw, section, with_section
from troupe.recipes.recipe import Recipe, SeedRuns
from troupe.recipes.results import RESULTS, Results, digest_of

ROOT = Path(__file__).parents[2]
STORED = [one for one in recipes.recipes() if (PAPERS / one.name / RESULTS).exists()]
recipe_ = pytest.mark.parametrize("recipe", STORED, ids=lambda one: one.number)


def test_there_are_results_of_recipes() -> None:
    assert STORED


@recipe_
def test_a_stored_page_and_its_picture_are_those_of_the_stored_results(recipe: Recipe) -> None:
    folder = PAPERS / recipe.name
    results = Results.read(folder / RESULTS)
    page = (folder / PAGE).read_text(encoding="utf-8")
    assert page == with_section(page, section(recipe, results))
    assert (folder / PICTURE).read_text(encoding="utf-8") == draw(recipe, results.seeds)


@recipe_
def test_stored_results_are_of_the_recipes_present_jobs(recipe: Recipe) -> None:
    results = Results.read(PAPERS / recipe.name / RESULTS)
    assert not results.quick
    assert results.name == recipe.name
    assert results.jobs == digest_of(recipe, quick=False), "run the recipe again"
    assert all(set(one.runs) == set(recipe.arms) for one in results.seeds)


@recipe_
def test_arms_generated_about_as_many_tokens_as_are_compared(recipe: Recipe) -> None:
    for one in Results.read(PAPERS / recipe.name / RESULTS).seeds:
        assert one.tokens > 0.5 * max(run.tokens for run in one.runs.values())


def test_the_object_says_which_recipes_passed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"])
    found = figures(capsys.readouterr().out)
    assert {one.number for one in STORED} <= found.keys()
    for recipe in STORED:
        one = found[recipe.number]
        results = Results.read(PAPERS / recipe.name / RESULTS)
        criteria = [verdict.passed for verdict in recipe.verdicts(results.seeds)]
        assert [criterion["pass"] for criterion in one["criteria"]] == criteria
        assert one["pass"] == (all(criteria) and len(results.seeds) >= 5)
        assert one["commits"]
        assert one["seeds"] == [seed.seed for seed in results.seeds]


def test_a_smoke_run_and_a_recipe_that_has_not_run_do_not_pass() -> None:
    [recipe, *_] = STORED
    assert judged(recipe, None) == {"pass": False, "seeds": []}
    stored = Results.read(PAPERS / recipe.name / RESULTS)
    quick = Results(stored.name, stored.jobs, stored.parameters, True, stored.seeds)
    assert judged(recipe, quick)["pass"] is False


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [one.name for one in recipes.recipes()])
def test_a_recipe_runs_two_tiny_seeds_and_goes_on_with_those_that_lack(
    name: str, tmp_path: Path
) -> None:
    def run(seeds: int) -> str:
        command = [sys.executable, "-m", "troupe.client.cli", "examples", "run", f"papers/{name}"]
        command += ["--seeds", str(seeds), "--quick", "--out", str(tmp_path / "out")]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TROUPE_DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"{seeds} of the 5 seeds" in done.stdout
        return done.stderr

    run(1)
    assert "seed 0 has run already" in run(2)
    results = Results.read(tmp_path / "out" / RESULTS)
    seeds: list[SeedRuns] = list(results.seeds)
    assert [one.seed for one in seeds] == [0, 1]
    recipe = next(one for one in recipes.recipes() if one.name == name)
    assert all(run.points and run.job for one in seeds for run in one.runs.values())
    assert results.parameters > 40_000
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    assert "A smoke run, which measures nothing." in page
    assert all(one.goal in page for one in recipe.verdicts(seeds))
    assert (tmp_path / "out" / PICTURE).read_text(encoding="utf-8").startswith("<svg")
    assert json.loads((tmp_path / "out" / RESULTS).read_text())["quick"] is True
