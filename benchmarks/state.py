"""The cost of durable training state per step: before each commit, every fifth step in the
background, or never.

    python -m benchmarks.state [--model PATH] [--quick] [--json] [--steps 10] [--threads 1]

A trainer worker with a real store and Redis trains a model of 135 M parameters (SmolLM2's shape
with random weights, or the checkpoint at `--model`), one job after another, which differ in `state`
only. A step is timed from the request to its answer: rows, gradients, update, publication, state,
commit. The next step's rows are already in the store, so that a state written in the background
competes with the next step for cores and disk. The three jobs alternate, a block of `--steps` steps
each, in `--rounds` rounds; the first step of a block is not counted. Weights, both moments and the
random generators take 1.6 GB in float32, on the disk of `--disk` or of the temporary directory.

`async_over_never`, `sync_over_never`: mean seconds of a step over the mean of a job that writes no
state.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program, scratch
from benchmarks.experience_store.servers import Stub, started
from benchmarks.workloads.fed_policy import FedPolicy, spec_of
from benchmarks.workloads.tokenizer import save_tokenizer
from services.chassis.app import serve
from services.trainer.server import TrainerService
from services.trainer.settings import TrainerSettings
from troupe.rpc import connect
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

# SmolLM2-135M.
SMOL: Final = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY: Final = {**SMOL, "num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 72}
# The `state` section of each job.
WAYS: Final[dict[str, dict[str, Any]]] = {
    "never": {"every": 64},
    "async": {"every": 5},
    "sync": {"every": 1, "background": False},
}


@dataclass
class Job:
    """One measured job."""

    policy: FedPolicy
    seconds: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table for people and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, not a measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--disk", type=Path, help="directory for states")
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of a block; a multiple of five"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: all")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.tokens = 5, 256
    options.way = [
        "never",
        *(way for way in WAYS if way != "never" and way in (options.way or WAYS)),
    ]
    console = Console(stderr=options.json, width=None if options.json else 110)
    with (
        scratch() as memory,
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        started(memory) as servers,
    ):
        jobs = asyncio.run(_measure(options, memory, Path(disk), servers.address))
    means = {way: statistics.fmean(job.seconds) for way, job in jobs.items()}
    console.print(_table(jobs, means))
    never = means["never"]
    found = {
        f"{way}_over_never": round(means[way] / never, 3) if way in means else None
        for way in ("async", "sync")
    }
    how = {"quick": options.quick, "threads": options.threads, "tokens": options.tokens}
    finish(found | how | {"step_seconds": round(never, 3)}, quiet=options.json)


async def _measure(
    options: argparse.Namespace, memory: Path, disk: Path, store: str
) -> dict[str, Job]:
    source: dict[str, Any]
    if options.model is not None:
        source = {"path": str(options.model)}
    else:
        save_tokenizer(disk / "tokenizer")
        source = {"config": TINY if options.quick else SMOL, "tokenizer": str(disk / "tokenizer")}
    settings = TrainerSettings(
        experience_store_address=store,
        orchestrator_address="127.0.0.1:1",
        data_dir=disk / "runs",
        transfer_dir=memory / "transfer",
        threads=options.threads,
        trainer_keep_states=1,
    )
    policy = {"model": source, "optimizer": {"lr": 1e-6}}
    async with (
        serve(TrainerService, settings) as server,
        connect(server.address) as channel,
        connect(store) as to_store_channel,
    ):
        trainer, to_store = trainer_grpc.TrainerStub(channel), Stub(to_store_channel)
        jobs = {
            way: Job(FedPolicy(spec_of("state", policy, state=state), trainer, to_store))
            for way, state in WAYS.items()
            if way in options.way
        }
        for _ in range(options.rounds):
            for job in jobs.values():
                await _block(job, options)
                await job.policy.release()
        for job in jobs.values():
            shutil.rmtree(disk / "runs" / job.policy.job_id, ignore_errors=True)
    return jobs


async def _block(job: Job, options: argparse.Namespace) -> None:
    policy = job.policy
    await policy.bind()
    first = policy.weights.version
    await policy.play(first, options.tokens)
    for step in range(first, first + options.steps + 1):
        await policy.play(step + 1, options.tokens)
        began = time.perf_counter()
        commit = await policy.train(step)
        seconds = time.perf_counter() - began
        if step > first:
            job.seconds.append(seconds)
            for name, value in commit.metrics.items():
                if name.startswith("train/state_"):
                    job.metrics.setdefault(name, []).append(value)


def _table(jobs: dict[str, Job], means: dict[str, float]) -> Table:
    table = Table(title="Durable training state")
    for name in ("state", "s per step", "median", "over never", "copy s", "write s"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for way, job in jobs.items():
        copied = job.metrics.get("train/state_copy_seconds", [])
        written = job.metrics.get("train/state_write_seconds", [])
        table.add_row(
            {"never": "never", "async": "every 5, behind", "sync": "every step, before"}[way],
            f"{means[way]:.2f}",
            f"{statistics.median(job.seconds):.2f}",
            f"{means[way] / means['never']:.3f}",
            f"{statistics.fmean(copied):.2f}" if copied else "-",
            f"{statistics.fmean(written):.2f}" if written else "-",
        )
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_program(main)
