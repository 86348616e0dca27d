"""How much of a device's arithmetic the trainer's update uses: `python -m benchmarks.gpu.update`.

The learner as a worker calls it, on a 0.5B-class Qwen3 in bfloat16 autocast (a tiny one in float32
on a CPU). Model FLOP/s utilization (Chowdhery et al. 2022, appendix B): 6 per weight and token, the
output layer for scored tokens only, causal attention for half of all pairs; by the rate of a large
matrix product in the same type, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import finish
from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row
from troupe.job import JobSpec

LARGE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **LARGE,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def make_rows(vocabulary: int, count: int, prompt: int, mean: int) -> list[Row]:
    """Samples with prompts of their own and answers of all lengths."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(min(max(rng.lognormal(np.log(mean) - 0.5, 1.0), 2), 8 * mean))
        ids = rng.integers(vocabulary, size=prompt + length)
        behaviour = np.full(length, -np.log(vocabulary), np.float32)
        reward = 1.0 if number % 2 else -1.0
        row = Row(f"q{number}_0_t", ids, prompt, behaviour, reward, (reward,), 0, agent="solver")
        rows.append(row)
    return rows


def make_learner(config: dict[str, Any], device: torch.device, compiled: bool) -> Learner:
    """With random weights, on `device`."""
    values = {
        "name": "update",
        "workflow": "nowhere:play",
        "tasks": {"source": "nowhere:tasks"},
        "agents": {"solver": {"policy": "solver"}},
        "policies": {
            "solver": {
                "model": {
                    "config": {"model_type": "qwen3", **config},
                    "tokenizer": "nowhere",
                    "dtype": "bfloat16" if device.type == "cuda" else "float32",
                },
                "optimizer": {"lr": 1e-6},
                "trainer": {"compile": "on" if compiled else "off"},
            }
        },
        "algorithm": {"advantage": "rae"},
        "pipeline": {"steps": 1000, "queries_per_step": 1},
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **config), dtype=torch.float32
    )
    return Learner(model.eval(), JobSpec.model_validate(values), "solver", device=device)


def flops(config: dict[str, Any], rows: list[Row]) -> float:
    """Of an update with `rows`: forward and backward passes, no recomputation."""
    d, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    width = int(config["num_attention_heads"] * config["head_dim"])
    keys = int(config["num_key_value_heads"] * config["head_dim"])
    layer = 2 * d * width + 2 * d * keys + 3 * d * int(config["intermediate_size"])
    fed = [len(row.ids) - 1 for row in rows]
    scored = sum(row.response_length for row in rows)
    body = 6.0 * layers * layer * sum(fed)
    head = 6.0 * d * int(config["vocab_size"]) * scored
    # Scores and values, 2 operations each, both thrice, for half of the pairs.
    attention = 3 * 2 * 2.0 * layers * width * sum(n * n for n in fed) / 2
    return body + head + attention


def seconds_of(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The least of `rounds` calls, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def product_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a square matrix product in the type that the update computes in."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = 20 if device.type == "cuda" else 3

    def multiply() -> None:
        for _ in range(times):
            torch.mm(a, b)

    return times * 2.0 * size**3 / seconds_of(multiply, device, 3)


def measure(device: torch.device, *, quick: bool, compiled: bool) -> dict[str, float]:
    """One update's tokens per second, its share of the peak, and its memory."""
    large = device.type == "cuda" and not quick
    config = LARGE if large else TINY
    rows = make_rows(config["vocab_size"], *((256, 256, 512) if large else (8, 8, 16)))
    learner = make_learner(config, device, compiled)
    steps = iter(range(1_000_000))

    def update() -> None:
        for start in range(0, len(rows), 64):
            learner.accumulate(rows[start : start + 64])
        applied = learner.apply(next(steps))
        if not applied.applied:
            raise SystemExit(f"the step was not applied: {applied.reason}")

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(update, device, 3)
    rate = product_rate(device, 8192 if large else 256)
    found = {
        "parameters": float(learner.num_parameters),
        "tokens_per_second": sum(len(row.ids) for row in rows) / seconds,
        "flops": flops(config, rows) / seconds,
        "mfu": flops(config, rows) / seconds / rate,
    }
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    finish(measure(device, quick=options.quick, compiled=options.compile), quiet=True)


if __name__ == "__main__":
    main()
