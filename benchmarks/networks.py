"""Do small networks reach the published results? Three seeds per task.

`--only mappo` runs one task. Draws `docs/figures/networks-TASK.svg` and writes the numbers to
`docs/figures/networks.json`, which keeps the other tasks' numbers. The last line is a JSON object:
per task the plateau of every seed, their mean, the published value, whether it was reached, CPU
seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.command import finish, options_of, progress, run_program
from troupe.job.sections.network import NetworkSpec
from troupe.networks.actor import Actor, Seat
from troupe.networks.jobs import make_learner
from troupe.networks.vector import make_environment
from troupe.recipes.curves import Mark, draw_curves

FIGURES: Final = Path(__file__).resolve().parents[1] / "docs" / "figures"
SEEDS: Final = (1, 2, 3)
# Far from the seeds of training.
_HELD_OUT = 10**9
_POLICY = "team"
_PAPOUDAKIS: Final = (
    "Papoudakis et al. 2021 (Benchmarking multi-agent deep reinforcement learning algorithms in "
    "cooperative tasks), table 3, MPE Spread, with parameter sharing"
)


@dataclass(frozen=True)
class Task:
    """A paradigm on an environment. Returns are per agent."""

    name: str
    environment: str
    network: dict[str, Any]
    """A `NetworkSpec`."""
    copies: int
    """Episodes per update."""
    updates: int
    every: int
    """Updates from one point of the curve to the next."""
    published: float
    """The plateau to reach."""
    margin: float
    """The tolerance of the published plateau, plus or minus."""
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    trials: int = 4
    """Episodes per copy for measuring a point."""
    ceiling: bool = False
    """Whether exceeding it is also impossible."""

    @property
    def spec(self) -> NetworkSpec:
        """The network's specification."""
        return NetworkSpec.model_validate(self.network)

    def reached(self, mean: float) -> bool:
        """Return whether this mean over all seeds reaches the plateau."""
        beyond = mean - self.published
        return beyond >= -self.margin and (not self.ceiling or beyond <= self.margin)


TASKS: Final = {
    task.name: task
    for task in (
        Task(
            "mappo",
            "simple_spread",
            {
                "learning": {
                    "paradigm": "mappo",
                    "lr": 2e-3,
                    "gamma": 0.9,
                    "epochs": 5,
                    "minibatches": 2,
                    "entropy_coefficient": 0.003,
                }
            },
            copies=64,
            updates=1300,
            every=50,
            published=-133.54,
            margin=3.08,
            source=_PAPOUDAKIS,
            settings={"variant": "mpe"},
        ),
        Task(
            "maddpg",
            "simple_spread",
            {
                "learning": {
                    "paradigm": "maddpg",
                    "actor_lr": 2e-3,
                    "critic_lr": 4e-3,
                    "gamma": 0.9,
                    "batch": 256,
                    "updates": 8,
                    "warmup": 4000,
                    "standardize_rewards": True,
                }
            },
            copies=16,
            updates=1000,
            every=50,
            published=-141.70,
            margin=1.74,
            source=_PAPOUDAKIS,
            settings={"variant": "mpe"},
            trials=16,
        ),
        *(
            Task(
                paradigm,
                "two_step",
                {
                    "hidden": [64],
                    "parameters": "per_agent",
                    "learning": {
                        "paradigm": paradigm,
                        "lr": 3e-3,
                        "buffer": 500,
                        "updates": 4,
                        "epsilon": [1.0, 1.0],
                    },
                },
                copies=32,
                updates=100,
                every=10,
                published=optimum,
                margin=0.0,
                source="Rashid et al. 2018 (QMIX), section 5.1: the optimum is 8, VDN finds 7",
                trials=1,
                ceiling=True,
            )
            for paradigm, optimum in (("qmix", 8.0), ("vdn", 7.0))
        ),
    )
}


