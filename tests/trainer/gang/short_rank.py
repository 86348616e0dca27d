"""A gloo rank of a gang of which only the last rank runs out of memory, at many places of a pass.

Run as a module with torchrun's variables, with the arguments SPEC.json BUDGET PLACES. Rank 0
prints one JSON object per place: whether the weights after the step are, bit for bit, those of a
gang whose passes were smaller from the start, and its metrics the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.gang.group import GangBatches, GangGroup
from services.trainer.gang.rank_learner import RankLearner
from services.trainer.learning.model import load_model
from tests.trainer.batches import Shape, random_rows
from tests.trainer.gang.ranks import join_ranks
from troupe.job import JobSpec


class Shortage(TorchDispatchMode):
    """Raises torch's error once, at operation `at` of those since it was entered."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.at:
            raise torch.OutOfMemoryError(f"CUDA out of memory at {func}")
        return func(*args, **(kwargs or {}))


def step(
    spec: JobSpec, group: GangGroup, budget: int, at: int
) -> tuple[list[torch.Tensor], dict[str, float], int]:
    """Return weights, metrics, and the number of operations of the passes."""
    learner = RankLearner(spec, "solver", group, torch.device("cpu"), forward_tokens=budget)
    if learner.needs_reference:
        learner.set_reference(learner.weights())
    divided = spec.policies["solver"].trainer.context_parallel > 1
    shape = LONG if divided else SHORT
    rows = random_rows(load_model("solver", spec.policies["solver"], spec.seed), 1, shape)
    # Probes and lazy initialization come before the counted operations.
    learner.accumulate(rows[:2])
    learner.discard()
    mode, run = Shortage(at), GangBatches.run

    def running(self: GangBatches, compute: Any, smallest: Any) -> Any:
        def inside() -> Any:
            with mode:
                return compute()

        return run(self, inside, smallest)

    GangBatches.run = running  # type: ignore[method-assign]
    try:
        learner.accumulate(rows)
    finally:
        GangBatches.run = run  # type: ignore[method-assign]
    applied = learner.apply(0)
    assert applied.applied, applied.reason
    return [t.to_local().clone() for t in learner.weights().values()], applied.metrics, mode.seen


SHORT = Shape(groups=4, members=4, prompt=12, response=10)
# A part of a pass below 256 tokens is not made smaller (pass_budget.py).
LONG = Shape(groups=8, members=4, prompt=12, response=200)


def main() -> None:
    """Try all places, one after another."""
    spec = JobSpec.model_validate_json(Path(sys.argv[1]).read_text())
    budget, places = (int(one) for one in sys.argv[2:])
    mesh, control = join_ranks()
    size = dist.get_world_size()
    group = GangGroup(mesh, control, lambda: False, Path())
    rank = dist.get_rank()
    *_, count = step(spec, group, budget, 0)
    (count,) = group.summed(torch.tensor([count if rank == size - 1 else 0])).tolist()
    expected: dict[int, tuple[list[torch.Tensor], dict[str, float]]] = {}
    for place in range(places):
        at = 1 + place * count // places
        found, metrics, _ = step(spec, group, budget, at if rank == size - 1 else 0)
        smaller = int(metrics["train/forward_tokens"])
        if smaller not in expected:
            expected[smaller] = step(spec, group, smaller, 0)[:2]
        weights, counted = expected[smaller]
        same = all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
        same &= all(metrics[n] == v for n, v in counted.items() if n != "train/seconds")
        (different,) = group.summed(torch.tensor([int(not same)])).tolist()
        if rank == 0:
            times = metrics["train/out_of_memory"]
            print(json.dumps({"at": at, "of": count, "same": not different, "times": times}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
