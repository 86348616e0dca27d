"""The cost of deterministic mode in the trainer.

    python -m benchmarks.deterministic_trainer [--rounds 7] [--json]

The same step (forward, backward, optimizer) of the same model and samples, alternately with and
without `pipeline.deterministic`. Without it a micro-batch is any 32 samples; with it the unit is a
group, whose gradient is added in fixed point, which costs a pass over all parameters. So the cost
falls with the tokens per group and rises with the number of parameters; two shapes show both. CPU
seconds of one thread, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import finish, run_program
from benchmarks.workloads.one_policy import job_of_one
from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row

VOCABULARY = 1024
MICRO_BATCH = 32


@dataclass(frozen=True)
class Shape:
    """A step: groups of answers to one prompt each."""

    name: str
    groups: int
    members: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """All tokens of the step, scored or not."""
        return self.groups * self.members * (self.prompt + self.response)


SHAPES = (
    Shape("short answers, small groups", groups=16, members=4, prompt=24, response=8),
    Shape("long answers, groups of 8", groups=4, members=8, prompt=64, response=96),
)


def make_rows(shape: Shape) -> list[Row]:
    """Return rows of random tokens and rewards."""
    rng = np.random.default_rng(0)
    rows = []
    for g in range(shape.groups):
        prompt = rng.integers(VOCABULARY, size=shape.prompt)
        rewards = tuple(float(m % 2) for m in range(shape.members))
        for m, reward in enumerate(rewards):
            response = rng.integers(VOCABULARY, size=shape.response)
            rows.append(
                Row(
                    sample_id=f"q{g}_0_t{m}",
                    ids=np.concatenate([prompt, response]),
                    prompt_length=shape.prompt,
                    behaviour=np.full(shape.response, -np.log(VOCABULARY), np.float32),
                    reward=reward,
                    group_rewards=rewards,
                    version=0,
                    group=f"q{g}",
                    trajectory=f"t{m}",
                )
            )
    return rows


def make_learner(deterministic: bool) -> Learner:
    """Make the learner of a Qwen3 with 3 layers of width 128."""
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    pipeline = {"steps": 1, "queries_per_step": 1, "deterministic": deterministic}
    spec = job_of_one("cost", {"model": {"path": "nowhere"}}, pipeline=pipeline)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **config), dtype=torch.float32
    )
    return Learner(model.eval(), spec, "solver")


def step_seconds(learner: Learner, rows: list[Row]) -> float:
    """Return the CPU seconds of one step, in which samples arrive in a new order."""
    groups = [[row for row in rows if row.group == g] for g in dict.fromkeys(r.group for r in rows)]
    random.shuffle(groups)
    order = [row for group in groups for row in group]
    began = time.process_time()
    for start in range(0, len(order), MICRO_BATCH):
        learner.accumulate(order[start : start + MICRO_BATCH])
    learner.apply(0)
    return time.process_time() - began


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    """Return medians over `rounds` steps of either kind, alternately."""
    rows = make_rows(shape)
    learners = {"plain": make_learner(False), "deterministic": make_learner(True)}
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for number in range(rounds + 1):
        for name, learner in learners.items():
            spent = step_seconds(learner, rows)
            if number:  # the first one warms up
                seconds[name].append(spent)
    medians = {f"{name}_s": statistics.median(spent) for name, spent in seconds.items()}
    medians["ratio"] = medians["deterministic_s"] / medians["plain_s"]
    medians["parameters"] = float(learners["plain"].num_parameters)
    return medians


def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {shape.name: measure(shape, arguments.rounds) for shape in SHAPES}
    table = Table("step", "tokens", "parameters", "plain, s", "deterministic, s", "ratio")
    for shape in SHAPES:
        one = found[shape.name]
        numbers = [f"{one[name]:.3f}" for name in ("plain_s", "deterministic_s", "ratio")]
        table.add_row(shape.name, f"{shape.tokens:,}", f"{one['parameters']:,.0f}", *numbers)
    Console(quiet=arguments.json).print(table)
    finish(found, quiet=arguments.json)


if __name__ == "__main__":
    run_program(main)