@dataclass
class Curve:
    """The learning curve of a seed."""

    seed: int
    steps: list[int] = field(default_factory=list)
    """Steps of the environment, summed over all copies."""
    returns: list[float] = field(default_factory=list)
    """Mean return of an agent, without exploration."""
    seconds: float = 0.0
    """CPU seconds of playing, learning and measuring."""
    load: float = 0.0
    """The machine's load over the last minute, at the end."""

    @property
    def plateau(self) -> float:
        """Mean return over the last fifth of the curve."""
        last = self.returns[-max(1, len(self.returns) // 5) :]
        return sum(last) / len(last)


def learn(task: Task, seed: int, updates: int, say: Any) -> Curve:
    """Return the curve of `updates` updates; call `say` with a line at each of its points."""
    began = time.process_time()
    environment = make_environment(task.environment, task.copies, **task.settings)
    spec, agents = task.spec, environment.agents
    learner = make_learner(spec, environment.spaces, agents, seed)
    actor = Actor(environment, {_POLICY: Seat(spec, agents)})
    curve, played = Curve(seed), 0
    for version in range(updates + 1):
        actor.load(_POLICY, learner.published(), version)
        if version % task.every == 0 or version == updates:
            trials = range(_HELD_OUT, _HELD_OUT + task.trials)
            curve.returns.append(round(float(actor.evaluate(trials).mean()), 3))
            curve.steps.append(played)
            spent = time.process_time() - began
            say(f"{task.name} seed {seed}: {played} steps, {curve.returns[-1]:.2f}, {spent:.0f} s")
        if version < updates:
            fragment = actor.sample(seed * 10**6 + version).fragments[_POLICY]
            played += fragment.steps
            learner.update([fragment])
    environment.close()
    curve.seconds = round(time.process_time() - began, 1)
    curve.load = round(os.getloadavg()[0], 1)
    return curve


def draw(task: Task, curves: Sequence[Curve]) -> str:
    """Return an SVG document."""
    values = [value for curve in curves for value in curve.returns] + [task.published]
    # The first points, from an untrained greedy policy, would flatten all others.
    likely = max(values) - 3 * (max(values) - sorted(values)[len(values) // 4])
    return draw_curves(
        {task.name: [list(zip(curve.steps, curve.returns, strict=True)) for curve in curves]},
        title=f"return of an agent on {task.environment}; thick: mean of {len(curves)} seeds",
        axis="steps of the environment",
        mark=Mark(f"published: {task.published:g}", task.published),
        low=max(min(values), likely),
    )


def summary(task: Task, curves: Sequence[Curve]) -> dict[str, Any]:
    """Return a task's part of the JSON object."""
    plateaus = [round(curve.plateau, 2) for curve in curves]
    mean = sum(plateaus) / len(plateaus)
    return {
        "plateaus": plateaus,
        "mean": round(mean, 2),
        "published": task.published,
        "margin": task.margin,
        "reached": task.reached(mean),
        "steps": curves[0].steps[-1],
        "cpu_seconds": [curve.seconds for curve in curves],
        "load": [curve.load for curve in curves],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested tasks and print their results."""
    options = options_of(__doc__, arguments, parts=list(TASKS))
    torch.set_num_threads(1)
    tasks = [TASKS[options.only]] if options.only else list(TASKS.values())
    found: dict[str, Any] = {}
    for task in tasks:
        curves = []
        for seed in SEEDS[:1] if options.quick else SEEDS:
            updates = 2 if options.quick else task.updates
            curves.append(learn(task, seed, updates, progress))
        found[task.name] = summary(task, curves)
        if not options.quick:
            _keep(task, curves, found[task.name])
    if not options.json:
        print(f"{'task':8} {'environment':14} {'plateaus':>26} {'mean':>9} {'published':>16}")
        for name, row in found.items():
            seeds = " ".join(f"{value:.2f}" for value in row["plateaus"])
            stated = f"{row['published']:g} +- {row['margin']:g}"
            print(
                f"{name:8} {TASKS[name].environment:14} {seeds:>26} {row['mean']:9.2f} {stated:>16}"
            )
    finish(found, quiet=options.json)


def _keep(task: Task, curves: Sequence[Curve], row: dict[str, Any]) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / f"networks-{task.name}.svg").write_text(draw(task, curves))
    path = FIGURES / "networks.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[task.name] = {
        **row,
        "source": task.source,
        "curves": [dataclasses.asdict(curve) for curve in curves],
    }
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    run_program(main)
