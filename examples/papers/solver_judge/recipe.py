"""R6: a pretrained solver and judge as two policies, as one, and a solver alone.

troupe examples run papers/solver_judge --seeds 5
python -m examples.papers.solver_judge.recipe   # only the model that job.yaml names
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from examples.real_team.model import make
from troupe.client.handle import AsyncJobHandle
from troupe.job import JobSpec
from troupe.recipes.recipe import Recipe, Run, SeedRuns, Verdict, estimated

FOLDER: Final = Path(__file__).parent
MODEL: Final = "smollm2-135m-instruct"
AHEAD: Final = 0.05
"""How much more often the team is to succeed than the solver alone."""
# Of the tokens: all evaluations but the one before the first step.
_TRAINED: Final = 0.95


class RealTeam(Recipe):
    """A solver and a judge over SmolLM2-135M-Instruct: two adapters, one adapter, no judge."""

    number = "r6"
    name = "solver_judge"
    title = "a pretrained solver and judge"
    arms: ClassVar = {
        "apart": "solver and judge, an adapter each",
        "shared": "solver and judge, one adapter for both",
        "alone": "the solver alone, twice as many queries",
    }
    curve = "held-out success"
    needs = ("real_team",)

    def model(self, directory: Path, seed: int) -> Path:
        """Convert the pretrained model, once for all seeds."""
        return make(directory.parent / MODEL)

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return the job of the folder, with the arm's agents and policies."""
        spec: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
        spec["seed"] = seed
        for policy in spec["policies"].values():
            policy["model"] = {"path": str(model)}
        if quick:
            spec["pipeline"] |= {"steps": 2, "queries_per_step": 1, "group_size": 2}
            spec["evaluation"] = {"queries": 2, "every": 1}
        if arm != "apart":
            del spec["policies"]["judge"]
            spec["agents"]["judge"]["policy"] = "solver"
        if arm == "alone":
            del spec["agents"]["judge"]
            # Half as many drafts per query.
            spec["pipeline"]["queries_per_step"] *= 2
        return JobSpec.model_validate(spec)

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Return held-out success, evaluation by evaluation; how often a draft is right and, of
        pairs with a better one, the judge's pick."""
        tokens = 0.0
        points: list[tuple[float, float]] = []
        figures: dict[str, float] = {}
        for row in await job.metrics_frame():
            tokens += sum(
                row.get(f"{policy}/response_tokens") or 0.0 for policy in ("solver", "judge")
            )
            if (success := row.get("evaluation/team/mean")) is None:
                continue
            points.append((tokens, success))
            for name in ("draft_right", "judged_right"):
                if (value := row.get(f"evaluation/trajectory/{name}")) is not None:
                    figures[name] = value
        figures["success_before"] = points[0][1]
        return Run(points, figures)

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge the differences between the arms."""

        def more(arm: str, other: str) -> tuple[float, ...]:
            return tuple(one.end(arm, _TRAINED) - one.end(other, _TRAINED) for one in seeds)

        apart, alone = more("apart", "shared"), more("apart", "alone")
        return [
            Verdict(
                "held-out success in `apart` minus success in `shared`, all evaluations after the "
                "first: mean at least 0",
                apart,
                estimated(apart).mean >= 0,
            ),
            Verdict(
                "held-out success in `apart` minus success in `alone`, all evaluations after the "
                f"first: mean at least {AHEAD:.2f}",
                alone,
                estimated(alone).mean >= AHEAD,
            ),
        ]


RECIPE: Final = RealTeam()

if __name__ == "__main__":
    print(RECIPE.model(Path("runs/models/solver_judge"), 0))
