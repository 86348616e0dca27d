"""R3: candidates of one turn as a group (AT-GRPO's trees) on Plan-Path.

troupe examples run papers/plan_path --seeds 5
python -m examples.papers.plan_path.recipe   # only the model that job.yaml names
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from examples.games.model import make_model
from examples.papers.plan_path.maze import CELLS, Maze, rough_plan
from examples.papers.plan_path.workflow import NAMES, PROPOSED, correct, mazes_of, propose
from troupe.client.handle import AsyncJobHandle
from troupe.demo.models import AnswerToLearn
from troupe.job import JobSpec
from troupe.recipes.models import warm_start, word_tokenizer
from troupe.recipes.recipe import Recipe, Run, SeedRuns, Verdict, estimated

FOLDER: Final = Path(__file__).parent
CANDIDATES: Final = 4
WARM_STEPS: Final = 300
# Two evaluations.
_LAST: Final = 0.25
_WARM_ROWS: Final = 64
_WARM_RATE: Final = 5e-3
STRAY: Final = 0.4
"""How often the plans that the first model learns take a step at random."""
AHEAD: Final = 0.10
"""By how much trees are to be better than groups of an agent's turns."""
REPEATS: Final = 0.5
"""How often a corrector that the first model learns repeats the proposed plan."""


class PlanPath(Recipe):
    """A team of two with and without trees, and one agent alone."""

    number = "r3"
    name = "plan_path"
    title = "AT-GRPO's trees on Plan-Path"
    arms: ClassVar = {
        "agent": "four trajectories per maze, an agent's plans of all turns are a group",
        "turn": "four trajectories per maze, an agent's plans of a turn are a group",
        "branch": "four candidates per turn, which are a group; the best goes on",
        "alone": "`branch` with the proposer alone",
    }
    curve = "mazes solved"

    def model(self, directory: Path, seed: int) -> Path:
        """Save a small Qwen3 that has learned rough plans."""
        tokenizer = word_tokenizer([*NAMES, *CELLS, PROPOSED])
        make_model(directory, tokenizer, positions=64, seed=seed)
        draw, mazes = random.Random(seed), mazes_of(seed)
        warm_start(
            directory,
            tokenizer,
            lambda: rough_answers(mazes, draw, _WARM_ROWS),
            steps=WARM_STEPS,
            lr=_WARM_RATE,
            final_lr_fraction=0.1,
        )
        return directory

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return the job of the folder, with the arm's sampling and groups."""
        spec: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
        spec["seed"] = seed
        spec["tasks"]["args"]["seed"] = seed
        spec["policies"]["planner"]["model"]["path"] = str(model)
        if quick:
            spec["pipeline"] |= {"steps": 2, "queries_per_step": 4}
            spec["evaluation"] = {"queries": 8, "every": 1}
        if arm in ("agent", "turn"):
            spec["algorithm"]["group_by"] = arm
            spec["tasks"]["args"]["candidates"] = 1
            spec["pipeline"]["group_size"] = CANDIDATES
        if arm == "alone":
            del spec["agents"]["corrector"]
            # Half as many turns per maze.
            spec["pipeline"]["queries_per_step"] *= 2
        return JobSpec.model_validate(spec)

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Return the share of mazes that the team solves, evaluation by evaluation."""
        frame = await job.metrics_frame()
        tokens = 0.0
        points: list[tuple[float, float]] = []
        for row in frame:
            tokens += row.get("planner/response_tokens") or 0.0
            if (solved := row.get("evaluation/team/mean")) is not None:
                points.append((tokens, solved))
        return Run(points, {"solved_before": points[0][1]})

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge the differences between the arms of the team."""

        def more(arm: str, other: str) -> tuple[float, ...]:
            return tuple(one.end(arm, _LAST) - one.end(other, _LAST) for one in seeds)

        found = []
        for arm, other in (("branch", "turn"), ("turn", "agent")):
            gaps = more(arm, other)
            goal = (
                f"mazes solved by `{arm}` minus those by `{other}`, last quarter: mean at least 0"
            )
            found.append(Verdict(goal, gaps, estimated(gaps).mean >= 0))
        gaps = more("branch", "agent")
        estimate = estimated(gaps)
        goal = (
            f"mazes solved by `branch` minus those by `agent`, last quarter: mean at least "
            f"{AHEAD:.2f}, interval above 0"
        )
        found.append(Verdict(goal, gaps, estimate.mean >= AHEAD and estimate.low > 0))
        return found


def rough_answers(mazes: Sequence[Maze], draw: random.Random, rows: int) -> list[AnswerToLearn]:
    """Draw questions of proposers and correctors, equally often, from anywhere in the mazes, with
    rough plans as answers."""
    found = []
    for row in range(rows):
        number = draw.randrange(len(mazes))
        maze = mazes[number]
        maze = replace(maze, at=draw.choice([cell for cell in maze.distances if cell != maze.goal]))
        question, answer = propose(NAMES[number], maze), rough_plan(maze, draw, STRAY)
        if row % 2:
            question = correct(NAMES[number], maze, answer)
            if draw.random() >= REPEATS:
                answer = rough_plan(maze, draw, STRAY)
        found.append(AnswerToLearn([{"role": "user", "content": question}], " ".join(answer)))
    return found


RECIPE: Final = PlanPath()

if __name__ == "__main__":
    print(RECIPE.model(Path("runs/models/plan_path"), 0))
