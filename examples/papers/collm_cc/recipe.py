"""R4: a critic that sees the whole team, against one of each agent and groups (CoLLM-CC).

troupe examples run papers/collm_cc --seeds 5
python -m examples.papers.collm_cc.recipe   # only the model that job.yaml names
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from examples.games.model import make_model
from examples.papers.collm_cc.workflow import NUMBERS, OFFSETS, asked, following
from troupe.client.handle import AsyncJobHandle
from troupe.demo.models import AnswerToLearn
from troupe.job import JobSpec
from troupe.recipes.models import warm_start, word_tokenizer
from troupe.recipes.recipe import Recipe, Run, SeedRuns, Verdict, by_tokens, estimated

FOLDER: Final = Path(__file__).parent
LONG: Final = 6
"""Turns of the long relay; the short one has one."""
LEVEL: Final = 0.8
"""Share of right answers to which samples are counted; the first model has about 0.48."""
# Steps over which a share is a mean.
_WINDOW: Final = 10
FEWER: Final = 0.6
"""At most this share of the other arms' samples is the team's critic to need."""
EXPLAINED: Final = 0.2
"""By how much its explained variance is to exceed the other critic's."""
NEAR: Final = 0.05
KNOWN: Final = 0.3
"""How often the answers that the first model learns are right, not random."""
WARM_STEPS: Final = 100
_WARM_ROWS: Final = 64
_WARM_RATE: Final = 3e-3
# Trajectories of one turn in the place of each of the long relay: arms then generate about as many
# tokens.
_SHORT_QUERIES: Final = 4


class TeamCritic(Recipe):
    """A relay of two agents with groups, a critic per agent and a critic of the team."""

    number = "r4"
    name = "collm_cc"
    title = "CoLLM-CC: a critic of the whole team"
    arms: ClassVar = {
        f"{arm}_{turns}": f"{what}, {said}"
        for turns, said in ((LONG, "six turns"), (1, "one turn"))
        for arm, what in (
            ("grpo", "groups"),
            ("agent", "a critic that sees the agent's prompt"),
            ("team", "a critic that sees both agents' prompts"),
        )
    }
    curve = "right answers"
    needs = ("games",)

    def model(self, directory: Path, seed: int) -> Path:
        """Save a random Qwen3 that has learned numbers as answers, some more often right."""
        tokenizer = word_tokenizer([*NUMBERS, *OFFSETS])
        make_model(directory, tokenizer, positions=64, seed=seed)
        draw = random.Random(seed)
        warm_start(
            directory,
            tokenizer,
            lambda: rough_answers(draw, _WARM_ROWS),
            steps=WARM_STEPS,
            lr=_WARM_RATE,
        )
        return directory

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return the job of the folder, with the arm's advantage and number of turns."""
        spec: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
        learner, turns = _parts(arm)
        spec["seed"] = seed
        spec["tasks"]["args"] = {"turns": turns, "seed": seed}
        spec["policies"]["runner"]["model"]["path"] = str(model)
        if learner == "grpo":
            spec["algorithm"] = {"name": "grpo"}
        if learner == "agent":
            spec["algorithm"]["critic"] |= {"observes": "agent", "episodes": "agent"}
        if quick:
            spec["pipeline"] |= {"steps": 4, "queries_per_step": 1}
        if turns == 1:
            spec["pipeline"]["queries_per_step"] *= _SHORT_QUERIES
        return JobSpec.model_validate(spec)

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Return the share of right answers, step by step; samples to the level; the explained
        variance of the critic in the second half."""
        names = ("trajectory/right", "trajectories/completed", "trajectory/response_tokens")
        frame = await job.metrics_frame()
        points = by_tokens(frame, *names)
        figures = {}
        if _parts(arm)[1] == LONG and (needed := samples_to(LEVEL, points)) is not None:
            figures["samples_to_level"] = needed
        explained = [
            one for row in frame if (one := row.get("runner/critic/explained_variance")) is not None
        ]
        if explained:
            figures["explained_variance"] = statistics.fmean(explained[len(explained) // 2 :])
        return Run(points, figures)

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge samples, explained variance, and the short relay."""
        found = []
        for other in ("grpo", "agent"):
            ratios = tuple(
                _needed(one, f"team_{LONG}") / _needed(one, f"{other}_{LONG}") for one in seeds
            )
            found.append(
                Verdict(
                    f"samples until {LEVEL:g} of answers are right, `team_{LONG}` divided by "
                    f"`{other}_{LONG}`: mean at most {FEWER:g}",
                    ratios,
                    estimated(ratios).mean <= FEWER,
                )
            )
        more = tuple(
            one.runs[f"team_{LONG}"].figures["explained_variance"]
            - one.runs[f"agent_{LONG}"].figures["explained_variance"]
            for one in seeds
        )
        found.append(
            Verdict(
                f"explained variance of `team_{LONG}` minus `agent_{LONG}`'s, second half: "
                f"mean at least {EXPLAINED:g}",
                more,
                estimated(more).mean >= EXPLAINED,
            )
        )
        for other in ("grpo", "agent"):
            apart = tuple(one.end("team_1") / one.end(f"{other}_1") - 1 for one in seeds)
            found.append(
                Verdict(
                    f"share of right answers of `team_1`, divided by `{other}_1`'s, minus 1: mean "
                    f"within {NEAR:g}",
                    apart,
                    abs(estimated(apart).mean) <= NEAR,
                )
            )
        return found


def rough_answers(draw: random.Random, rows: int) -> list[AnswerToLearn]:
    """Draw prompts of either agent with answers that are right with the probability `KNOWN`, else
    random numbers."""
    found = []
    for _ in range(rows):
        own = draw.choice(NUMBERS)
        question = asked(own, draw.choice(list(OFFSETS)))
        answer = following(own) if draw.random() < KNOWN else draw.choice(NUMBERS)
        found.append(AnswerToLearn([{"role": "user", "content": question}], answer))
    return found


def samples_to(level: float, points: Sequence[tuple[float, float]]) -> float | None:
    """Return the tokens, one per sample, after which the mean of ten steps first reaches `level`;
    None if it never does."""
    for end in range(_WINDOW, len(points) + 1):
        if statistics.fmean(value for _, value in points[end - _WINDOW : end]) >= level:
            return points[end - 1][0]
    return None


def _needed(one: SeedRuns, arm: str) -> float:
    """Return the samples to the level; all samples if it was not reached, which is too few."""
    run = one.runs[arm]
    return run.figures.get("samples_to_level", run.tokens)


def _parts(arm: str) -> tuple[str, int]:
    learner, turns = arm.split("_")
    return learner, int(turns)


RECIPE: Final = TeamCritic()

if __name__ == "__main__":
    print(RECIPE.model(Path("runs/models/collm_cc"), 0))
