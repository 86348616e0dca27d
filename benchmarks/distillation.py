"""How many samples does a student need from its teacher, and how many from rewards alone?

    python -m benchmarks.distillation [--quick] [--json] [--weak]

A teacher and a student of 0.38 million parameters answer the example team's questions
(examples/reasoning_team) in one turn. The teacher was trained on many answers, the student on few.
Then jobs with the same student, questions and batches train it: with rewards (GRPO), with the
teacher's whole distribution (`distillation.divergence: full`) and with its log-probs of the sampled
tokens (`sampled`). The comparison is the number of samples at which held-out success first reaches
the teacher's, less two standard errors of an evaluation, or the final success of rewards alone, if
that is lower; all at the agents' temperature. Each curve has the better of two learning rates.
`--weak`: a teacher that is hardly better than the result of rewards alone.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, run_program, scratch
from benchmarks.end_to_end.troupe_side import cluster
from troupe.client import AsyncClient, MetricsLogged
from troupe.demo.models import AnswerToLearn, make_model, make_tokenizer, train_step
from troupe.demo.tasks import TeamTasks, score
from troupe.demo.workflow import propose
from troupe.job import JobSpec
from troupe.workflow import Agents, Query, Tools

TEMPERATURE: Final = 0.8
WAYS: Final[dict[str, dict[str, Any]]] = {
    "rewards (GRPO)": {},
    "teacher, full": {"divergence": "full"},
    "teacher, sampled": {"divergence": "sampled"},
}


@dataclass(frozen=True)
class Work:
    """Sizes: supervised steps of 48 answers, RL steps of `queries` x `group` samples, and the
    queries of an evaluation, one every `every` steps."""

    teacher_steps: int = 900
    student_steps: int = 120
    steps: int = 80
    queries: int = 32
    group: int = 8
    every: int = 4
    held_out: int = 400
    rates: tuple[float, ...] = (6e-4, 2e-3)


# The first of both rates is the better one for all curves, as measured with the other teacher.
WEAK: Final = Work(teacher_steps=135, steps=96, rates=(6e-4,))
QUICK: Final = Work(60, 20, 2, 4, 2, 1, 20, (6e-4,))


async def solve(query: Query, agents: Agents, tools: Tools) -> dict[str, float]:
    """Run the workflow: one answer, right or wrong."""
    reply = await agents["student"].chat(propose(query["question"]))
    right = score(query["answer"], [reply.text])[0]
    return {"student": right, "team": right}


def make_policy(directory: Path, steps: int, seed: int) -> Path:
    """Make a model with `steps` supervised steps, as a checkpoint."""
    tokenizer = make_tokenizer()
    model = make_model("solver", tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    tasks, draw = TeamTasks("train", seed + 1_000_000), random.Random(seed)
    for step in range(steps):
        queries = [tasks[draw.randrange(1 << 20)] for _ in range(48)]
        rows = [AnswerToLearn(propose(one["question"]), one["answer"].lower()) for one in queries]
        warm = min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * warm
        train_step(model, optimizer, tokenizer, rows)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def job(student: Path, teacher: Path, work: Work, rate: float, way: dict[str, Any]) -> JobSpec:
    """Return the student's job."""
    engine = {"kind": "embedded", "max_running": 256, "max_context": 128}
    policies: dict[str, Any] = {
        "student": {
            "model": {"path": str(student)},
            "optimizer": {"lr": rate, "warmup_steps": 2},
            "engine": engine,
        }
    }
    algorithm: dict[str, Any] = {}
    if way:
        # Both use the tokenizer in the student's directory.
        model = {"path": str(teacher), "tokenizer": str(student)}
        policies["teacher"] = {"model": model, "trainable": False, "engine": engine}
        algorithm = {"distillation": {"teachers": {"student": "teacher"}, **way}}
    return JobSpec.model_validate(
        {
            "name": "distillation",
            "workflow": "benchmarks.distillation:solve",
            "tasks": {"source": "troupe.demo.tasks:TeamTasks"},
            "agents": {
                "student": {
                    "policy": "student",
                    "sampling": {"temperature": TEMPERATURE, "max_new_tokens": 16},
                }
            },
            "policies": policies,
            "algorithm": algorithm,
            "pipeline": {
                "mode": "sync",
                "steps": work.steps,
                "queries_per_step": work.queries,
                "group_size": work.group,
                "micro_batch_samples": 128,
            },
            "evaluation": {"queries": work.held_out, "every": work.every},
        }
    )


async def curve(client: AsyncClient, spec: JobSpec, work: Work) -> list[tuple[int, float]]:
    """Return (samples, held-out success) at each evaluation."""
    handle = await client.submit(spec)
    found: dict[int, float] = {}
    async for event in handle.watch():
        if isinstance(event, MetricsLogged) and "evaluation/team/mean" in event.values:
            found[event.step * work.queries * work.group] = event.values["evaluation/team/mean"]
    await handle.result(timeout=60)
    return sorted(found.items())


def first_at(points: Sequence[tuple[int, float]], level: float) -> int | None:
    """Return the samples at which the curve first reaches `level`; None: it does not."""
    return next((samples for samples, success in points if success >= level), None)


async def measure(directory: Path, work: Work, console: Console) -> dict[str, Any]:
    """Measure all curves, and print the table."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    teacher = make_policy(directory / "teacher", work.teacher_steps, 1)
    student = make_policy(directory / "student", work.student_steps, 0)
    curves: dict[str, dict[float, list[tuple[int, float]]]] = {}
    async with cluster(directory / "cluster") as client:
        one = Work(**{**vars(work), "steps": 1})
        # Its success before the only step.
        (_, goal), *_ = await curve(client, job(teacher, teacher, one, 1e-9, {}), one)
        for name, way in WAYS.items():
            curves[name] = {}
            for rate in work.rates:
                spec = job(student, teacher, work, rate, way)
                curves[name][rate] = points = await curve(client, spec, work)
                console.print(f"{name}, lr {rate:g}: " + " ".join(f"{y:.2f}" for _, y in points))
    level = goal - 2 * math.sqrt(max(goal * (1 - goal), 1e-4) / work.held_out)
    level = min(level, max(points[-1][1] for points in curves[next(iter(WAYS))].values()))
    table = Table(title=f"Teacher {goal:.3f} held out; samples until a student reaches {level:.3f}")
    for column in ("learns from", "lr", "before", "after", "samples", "of RL's"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {"teacher": goal, "level": level, "ways": {}}
    most = work.steps * work.queries * work.group
    needed: dict[str, int | None] = {}
    for name, by_rate in curves.items():

        def order(rate: float, by_rate: dict[float, Any] = by_rate) -> tuple[float, float]:
            return (first_at(by_rate[rate], level) or math.inf, -by_rate[rate][-1][1])

        rate = min(by_rate, key=order)
        points = by_rate[rate]
        needed[name] = samples = first_at(points, level)
        rl = next(iter(needed.values())) or most
        table.add_row(
            name,
            f"{rate:g}",
            f"{points[0][1]:.3f}",
            f"{points[-1][1]:.3f}",
            f"> {most:,}" if samples is None else f"{samples:,}",
            "" if samples is None else f"{samples / rl:.2f}",
        )
        found["ways"][name] = {"lr": rate, "samples": samples, "curve": points}
    console.print(table)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it; the last line of stdout is the JSON object."""
    options = options_of(__doc__, arguments, flags={"weak": "a teacher that is hardly better"})
    console = Console(stderr=options.json)
    with scratch() as directory:
        work = QUICK if options.quick else WEAK if options.weak else Work()
        found = asyncio.run(measure(directory, work, console))
    finish(found, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
