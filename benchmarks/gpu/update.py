"""How much of a device's arithmetic the trainer's update uses: `python -m benchmarks.gpu.update`.

    python -m benchmarks.gpu.update [--model Qwen3-4B] [--compile] [--offload optimizer] [--plain]

The learner as a worker calls it, on a Qwen3 with random weights in bfloat16 autocast (a tiny one in
float32 on a CPU). Model FLOP/s utilization (Chowdhery et al. 2022, appendix B): 6 per weight and
token, the output layer for scored tokens only, causal attention for half of all pairs; by the rate
of a large matrix product in the same type, measured in the same run. Beside it the peak of the
device's memory and what the memory model of trainers (`troupe.scheduling.memory`) says of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import finish, run_program
from benchmarks.workloads.one_policy import job_of_one
from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row
from troupe.job import JobSpec
from troupe.job.sizing import setup_of, shape_of_config
from troupe.scheduling.memory import RankMemory, rank_memory
from troupe.twin.costs import model_config

DEFAULT: Final = "Qwen3-0.6B"
TINY: Final[dict[str, Any]] = {
    **model_config(DEFAULT),
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Tokens of an update, on the average: seconds of work for one GPU of today.
_TOKENS: Final = {"Qwen3-0.6B": 192_000, "Qwen3-4B": 48_000}
_MICRO_BATCH: Final = 64


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


def make_job(
    config: dict[str, Any], device: torch.device, *, compiled: bool = False, offload: str = "none"
) -> JobSpec:
    """A job of one policy of this architecture."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    policy = {
        "model": {"config": config, "tokenizer": "nowhere", "dtype": dtype},
        "optimizer": {"lr": 1e-6},
        "trainer": {"compile": "on" if compiled else "off", "offload": offload},
    }
    pipeline = {"steps": 1000, "queries_per_step": 1}
    return job_of_one("update", policy, algorithm={"advantage": "rae"}, pipeline=pipeline)


def make_learner(config: dict[str, Any], device: torch.device, job: JobSpec) -> Learner:
    """With random weights, on `device`."""
    torch.manual_seed(0)
    kind = str(config["model_type"])
    rest = {name: value for name, value in config.items() if name != "model_type"}
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **rest), dtype=torch.float32
        )
    return Learner(model.eval(), job, "solver", device=device)


def predicted(config: dict[str, Any], device: torch.device, job: JobSpec) -> RankMemory:
    """Bytes of the device by the memory model."""
    shape = shape_of_config(config)
    assert shape is not None  # an architecture that the reader knows
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    setup = setup_of(job, "solver", shape, device=device.type, memory=memory)
    return rank_memory(shape, setup)


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


def profile(call: Callable[[], Any]) -> None:
    """Print the kernels that a call spends most of its time in, to standard error."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
    table = found.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70
    )
    print(table, file=sys.stderr)


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """One update's tokens per second, its share of the peak, and its memory."""
    cuda = device.type == "cuda"
    large = cuda and not options.quick
    config = model_config(options.model) if large else TINY
    if options.plain:  # what `services.trainer.learning.kernels.gpu` looks for
        sys.modules["liger_kernel"] = None  # type: ignore[assignment]
    prompt, answer = (256, 512) if large else (8, 16)
    count = max(_MICRO_BATCH, _TOKENS[options.model] // (prompt + answer)) if large else 8
    rows = make_rows(config["vocab_size"], count, prompt, answer)
    job = make_job(config, device, compiled=options.compile, offload=options.offload)
    learner = make_learner(config, device, job)
    steps = iter(range(1_000_000))

    def update() -> None:
        for start in range(0, len(rows), _MICRO_BATCH):
            learner.accumulate(rows[start : start + _MICRO_BATCH])
        applied = learner.apply(next(steps))
        if not applied.applied:
            raise SystemExit(f"the step was not applied: {applied.reason}")

    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    update()
    first = time.perf_counter() - began
    seconds = seconds_of(update, device, 3)
    found: dict[str, Any] = {
        "model": options.model if large else "tiny",
        "parameters": learner.num_parameters,
        "rows": len(rows),
        "first_seconds": first,
        "seconds": seconds,
        "tokens_per_second": sum(len(row.ids) for row in rows) / seconds,
        "flops": flops(config, rows) / seconds,
    }
    memory = predicted(config, device, job)
    found["predicted_gib"] = memory.total / 2**30
    if cuda:
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
            "used_gib": (total - free) / 2**30,
            "predicted_parts_gib": {k: round(v / 2**30, 2) for k, v in memory.parts.items()},
        }
    if options.profile:
        profile(lambda: learner.accumulate(rows[:_MICRO_BATCH]))
        learner.discard()
    if cuda:
        torch.cuda.empty_cache()
    rate = product_rate(device, 8192 if large else 256)
    return found | {"peak_flops": rate, "mfu": found["flops"] / rate}


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--model", choices=sorted(_TOKENS), default=DEFAULT)
    parser.add_argument("--compile", action="store_true", help="layers by torch.compile")
    parser.add_argument("--offload", choices=("none", "optimizer", "all"), default="none")
    parser.add_argument("--plain", action="store_true", help="without liger-kernel's kernels")
    parser.add_argument("--profile", action="store_true", help="a table of kernels, to stderr")
    options = parser.parse_args()
    finish(measure(torch.device(options.device), options), quiet=True)


if __name__ == "__main__":
    run_program(main)
