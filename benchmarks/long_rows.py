"""Conversations longer than a forward pass: tokens computed over unique ones, and seconds.

A conversation of 2, 10 or 40 turns is one row per turn, each of which repeats the earlier turns; a
pass holds four turns, like 16,384 tokens with turns of 4,096. Three ways to compute the gradient of
all rows: `pieces` (a prefix tree larger than a pass is cut, services/trainer/learning/sequences),
`trees` (prefix trees as far as they fit a pass), `rows` (each row alone). Plans assume turns of
4,096 tokens and Qwen3-4B's costs; gradients are computed with a small model and turns of 32 tokens,
and compared.

- `computed_over_unique`: tokens differentiated, over the tokens of the conversation, with `pieces`;
- `work_over_unique`: the same including the additional forward passes of pieces: (3 differentiated
  + 1 only run forward) / (3 unique), since a backward pass has the FLOPs of two forward passes;
- `before`: `computed_over_unique` of `trees`;
- `largest_pass`: tokens of the largest pass over a pass's budget, by way, for 40 turns;
- `seconds`: processor time of the small model's gradient, by way, for 10 and 40 turns;
- `again`: processor time of ten turns of 256 tokens in pieces, the part of it that only runs
  forward, and the time of one pass over the uncut tree, for which no device has the memory at real
  sizes;
- `gradient_error`: largest relative difference of `pieces` from `rows` (L2 norm over parameters).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import finish, options_of, run_program
from services.trainer.learning.forward import Forward, costs_of
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.packing import PackedBatch, PassCosts, plan

TURNS = (2, 10, 40)
# Turns per pass.
HELD = 4
# Tokens of a turn in plans, and in computed gradients.
REAL, SMALL = 4096, 32
# Tokens of a turn in the comparison with the uncut tree: with few tokens the fixed costs of a pass
# dominate.
COMPARED = 256
VOCABULARY = 512
# FLOPs of Qwen3-4B: per token, and per pair of tokens in attention (see `costs_of`).
COSTS = PassCosts(token=2 * 3.6e9, pair=3 * 4.0 * 32 * 128 * 36)
Layout = dict[str, Any]


def conversation(turns: int, size: int) -> list[Row]:
    """Return a row per turn of `size` tokens, half of which are the reply's."""
    rng = np.random.default_rng(0)
    ids = rng.integers(VOCABULARY, size=turns * size)
    rows = []
    for turn in range(1, turns + 1):
        reply = size // 2
        behaviour = np.zeros(reply, np.float32)
        own = ids[: turn * size]
        rows.append(Row(str(turn), own, len(own) - reply, behaviour, 0.0, (0.0,), 0))
    return rows


def ways(size: int, costs: PassCosts) -> dict[str, Layout]:
    """Return the arguments of `plan` by way, for turns of `size` tokens."""
    budget = HELD * size
    return {
        "pieces": {"budget": budget, "cut": budget, "sharing": costs},
        "trees": {"budget": budget, "sharing": costs},
        "rows": {"budget": budget},
    }


def tokens_of(batches: Sequence[PackedBatch]) -> tuple[int, int]:
    """Return the tokens that are differentiated, and the tokens that only run forward."""
    sizes = [(batch.input_ids.numel(), batch.keeps) for batch in batches]
    return sum(n for n, keeps in sizes if not keeps), sum(n for n, keeps in sizes if keeps)


def small_model() -> Any:
    """Return a model with random weights."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1 << 15,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def gradient(
    forward: Forward, rows: list[Row], layout: Layout
) -> tuple[torch.Tensor, float, float]:
    """Return the gradient of the summed log-probs of all replies, flat, its processor time, and the
    part of this time in passes that only run forward."""
    forward.model.zero_grad()
    kept, started = 0.0, time.process_time()
    for batch in plan(rows, **layout):
        if batch.keeps:
            before = time.process_time()
            forward.keep(batch)
            kept += time.process_time() - before
            continue
        heat = torch.ones(len(batch.targets), 1)
        loss, _ = forward.loss(batch, heat, lambda logprobs, *_: logprobs.sum())
        torch.autograd.backward(loss)
        batch.forget()
    seconds = time.process_time() - started
    grads = [p.grad.flatten() for p in forward.model.parameters() if p.grad is not None]
    return torch.cat(grads), seconds, kept


def computed_again(forward: Forward, costs: PassCosts) -> dict[str, float]:
    """Return the seconds of ten turns of `COMPARED` tokens, in pieces and uncut (`again`)."""
    rows, pieces = conversation(10, COMPARED), ways(COMPARED, costs)["pieces"]
    uncut: Layout = {"budget": 10 * COMPARED, "sharing": costs}
    seconds, kept = min(gradient(forward, rows, pieces)[1:] for _ in range(3))
    whole = min(gradient(forward, rows, uncut)[1] for _ in range(3))
    return {"pieces": round(seconds, 3), "forward": round(kept, 3), "uncut": round(whole, 3)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plans' tokens, then the costs of gradients and their differences."""
    options = options_of(__doc__, arguments)
    turns = TURNS[:2] if options.quick else TURNS
    found: dict[str, dict[str, float]] = {
        name: {} for name in ("computed_over_unique", "work_over_unique", "before")
    }
    largest: dict[str, float] = {}
    for count in turns:
        rows = conversation(count, REAL)
        unique = len(rows[-1].ids) - 1
        for way, layout in ways(REAL, COSTS).items():
            batches = plan(rows, **layout)
            learnt, kept = tokens_of(batches)
            work = (3 * learnt + kept) / (3 * unique)
            largest[way] = max(b.input_ids.numel() for b in batches) / (HELD * REAL)
            if way == "pieces":
                found["computed_over_unique"][str(count)] = round(learnt / unique, 3)
                found["work_over_unique"][str(count)] = round(work, 3)
            elif way == "trees":
                found["before"][str(count)] = round(learnt / unique, 3)
            if not options.json:
                print(
                    f"{count:3} turns of {REAL}, {way:>6}: {learnt / unique:6.2f} x the unique "
                    f"tokens differentiated, {kept / unique:4.2f} x only run forward, work "
                    f"{work:6.2f}, largest pass {largest[way]:5.2f} x the budget"
                )
    forward = Forward(small_model())
    costs = costs_of(forward.model)
    seconds: dict[str, dict[str, float]] = {}
    error = 0.0
    for count in turns[1:]:
        rows = conversation(count, SMALL)
        grads = {}
        for way, layout in ways(SMALL, costs).items():
            gradient(forward, rows[:2], layout)  # warm-up
            grads[way], took, _ = gradient(forward, rows, layout)
            seconds.setdefault(str(count), {})[way] = round(took, 2)
        apart = (grads["pieces"] - grads["rows"]).norm() / grads["rows"].norm()
        error = max(error, float(apart))
        if not options.json:
            print(f"{count:3} turns of {SMALL}: seconds {seconds[str(count)]}, error {apart:.1e}")
    again = computed_again(forward, costs)
    if not options.json:
        print(f" 10 turns of {COMPARED}: seconds {again}")
    result = {**found, "largest_pass": largest, "seconds": seconds, "again": again}
    result["gradient_error"] = error
    finish(result, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
