"""Do published results of multi-agent training repeat here? The stored results of all recipes.

    python -m benchmarks.recipes [--json] [--pages]

Runs nothing: `troupe examples run papers/NAME --seeds 5 --out examples/papers/NAME` runs a recipe
and stores its results. This judges them again by the recipes' criteria. `--pages`: also write the
pages and pictures again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.command import finish, options_of, run_program
from troupe.recipes.page import write_page
from troupe.recipes.recipe import SEEDS, Recipe, has_passed
from troupe.recipes.results import RESULTS, Results

PAPERS: Final = Path(__file__).parents[1] / "examples" / "papers"


def recipes() -> Iterator[Recipe]:
    """Yield all recipes by number."""
    names = sorted(path.parent.name for path in PAPERS.glob("*/recipe.py"))
    found = [importlib.import_module(f"examples.papers.{name}.recipe").RECIPE for name in names]
    yield from sorted(found, key=lambda one: one.number)


def judged(recipe: Recipe, results: Results | None) -> dict[str, Any]:
    """Return what the results of a recipe say; `results` None: it has not run."""
    if results is None:
        return {"pass": False, "seeds": []}
    seeds = results.seeds
    return {
        "pass": has_passed(recipe, seeds) and not results.quick,
        "name": f"papers/{recipe.name}",
        "seeds": [one.seed for one in seeds],
        "missing_seeds": max(0, SEEDS - len(seeds)),
        "commits": sorted({one.commit for one in seeds}),
        "parameters": results.parameters,
        "criteria": [
            {
                "goal": one.goal,
                "pass": one.passed,
                "mean": round(one.estimate.mean, 4),
                "values": [round(value, 4) for value in one.values],
            }
            for one in recipe.verdicts(seeds)
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per criterion and the JSON object."""
    options = options_of(
        __doc__, arguments, flags={"pages": "write pages and pictures from the stored results"}
    )
    found = {}
    for recipe in recipes():
        folder = PAPERS / recipe.name
        results = Results.read(folder / RESULTS) if (folder / RESULTS).exists() else None
        found[recipe.number] = one = judged(recipe, results)
        if options.pages and results is not None:
            write_page(recipe, results, folder, template=folder)
        if options.json:
            continue
        ended = "passed" if one["pass"] else "not passed"
        print(f"{recipe.number} papers/{recipe.name}, seeds {one['seeds']}: {ended}")
        for criterion in one.get("criteria", []):
            mark = "pass" if criterion["pass"] else "FAIL"
            print(f"  {mark} {criterion['mean']:>8.3f}  {criterion['goal']}")
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
