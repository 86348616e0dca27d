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

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, run_program, scratch
from benchmarks.experience_store.servers import Stub, started
from benchmarks.workloads.tokenizer import save_tokenizer
from services.chassis.app import serve
from services.trainer.server import TrainerService
from services.trainer.settings import TrainerSettings
from troupe import tensors
from troupe.job import JobSpec
from troupe.rpc import connect, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2 as trainer_pb
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
_STEP_SECONDS: Final = 600.0


@dataclass
class Job:
    """One measured job."""

    way: str
    spec: JobSpec
    name: str = field(default_factory=lambda: new_id("job"))
    weights: common_pb.WeightsRef = field(default_factory=common_pb.WeightsRef)
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
    jobs = {
        way: Job(way, _spec(source, state)) for way, state in WAYS.items() if way in options.way
    }
    async with (
        serve(TrainerService, settings) as server,
        connect(server.address) as channel,
        connect(store) as to_store,
    ):
        trainer = trainer_grpc.TrainerStub(channel)
        for _ in range(options.rounds):
            for job in jobs.values():
                await _block(job, trainer, Stub(to_store), options)
                release = trainer_pb.ReleaseRequest(
                    request_id=new_id(), job_id=job.name, policy="solver"
                )
                await trainer.Release(release, timeout=_STEP_SECONDS)
        for job in jobs.values():
            shutil.rmtree(disk / "runs" / job.name, ignore_errors=True)
    return jobs


def _spec(source: dict[str, Any], state: dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "state",
            "workflow": "nowhere:play",
            "tasks": {"source": "nowhere:tasks"},
            "agents": {"solver": {"policy": "solver"}},
            "policies": {"solver": {"model": source, "optimizer": {"lr": 1e-6}}},
            "pipeline": {"steps": 10_000, "queries_per_step": 2, "micro_batch_samples": 4},
            "state": state,
        }
    )


async def _block(job: Job, trainer: Any, store: Stub, options: argparse.Namespace) -> None:
    bind = trainer_pb.BindRequest(
        request_id=new_id(),
        job_id=job.name,
        policy="solver",
        spec_json=job.spec.model_dump_json(),
        version=job.weights.version,
        checksum=job.weights.checksum,
    )
    job.weights = (await trainer.Bind(bind, timeout=_STEP_SECONDS)).weights
    first = job.weights.version
    await store.CreateTables(
        store_pb.CreateTablesRequest(request_id=new_id(), job_id=job.name, policies=["solver"])
    )
    await store.OpenVersion(
        store_pb.OpenVersionRequest(request_id=new_id(), job_id=job.name, weights=job.weights)
    )
    await _play(job, store, first, options.tokens)
    for step in range(first, first + options.steps + 1):
        await _play(job, store, step + 1, options.tokens)
        request = trainer_pb.RunStepRequest(
            request_id=new_id(), job_id=job.name, policy="solver", step=step, version=step
        )
        began = time.perf_counter()
        events = [event async for event in trainer.RunStep(request, timeout=_STEP_SECONDS)]
        seconds = time.perf_counter() - began
        commit = events[-1].commit
        if commit.outcome != store_pb.STEP_OUTCOME_APPLIED:
            raise RuntimeError(f"the step was not applied: {commit.reason}")
        job.weights = commit.weights
        if step > first:
            job.seconds.append(seconds)
            for name, value in commit.metrics.items():
                if name.startswith("train/state_"):
                    job.metrics.setdefault(name, []).append(value)


async def _play(job: Job, store: Stub, step: int, tokens: int) -> None:
    """Store the rows of a step: two groups of four, with a quarter of each row as prompt."""
    rng = np.random.default_rng(step)
    length = tokens // 8
    queries = ["q0", "q1"]
    await store.OpenStep(
        store_pb.OpenStepRequest(
            request_id=new_id(),
            job_id=job.name,
            step=step,
            versions={"solver": step},
            query_ids=queries,
            group_size=4,
        )
    )
    for query in queries:
        prompt = rng.integers(3, 100, length // 4).astype(np.int32)
        for number in range(4):
            trajectory = f"{query}-s{step}-t{number}"
            response = rng.integers(3, 100, length - len(prompt)).astype(np.int32)
            sample = store_pb.Sample(
                sample_id=f"{query}_0_{trajectory}",
                policy="solver",
                query_id=query,
                trajectory_id=trajectory,
                agent="solver",
                group_id="solver",
                prompt_ids=tensors.to_proto(prompt),
                response_ids=tensors.to_proto(response),
                logprobs=tensors.to_proto(np.full(len(response), -5, np.float32)),
                versions=[common_pb.VersionSpan(version=step, start=0, end=len(response))],
                reward=float(number % 2),
                finish_reason="stop",
            )
            await store.AppendTrajectory(
                store_pb.AppendTrajectoryRequest(
                    request_id=new_id(),
                    job_id=job.name,
                    step=step,
                    query_id=query,
                    trajectory_id=trajectory,
                    state=common_pb.TRAJECTORY_STATE_COMPLETED,
                    samples=[sample],
                )
            )


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
