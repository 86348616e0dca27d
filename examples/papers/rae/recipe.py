"""R2: a baseline for each role in self-play (SPIRAL's RAE) on Kuhn poker.

troupe examples run papers/rae --seeds 5
python -m examples.papers.rae.recipe   # only the model that job.yaml names
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from examples.papers.rae.exact import ExactPlay
from examples.self_play.model import make_player
from troupe.client.handle import AsyncJobHandle
from troupe.job import JobSpec
from troupe.recipes.recipe import Recipe, Run, SeedRuns, Verdict, by_tokens, estimated

FOLDER: Final = Path(__file__).parent
WARM_STEPS: Final = 200
WITHIN: Final = 0.03
"""How near b_0 is to come to the exact value of its seat."""


class RoleBaselines(Recipe):
    """Self-play with a baseline per seat, without one, and with one for both seats."""

    number = "r2"
    name = "rae"
    title = "SPIRAL's role-conditioned advantage on Kuhn poker"
    arms: ClassVar = {
        "rae": "a moving average of returns for each seat",
        "none": "no baseline",
        "shared": "one moving average for both seats",
    }
    curve = "exploitability (half of NashConv)"
    edition = 2
    needs = ("games", "self_play")

    def model(self, directory: Path, seed: int) -> Path:
        """Save the random Qwen3 of `examples/self_play`, which has learned moves and cards."""
        player = ExactPlay(make_player(directory, seed=seed))
        player.warm_started(WARM_STEPS)
        player.save(directory)
        return directory

    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return the job of the folder, with the arm's baseline."""
        spec: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
        spec["seed"] = seed
        spec["policies"]["player"]["model"]["path"] = str(model)
        if arm == "none":
            spec["algorithm"]["advantage"] = "examples.papers.rae.functions:no_baseline"
        if arm == "shared":
            spec["agents"] = {"player": spec["agents"]["first"]}
        if quick:
            spec["pipeline"] |= {"steps": 4, "queries_per_step": 8}
            spec["checkpoint"]["every"] = 1
        return JobSpec.model_validate(spec)

    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Examine every checkpoint: exploitability, value of the first seat, its baseline, variance
        of gradients."""
        done = ("step/seconds", "trajectories/completed", "trajectory/response_tokens")
        frame = await job.metrics_frame()
        tokens = [at for at, _ in by_tokens(frame, *done)]
        checkpoints = [
            (one.version, Path(one.path))
            for one in sorted(await job.checkpoints(), key=lambda one: one.version)
            if one.version <= len(tokens)
        ]
        return await asyncio.to_thread(_examined, arm, checkpoints, tokens, _baselines(frame))

    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge b_0, variances and exploitability."""
        apart = [one.runs["rae"].figures["baseline_error"] for one in seeds]
        ratios = [
            max(one.runs["rae"].figures[f"variance_over_{arm}"] for arm in ("none", "shared"))
            for one in seeds
        ]
        verdicts = [
            Verdict(
                f"distance of b_0 from the exact value of its seat, mean over the second half: at "
                f"most {WITHIN:g}, in every seed",
                tuple(apart),
                all(one <= WITHIN for one in apart),
            ),
            Verdict(
                "variance of the gradient with b of `rae`, divided by that without baseline and by "
                "that with one for both seats (the larger ratio), at the policies of `rae`: below "
                "1, in every seed",
                tuple(ratios),
                all(one < 1 for one in ratios),
            ),
        ]
        for other in ("none", "shared"):
            more = [one.end("rae", 0.25) - one.end(other, 0.25) for one in seeds]
            verdicts.append(
                Verdict(
                    f"exploitability of `rae` minus `{other}`'s, last quarter: the interval "
                    "does not lie above 0",
                    tuple(more),
                    len(more) > 1 and estimated(more).low <= 0,
                )
            )
        return verdicts


def _baselines(frame: Sequence[Mapping[str, float | None]]) -> list[dict[str, float]]:
    """Return the baselines by agent that each step's returns were compared with."""
    prefix = "player/baseline/"
    rows = [row for row in frame if row.get("step/seconds") is not None]
    return [
        {
            name.removeprefix(prefix): value
            for name, value in row.items()
            if name.startswith(prefix) and value is not None
        }
        for row in rows
    ]


def _examined(
    arm: str,
    checkpoints: Sequence[tuple[int, Path]],
    tokens: Sequence[float],
    baselines: Sequence[Mapping[str, float]],
) -> Run:
    """Return the run from its checkpoints by version, the tokens generated up to each step, and the
    baselines of each step: the ones of step v + 1 belong to version v."""
    points: list[tuple[float, float]] = []
    values: list[float] = []
    errors: list[float] = []
    by_turn: list[float] = []
    ratios: dict[str, list[float]] = {"none": [], "shared": []}
    for version, path in checkpoints:
        play = ExactPlay(path)
        points.append((tokens[version - 1], play.exploitability))
        values.append(float(play.seat_values[0]))
        if arm != "rae" or version >= len(baselines):
            continue
        first, second = baselines[version]["first"], baselines[version]["second"]
        if 2 * version >= len(tokens):
            errors.append(abs(first - values[-1]))
            by_turn.append(abs(play.mean_return(0, by_turn=True) - values[-1]))
        both = (first + second) / 2
        found = play.variances({"rae": (first, second), "none": (0, 0), "shared": (both, both)})
        for other, some in ratios.items():
            some.append(found["rae"] / found[other])
    figures = {"first_seat": statistics.fmean(values[len(values) // 2 :])}
    if arm == "rae":
        figures["baseline_error"] = statistics.fmean(errors)
        figures["error_if_turns_counted"] = statistics.fmean(by_turn)
        for other, some in ratios.items():
            figures[f"variance_over_{other}"] = statistics.fmean(some)
    return Run(points, figures)


RECIPE: Final = RoleBaselines()

if __name__ == "__main__":
    print(RECIPE.model(Path("runs/models/rae"), 0))
