"""Recipes: means and intervals over seeds, curves at equal tokens, results on disk, pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest

from troupe.client.handle import AsyncJobHandle
from troupe.job import JobSpec
from troupe.recipes.page import BEGIN, END, draw, section, with_section
from troupe.recipes.recipe import (
    Estimate,
    Recipe,
    Run,
    SeedRuns,
    Verdict,
    by_tokens,
    estimated,
    has_passed,
)
from troupe.recipes.results import RESULTS, Results, commit_of, digest_of
from troupe.recipes.running import begun, with_sources
from troupe.rpc.errors import AlreadyExists, InvalidArgument

ROOT = Path(__file__).parents[2]


class Coin(Recipe):
    """A recipe whose criterion is that `heads` ends above `tails`."""

    number, name, title = "r0", "coin", "A coin"
    arms: ClassVar = {"heads": "one side", "tails": "the other"}
    curve = "share"
    needs = ("games",)

    def model(self, directory: Path, seed: int) -> Path:
        return directory

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        return JobSpec.model_validate(
            {
                "name": arm,
                "seed": seed,
                "workflow": "examples.games.kuhn:workflow",
                "tasks": {"source": "troupe.workflow.environments:Episodes"},
                "agents": {"a": {"policy": "p"}, "b": {"policy": "p"}},
                "policies": {"p": {"model": {"path": str(model)}}},
                "pipeline": {"steps": 2 if quick else 20, "queries_per_step": 4},
            }
        )

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        return Run([(1, 0.0)])

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        gaps = tuple(one.end("heads") - one.end("tails") for one in seeds)
        return [Verdict("heads above tails", gaps, all(gap > 0 for gap in gaps))]


def runs(seed: int, heads: float, tails: float = 0.25) -> SeedRuns:
    long = [(100.0 * step, tails) for step in range(1, 21)]
    short = [(50.0 * step, heads) for step in range(1, 21)]
    curves = {"heads": Run(short, {"side": heads}, 3.0, "job-h"), "tails": Run(long)}
    return SeedRuns(seed, "abc", "2026-11-29", curves, {"exact": 0.5})


def test_an_interval_is_students() -> None:
    found = estimated([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert found.mean == 3.0
    assert found.low == pytest.approx(3.0 - half)
    assert str(Estimate(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"
    assert str(estimated([2.0])) == "2.000", "one seed has no interval"
    with pytest.raises(ValueError, match="11 values"):
        estimated([0.0] * 11)


def test_arms_are_compared_at_the_tokens_that_all_have_reached() -> None:
    rising = Run([(10.0 * step, float(step)) for step in range(1, 101)])
    slow = Run([(5.0 * step, 7.0) for step in range(1, 101)])
    seed = SeedRuns(0, "abc", "", {"rising": rising, "slow": slow})
    assert seed.tokens == 500
    assert seed.end("rising") == pytest.approx(47.5), "the mean from 450 to 500 tokens"
    assert rising.end() == pytest.approx(95.0)


def test_a_curve_over_tokens_leaves_rows_of_evaluations_out() -> None:
    frame: list[dict[str, float | None]] = [
        {"step": 0, "value": None, "count": None, "tokens": None},
        {"step": 1, "value": 0.5, "count": 10.0, "tokens": 2.0},
        {"step": 2, "value": 0.75, "count": 10.0, "tokens": 3.0},
    ]
    assert by_tokens(frame, "value", "count", "tokens") == [(20.0, 0.5), (50.0, 0.75)]


def test_a_recipe_passes_with_all_criteria_and_five_seeds_only() -> None:
    good = [runs(seed, 0.75) for seed in range(5)]
    assert has_passed(Coin(), good)
    assert not has_passed(Coin(), good[:4])
    assert not has_passed(Coin(), [*good[:4], runs(4, 0.125)])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = Results("coin", "1234", 40_000, quick=False).with_seed(runs(1, 0.75))
    results = results.with_seed(runs(0, 0.5))
    results.write(tmp_path / "deeper" / RESULTS)
    read = Results.read(tmp_path / "deeper" / RESULTS)
    assert [one.seed for one in read.seeds] == [0, 1]
    assert section(Coin(), read) == section(Coin(), results)
    assert draw(Coin(), read.seeds) == draw(Coin(), results.seeds)
    assert read.seeds[1].runs["heads"].figures == {"side": 0.75}
    (tmp_path / RESULTS).write_text('{"name": "coin"}')
    with pytest.raises(InvalidArgument, match="is no results of a recipe"):
        Results.read(tmp_path / RESULTS)


def test_seeds_are_added_to_results_of_the_same_jobs_only(tmp_path: Path) -> None:
    recipe = Coin()
    assert begun(recipe, tmp_path, quick=False) is None
    Results("coin", digest_of(recipe, quick=False), 1, quick=False).write(tmp_path / RESULTS)
    assert begun(recipe, tmp_path, quick=False) is not None
    with pytest.raises(AlreadyExists, match="results of other jobs"):
        begun(recipe, tmp_path, quick=True)


def test_a_page_says_which_criteria_failed_and_which_seeds_ran() -> None:
    results = Results("coin", "1234", 40_000, quick=False)
    failed = results.with_seed(runs(0, 0.75)).with_seed(runs(1, 0.125))
    text = section(Coin(), failed)
    assert "Result: **failed**" in text
    assert "| heads above tails | 0.500, -0.125 | 0.188 [-3.783, 4.158] | **fail** |" in text
    assert "Seeds 0, 1; commit `abc` (2026-11-29)" in text
    assert "40,000 parameters" in text
    held = section(Coin(), results.with_seed(runs(0, 0.75)))
    assert "**incomplete**: 1 of 5 seeds have run" in held


def test_only_the_part_between_the_marks_of_a_page_is_written() -> None:
    page = f"# By hand\n\n{BEGIN}\nold\n{END}\n\nAlso by hand\n"
    once = with_section(page, "new\n")
    assert once == f"# By hand\n\n{BEGIN}\n\nnew\n\n{END}\n\nAlso by hand\n"
    assert with_section(once, "new\n") == once
    with pytest.raises(InvalidArgument, match="no place for results"):
        with_section("# By hand\n", "new\n")


def test_the_picture_has_a_line_per_seed_and_a_mean_of_every_arm() -> None:
    seeds = [runs(seed, 0.75) for seed in range(3)]
    picture = draw(Coin(), seeds)
    drawn = ElementTree.fromstring(picture)
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * (3 + 1)
    assert ">heads</text>" in picture


def test_a_recipes_jobs_bring_its_modules_and_those_that_it_needs() -> None:
    spec = with_sources(Coin(), Coin().job("heads", Path("m"), 0), ROOT)
    assert spec.code is not None
    assert spec.code.root == str(ROOT)
    assert {"examples/papers/coin/*.py", "examples/games"} <= set(spec.code.include)


def test_a_commit_is_marked_when_files_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> Any:
        import subprocess

        names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True)

    assert commit_of(tmp_path).startswith("troupe ")
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{clean}+"
