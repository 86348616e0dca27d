"""R1: one baseline for all agents of a policy against one for each (Dr. MAS).

troupe examples run papers/dr_mas --seeds 5
python -m examples.papers.dr_mas.recipe   # only the model that job.yaml names
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from examples.games.model import make_model
from examples.papers.dr_mas.inflation import ARMS, Answers, measured, predicted
from examples.papers.dr_mas.workflow import BITS, CHECK, NAMES, NEEDED, check, propose, random_bits
from troupe.client.handle import AsyncJobHandle
from troupe.demo.models import AnswerToLearn
from troupe.job import JobSpec
from troupe.recipes.models import warm_start, word_tokenizer
from troupe.recipes.recipe import Recipe, Run, SeedRuns, Verdict, by_tokens, estimated

FOLDER: Final = Path(__file__).parent
WARM_STEPS: Final = 120
_WARM_ROWS: Final = 32
_WARM_RATE: Final = 3e-3
TRAJECTORIES: Final = 64
"""Trajectories per question with which inflation is measured."""
WITHIN: Final = 0.2
"""How near the measured inflation is to come to the prediction, as a share of it."""
SPIKE: Final = 3.0
"""A step whose gradient is longer than as many running medians is a spike."""
_WINDOW: Final = 20
FEWER: Final = 3


class SharedBaselines(Recipe):
    """Two agents of one policy with baselines over both, by trajectory and by step, and apart."""

    number = "r1"
    name = "dr_mas"
    title = "Dr. MAS: baselines of agents that share a policy"
    arms: ClassVar = {
        "trajectory": "mean and deviation over trajectories of both agents",
        "step": "mean and deviation over samples of both agents",
        "agent": "mean and deviation of each agent",
    }
    curve = "rewarded answers"

    def model(self, directory: Path, seed: int) -> Path:
        """Save a random Qwen3 that has learned to answer with seven random bits."""
        words = [word for both in BITS for word in both]
        tokenizer = word_tokenizer([*words, *NAMES, CHECK])
        make_model(directory, tokenizer, positions=64, seed=seed)
        draw = random.Random(seed)
        warm_start(
            directory,
            tokenizer,
            lambda: random_answers(draw, _WARM_ROWS),
            steps=WARM_STEPS,
            lr=_WARM_RATE,
        )
        return directory

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return the job of the folder, with the arm's baseline."""
        spec: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
        spec["seed"] = seed
        spec["tasks"]["args"]["seed"] = seed
        spec["policies"]["player"]["model"]["path"] = str(model)
        if arm != "agent":
            spec["algorithm"] |= {
                "group_by": "query",
                "baseline_weight": {"trajectory": "trajectory", "step": "sample"}[arm],
            }
        if quick:
            spec["pipeline"] |= {"steps": 4, "group_size": 4}
        return JobSpec.model_validate(spec)

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Return the share of rewarded answers, step by step, and the number of spikes."""
        names = ("trajectory/success", "trajectories/completed", "trajectory/response_tokens")
        frame = await job.metrics_frame([*names, "player/grad_norm"])
        norms = [one for row in frame if (one := row["player/grad_norm"]) is not None]
        return Run(by_tokens(frame, *names), {"spikes": float(spikes(norms))})

    def computed(self, seed: int, *, quick: bool = False) -> dict[str, float]:
        """Return measured and predicted inflation at the first model, by arm and agent."""
        with tempfile.TemporaryDirectory() as scratch:
            first = self.model(Path(scratch), seed)
            groups = Answers(first, seed, 16 if quick else TRAJECTORIES).groups
        found = {}
        for arm in ARMS:
            pairs = zip(NEEDED, measured(groups, arm), predicted(groups, arm), strict=True)
            for agent, got, expected in pairs:
                found[f"inflation_{arm}_{agent}"] = got
                found[f"predicted_{arm}_{agent}"] = expected
        return found

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge inflation, spikes and success."""
        errors = tuple(max(_errors(one)) for one in seeds)
        found = [
            Verdict(
                "measured inflation of g_k's mean squared norm, divided by (sigma_k^2 + (mu_k - "
                "mu)^2) / sigma^2, minus 1 (the largest of both agents and arms): at most "
                f"{WITHIN:g}, in every seed",
                errors,
                all(one <= WITHIN for one in errors),
            )
        ]
        for arm in ARMS:
            counts = [
                (one.runs[arm].figures["spikes"], one.runs["agent"].figures["spikes"])
                for one in seeds
            ]
            more, fewer = (sum(column) for column in zip(*counts, strict=True))
            found.append(
                Verdict(
                    f"spikes, `{arm}` minus `agent`: in sum at least {FEWER} times as many",
                    tuple(one - other for one, other in counts),
                    more > 0 and more >= FEWER * fewer,
                )
            )
        for arm in ARMS:
            gaps = tuple(one.end("agent") - one.end(arm) for one in seeds)
            found.append(
                Verdict(
                    f"rewarded answers, `agent` minus `{arm}`: the interval does not lie below 0",
                    gaps,
                    len(gaps) > 1 and estimated(gaps).high >= 0,
                )
            )
        return found


def random_answers(draw: random.Random, rows: int) -> list[AnswerToLearn]:
    """Draw questions of both agents, equally often, with random bits as answers."""
    found = []
    for row in range(rows):
        said, answer = (" ".join(random_bits(draw)) for _ in range(2))
        name = draw.choice(NAMES)
        question = check(name, said) if row % 2 else propose(name)
        found.append(AnswerToLearn([{"role": "user", "content": question}], answer))
    return found


def spikes(norms: Sequence[float]) -> int:
    """Count the norms that are more than `SPIKE` times the median of the 20 before; steps without
    a gradient are left out."""
    kept = [norm for norm in norms if norm > 0]
    return sum(
        norm > SPIKE * statistics.median(kept[max(at - _WINDOW, 0) : at])
        for at, norm in enumerate(kept)
        if at > 0
    )


def _errors(one: SeedRuns) -> list[float]:
    return [
        abs(one.figures[f"inflation_{arm}_{agent}"] / one.figures[f"predicted_{arm}_{agent}"] - 1)
        for arm in ARMS
        for agent in NEEDED
    ]


RECIPE: Final = SharedBaselines()

if __name__ == "__main__":
    print(RECIPE.model(Path("runs/models/dr_mas"), 0))
