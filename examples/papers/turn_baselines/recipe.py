"""R5: centring rewards per turn index teaches agents to stop (verl#7244).

troupe examples run papers/turn_baselines --seeds 5
python -m examples.papers.turn_baselines.recipe   # only the model that job.yaml names
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import yaml

from examples.games.model import make_model
from examples.papers.turn_baselines.game import (
    ADVANTAGES,
    BONUS,
    TURNS,
    Episode,
    intermediate,
    play,
    values,
)
from examples.papers.turn_baselines.workflow import PROMPTS, WORDS
from troupe.algorithms.objectives import Tokens, ppo_clip
from troupe.client.handle import AsyncJobHandle
from troupe.job import JobSpec
from troupe.recipes.models import word_tokenizer
from troupe.recipes.recipe import Recipe, Run, SeedRuns, Verdict, by_tokens

FOLDER: Final = Path(__file__).parent
SAMPLES: Final = 100_000
"""Episodes from which the bias of an advantage is computed."""
GROUP: Final = 16
# The bias is measured where neither decision is made yet.
_GO: Final = (0.5, 0.5)


class TurnBaselines(Recipe):
    """The go/stop game with three advantages."""

    number = "r5"
    name = "turn_baselines"
    title = "Baselines per turn index (verl#7244)"
    arms: ClassVar = {
        "to_go": "returns from each turn on, centred turn by turn (`group_by: turn`)",
        "whole": "the episode's return at every turn, centred turn by turn",
        "per_index": "bonuses centred per turn index, then added up",
    }
    curve = "P(go) at the first turn"
    needs = ("games",)

    def model(self, directory: Path, seed: int) -> Path:
        """Save a random Qwen3 with the game's words as vocabulary."""
        return make_model(directory, word_tokenizer([*WORDS, *PROMPTS]), positions=64, seed=seed)

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return the job of the folder, with the arm's rewards."""
        spec: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
        spec["seed"] = seed
        spec["policies"]["player"]["model"]["path"] = str(model)
        spec["tasks"]["args"] = {"arm": arm}
        if quick:
            spec["pipeline"] |= {"steps": 2, "queries_per_step": 2, "group_size": 4}
        if arm == "per_index":
            group = spec["pipeline"]["group_size"]
            spec["tasks"]["args"]["episodes"] = group
            spec["pipeline"]["group_size"] = 1
            spec["pipeline"]["steps"] *= 2
            spec["algorithm"]["advantage"] = "examples.papers.turn_baselines.workflow:given"
        return JobSpec.model_validate(spec)

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Return P(go) at the first turn, and the mean return, step by step."""
        names = ("trajectory/went", "trajectories/completed", "trajectory/response_tokens")
        frame = await job.metrics_frame([*names, "trajectory/episode_return"])
        run = Run(by_tokens(frame, *names))
        returns = [one for row in frame if (one := row["trajectory/episode_return"]) is not None]
        last = returns[-max(len(returns) // 10, 1) :]
        return Run(run.points, {"return": sum(last) / len(last)})

    def computed(self, seed: int, *, quick: bool = False) -> dict[str, float]:
        """Return the bias of each advantage against the exact gradient."""
        samples = 100 * GROUP if quick else SAMPLES
        return {f"bias_{arm}": bias(arm, samples, seed) for arm in self.arms}

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge biases and final probabilities of going."""
        expected = intermediate(_GO)
        ratios = [-one.figures["bias_per_index"] / expected for one in seeds]
        others = [
            max(abs(one.figures["bias_to_go"]), abs(one.figures["bias_whole"])) / expected
            for one in seeds
        ]
        stopped = [one.end("per_index") for one in seeds]
        went = [min(one.end("to_go"), one.end("whole")) for one in seeds]
        return [
            Verdict(
                f"bias of `per_index`, divided by -E[R_intermediate] = -{expected:g}: within 5 % "
                f"of 1 at {SAMPLES:,} episodes, in every seed",
                tuple(ratios),
                all(abs(one - 1) <= 0.05 for one in ratios),
            ),
            Verdict(
                "bias of `to_go` and of `whole` (the larger one), divided by E[R_intermediate]: at "
                "most 5 %, in every seed",
                tuple(others),
                all(one <= 0.05 for one in others),
            ),
            Verdict(
                "P(go) of `per_index` below 0.05 at equal tokens, in every seed",
                tuple(stopped),
                all(one < 0.05 for one in stopped),
            ),
            Verdict(
                "P(go) of `to_go` and of `whole` (the smaller one) above 0.95 at equal tokens, in "
                "every seed",
                tuple(went),
                all(one > 0.95 for one in went),
            ),
        ]


def bias(arm: str, samples: int, seed: int) -> float:
    """Return the bias of an arm's policy gradient in the logit of going at the first turn, in units
    of p (1 - p), the logit's derivative of P(go): a hidden reward of going.

    The gradient comes from the product's loss over `samples` episodes of a table policy, in groups
    of 16, with the arm's advantages; the exact gradient comes from the game's values.
    """
    draw = random.Random(seed)
    logits = torch.log(torch.tensor([[go, 1 - go] for go in _GO], dtype=torch.float64))
    logits.requires_grad_(True)
    places: list[tuple[int, int]] = []
    advantages: list[float] = []
    for _ in range(samples // GROUP):
        group = [play(_GO, draw) for _ in range(GROUP)]
        for episode, given in zip(group, ADVANTAGES[arm](group), strict=True):
            places += _decisions(episode)
            advantages += given[: len(_decisions(episode))]
    turns, moves = torch.tensor(places).T
    logprobs = torch.log_softmax(logits, dim=1)[turns, moves]
    drawn = logprobs.detach()
    loss = ppo_clip(Tokens(logprobs, drawn, drawn, torch.tensor(advantages, dtype=torch.float64)))
    [gradient] = torch.autograd.grad(loss.sum() / (samples // GROUP * GROUP), logits)
    found = -float(gradient[0, 0]) / (_GO[0] * (1 - _GO[0]))
    stop, go = values((0.0, _GO[1]))[0], BONUS + values(_GO)[1]
    return found - (go - stop)


def _decisions(episode: Episode) -> list[tuple[int, int]]:
    """Return (turn, 0 for going or 1 for stopping) for the turns at which the agent had a
    choice."""
    return [(turn, 0 if went else 1) for turn, went in enumerate(episode.went) if turn < TURNS - 1]


RECIPE: Final = TurnBaselines()

if __name__ == "__main__":
    print(RECIPE.model(Path("runs/models/turn_baselines"), 0))
