"""Troupe's side: `python -m benchmarks.trainer.ours SIZE CASE --steps N --threads T [...]`.

The learner as called by a trainer worker: rows, micro-batch by micro-batch, one step.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from benchmarks.trainer.cases import Case, cases_of, load
from benchmarks.trainer.measure import Meter, clock_of, resident
from benchmarks.workloads.one_policy import job_of_one
from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row
from troupe.job import JobSpec


def spec_of(
    case: Case, *, checkpointing: bool = False, compiled: str = "off", forward_tokens: int = 0
) -> JobSpec:
    """Return a job whose step is one batch of `case`, with TRL's settings. `forward_tokens`: tokens
    of a pass; 0: the default."""
    trainer: dict[str, Any] = {"activation_checkpointing": checkpointing, "compile": compiled}
    if forward_tokens:
        trainer["forward_tokens"] = forward_tokens
    return job_of_one(
        "update",
        {
            "model": {"config": case.model.config, "tokenizer": "nowhere"},
            "optimizer": {"lr": 1e-6, "betas": [0.9, 0.999]},
            "trainer": trainer,
        },
        # Advantages are the rewards.
        algorithm={"advantage": "rae", "normalize": "token"},
        pipeline={"steps": 1000, "queries_per_step": case.groups},
    )


@torch.no_grad()
def rows_of(case: Case, model: Any) -> list[Row]:
    """Return the samples, scored by the model before its training."""
    found = []
    for number, ((ids, length, group), advantage) in enumerate(
        zip(case.rows(), case.advantages(), strict=True)
    ):
        inputs = torch.from_numpy(ids)[None]
        logits = model(inputs, logits_to_keep=len(ids) - length + 1).logits[0, :-1].float()
        scores = torch.log_softmax(logits, -1).gather(1, inputs[0, length:, None])[:, 0]
        row = Row(
            sample_id=f"q{group}_0_t{number}",
            ids=ids,
            prompt_length=length,
            behaviour=scores.numpy().astype(np.float32),
            reward=advantage,
            group_rewards=(advantage,),
            version=0,
            group=f"q{group}",
            trajectory=f"t{number}",
            agent="solver",
        )
        found.append(row)
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", help="full, quick, or the directory of a checkpoint")
    parser.add_argument("case")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--apart", action="store_true", help="compute a group's prompt each time")
    parser.add_argument("--compile", choices=["on", "off"], default="off")
    parser.add_argument("--forward-tokens", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = cases_of(options.size)[options.case]
    spec = spec_of(
        case,
        checkpointing=options.checkpointing,
        compiled=options.compile,
        forward_tokens=options.forward_tokens,
    )
    before = resident()
    model = load(case).eval()
    rows = rows_of(case, model)
    learner = Learner(model, spec, "solver", share_prefixes=not options.apart)
    meter = Meter(before, clock_of(options.threads))
    size = spec.pipeline.micro_batch_samples
    norms = []
    for step in range(options.steps + 1):
        meter.begin()
        for start in range(0, len(rows), size):
            learner.accumulate(rows[start : start + size])
        applied = learner.apply(step)
        meter.end()
        if not applied.applied:
            raise SystemExit(f"the step was not applied: {applied.reason}")
        norms.append(applied.metrics["grad_norm"])
    meter.report(grad_norm=norms[0])


if __name__ == "__main__":
    main()
