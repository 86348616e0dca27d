"""Results of a recipe as a JSON file, from which tables, pictures and pages are written."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import xxhash

import troupe
from troupe.recipes.recipe import Recipe, Run, SeedRuns
from troupe.rpc.errors import InvalidArgument

RESULTS: Final = "results.json"
UNFINISHED: Final = "unfinished.json"
"""The finished arms of a seed that is running, or was interrupted."""
# Values in the file; more digits would be noise of the runs.
_DIGITS: Final = 6
_GIT_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Results:
    """The runs of one recipe so far."""

    name: str
    jobs: str
    """A digest of the arms' jobs: runs of different jobs are not comparable."""
    parameters: int
    """Of the model."""
    quick: bool
    """Whether they are smoke runs, which measure nothing."""
    seeds: tuple[SeedRuns, ...] = ()

    def with_seed(self, one: SeedRuns) -> Results:
        """Return the results with the runs of one more seed."""
        return replace(self, seeds=tuple(sorted((*self.seeds, one), key=lambda each: each.seed)))

    def write(self, path: Path) -> None:
        """Write the file; it is complete or as before."""
        head = {
            "name": self.name,
            "jobs": self.jobs,
            "parameters": self.parameters,
            "quick": self.quick,
        }
        # A line per seed, so that a change of the file shows which seeds changed.
        seeds = ",\n".join(json.dumps(_of_seed(one)) for one in self.seeds)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".part")
        written.write_text(f'{json.dumps(head)[:-1]}, "seeds": [\n{seeds}\n]}}\n', encoding="utf-8")
        os.replace(written, path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the file. Raises `InvalidArgument` if it is not one."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                values["name"],
                values["jobs"],
                values["parameters"],
                values["quick"],
                tuple(_seed(one) for one in values["seeds"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(
                f"is no results of a recipe: {error}",
                field="results",
                value=str(path),
                remedy="Remove it, or name another directory with --out.",
            ) from error


def digest_of(recipe: Recipe, *, quick: bool) -> str:
    """Return a digest of the recipe's edition and of the jobs of all arms, without their seeds and
    models, and without fields that they leave at their defaults."""
    jobs = [recipe.job(arm, Path("model"), 0, quick=quick) for arm in recipe.arms]
    texts = [str(recipe.edition), *(job.model_dump_json(exclude_unset=True) for job in jobs)]
    return xxhash.xxh3_64_hexdigest("\n".join(texts).encode())


def commit_of(root: Path) -> str:
    """Return the commit of the repository at `root`, with `+` if tracked files were changed; the
    version of the package where there is no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"troupe {troupe.__version__}"


def _of_seed(one: SeedRuns) -> dict[str, Any]:
    return {
        "seed": one.seed,
        "commit": one.commit,
        "date": one.date,
        "figures": _rounded(one.figures),
        "runs": {
            arm: {
                "job": run.job,
                "seconds": round(run.seconds, 1),
                "figures": _rounded(run.figures),
                "points": [[round(at), round(value, _DIGITS)] for at, value in run.points],
            }
            for arm, run in one.runs.items()
        },
    }


def _seed(values: Any) -> SeedRuns:
    return SeedRuns(
        values["seed"],
        values["commit"],
        values["date"],
        {
            arm: Run(
                [(at, value) for at, value in run["points"]],
                run["figures"],
                run["seconds"],
                run["job"],
            )
            for arm, run in values["runs"].items()
        },
        values["figures"],
    )


def _rounded(figures: Any) -> dict[str, float]:
    return {name: round(float(value), _DIGITS) for name, value in figures.items()}
