"""The page of a recipe's results: a picture of the arms' curves and tables, from the stored runs.

A recipe's README.md is written by hand but for the part between two marks, which this module
writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from troupe.recipes.curves import Mark, draw_curves
from troupe.recipes.recipe import SEEDS, Recipe, SeedRuns, Verdict, estimated, has_passed
from troupe.recipes.results import Results
from troupe.rpc.errors import InvalidArgument

PAGE: Final = "README.md"
PICTURE: Final = "curves.svg"
BEGIN: Final = "<!-- results: written by `troupe examples run`; do not edit -->"
END: Final = "<!-- end of results -->"


def write_page(recipe: Recipe, results: Results, out: Path, *, template: Path) -> None:
    """Write the picture and the page into `out`; the hand-written part comes from the page in `out`
    or, if there is none, in the folder `template`."""
    page = out / PAGE
    source = page if page.exists() else template / PAGE
    text = with_section(source.read_text(encoding="utf-8"), section(recipe, results))
    (out / PICTURE).write_text(draw(recipe, results.seeds), encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def with_section(text: str, written: str) -> str:
    """Return a page with the part between the marks replaced. Raises `InvalidArgument` for a page
    without marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidArgument(
            "has no place for results",
            field=PAGE,
            value=before[:80],
            remedy=f"Add the lines {BEGIN} and {END}.",
        )
    return f"{before}{BEGIN}\n\n{written}\n{END}{after}"


def section(recipe: Recipe, results: Results) -> str:
    """Return the results as Markdown: verdict, criteria, arms, picture, provenance."""
    seeds = results.seeds
    verdicts = recipe.verdicts(seeds)
    verdict = "**failed**"
    if has_passed(recipe, seeds):
        verdict = "**passed**"
    elif all(one.passed for one in verdicts):
        verdict = f"**incomplete**: {len(seeds)} of {SEEDS} seeds have run; the criteria hold"
    commits = sorted({f"`{one.commit}` ({one.date})" for one in seeds})
    lines = [
        *(["A smoke run, which measures nothing.", ""] if results.quick else []),
        f"Result: {verdict}. All that this page claims is the mechanism, reproduced at "
        f"{results.parameters:,} parameters.",
        "",
        *_table_of_criteria(seeds, verdicts),
        "",
        *_table_of_arms(recipe, seeds),
        "",
        *_computed(seeds),
        f"![{escape(recipe.curve)}]({PICTURE})",
        "",
        f"Seeds {_numbers(seeds)}; commit {', '.join(commits)}, `+` for uncommitted changes. Means "
        "with Student's 95 % interval over seeds.",
        "",
    ]
    return "\n".join(lines)


def _table_of_criteria(seeds: Sequence[SeedRuns], verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        f"| criterion | by seed ({_numbers(seeds)}) | mean [95 %] | |",
        "|---|---|---|---|",
    ]
    for one in verdicts:
        values = ", ".join(f"{round(value, 3) + 0.0:.3f}" for value in one.values)
        ended = "pass" if one.passed else "**fail**"
        lines.append(f"| {one.goal} | {values} | {one.estimate} | {ended} |")
    return lines


def _table_of_arms(recipe: Recipe, seeds: Sequence[SeedRuns]) -> list[str]:
    names = sorted({name for one in seeds for run in one.runs.values() for name in run.figures})
    shown = [name.replace("_", " ") for name in names]
    header = ["arm", f"{recipe.curve}, at equal tokens", *shown, "tokens", "seconds"]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for arm, what in recipe.arms.items():
        runs = [one.runs[arm] for one in seeds]
        cells = [f"`{arm}`: {what}", str(estimated([one.end(arm) for one in seeds]))]
        for name in names:
            measured = [run.figures[name] for run in runs if name in run.figures]
            cells.append(str(estimated(measured)) if measured else "")
        cells.append(f"{statistics.fmean(run.tokens for run in runs):,.0f}")
        cells.append(f"{statistics.fmean(run.seconds for run in runs):,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _computed(seeds: Sequence[SeedRuns]) -> list[str]:
    names = sorted({name for one in seeds for name in one.figures})
    if not names:
        return []
    figures = [
        f"{name.replace('_', ' ')} {estimated([one.figures[name] for one in seeds])}"
        for name in names
    ]
    return [f"Computed without a job: {'; '.join(figures)}.", ""]


def print_results(recipe: Recipe, results: Results, out: Path, console: Console) -> None:
    """Print the arms' ends, pass or fail per criterion, and where the page and the jobs are."""
    seeds = results.seeds
    arms = Table(title=f"{recipe.title}: seeds {_numbers(seeds)}")
    for column in ("arm", recipe.curve, "tokens"):
        arms.add_column(column)
    for arm in recipe.arms:
        tokens = statistics.fmean(one.runs[arm].tokens for one in seeds)
        arms.add_row(arm, str(estimated([one.end(arm) for one in seeds])), f"{tokens:,.0f}")
    console.print(arms)
    for one in recipe.verdicts(seeds):
        ended = "pass" if one.passed else "FAIL"
        console.print(f"{ended}  {one.goal}: {one.estimate}", markup=False)
    if len(seeds) < SEEDS:
        console.print(f"{len(seeds)} of the {SEEDS} seeds that a recipe needs")
    jobs = " ".join(run.job for run in seeds[-1].runs.values())
    console.print(f"page: {out / PAGE}; picture: {out / PICTURE}", markup=False)
    console.print(f"compare the last seed in the panel, or with `troupe jobs compare {jobs}`")


def _numbers(seeds: Sequence[SeedRuns]) -> str:
    return ", ".join(str(one.seed) for one in seeds)


def draw(recipe: Recipe, seeds: Sequence[SeedRuns]) -> str:
    """Return an SVG document of the arms' curves over generated tokens."""
    return draw_curves(
        {arm: [one.runs[arm].points for one in seeds] for arm in recipe.arms},
        title=f"{recipe.curve}; thick: mean of {len(seeds)} seeds; "
        "dashed: tokens that all arms reach",
        axis="generated tokens",
        mark=Mark(place=statistics.fmean(one.tokens for one in seeds)),
    )
