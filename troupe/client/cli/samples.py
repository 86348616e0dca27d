"""`troupe samples ...`: what the experience store holds of a job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.connection import call
from troupe.client.cli.formats import duration, score, size
from troupe.client.cli.sample_files import writer_for
from troupe.client.handle import AsyncJobHandle
from troupe.client.table_records import Sample, Tables

app = typer.Typer(help="Look at the rows that policies are trained on.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(metavar="JOB", show_default=False, help="Id of the job.")]
Policy = Annotated[str | None, typer.Option(help="Only this policy; default: every trained one.")]
Step = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Only this step, counted from 0.")
]
State = Annotated[
    str | None, typer.Option(help="Only pending, ready, claimed, trained or dropped ones.")
]


@app.command()
def counts(
    job_id: JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Count a job's samples by policy and state; how far each table lags, what waits longest."""

    async def ask(client: AsyncClient) -> Tables:
        return await client.job(job_id).tables()

    tables = call(ask, address=cluster, data_dir=data_dir)
    if as_json:
        print(json.dumps(dataclasses.asdict(tables), indent=2))
        return
    console = Console()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("pending", "ready", "claimed", "trained", "dropped")
    grid.add_column("policy")
    for column in ("version", *names, "payloads"):
        grid.add_column(column, justify="right")
    for one in tables.tables:
        grid.add_row(
            escape(one.policy),
            str(max(one.version, 0)),
            *(f"{getattr(one, name):,}" for name in names),
            size(one.payload_bytes),
        )
    console.print(grid)
    for one in tables.tables:
        steps = f"{one.lag} step{'' if one.lag == 1 else 's'}"
        waits = f"{escape(one.policy)} has {steps} to commit"
        if one.oldest_pending_sample:
            age = duration(one.oldest_pending_seconds)
            waits += f"; pending for longest, {age}: {escape(one.oldest_pending_sample)}"
        console.print(waits, highlight=False)
    for one in tables.tables:
        for reason, number in sorted(one.drop_reasons.items()):
            # Trajectories that ended before they had rows count as one each.
            what = f"{escape(one.policy)} dropped {number:,} rows or trajectories"
            console.print(f"{what}: {escape(reason)}", soft_wrap=True)
    bound = f" of {size(tables.high_water_bytes)}" if tables.high_water_bytes else ""
    full = "; above the mark, rollout is pushed back" if tables.over_high_water else ""
    console.print(
        f"store: {size(tables.payload_bytes)}{bound} of payloads, Redis {size(tables.redis_bytes)}"
        f"{full}",
        highlight=False,
    )


@app.command("list")
def list_samples(
    job_id: JobId,
    policy: Policy = None,
    step: Step = None,
    state: State = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """List rows, oldest step first."""

    async def ask(client: AsyncClient) -> list[Sample]:
        found: list[Sample] = []
        async for sample in _slice(client.job(job_id), policy, step, state):
            found.append(sample)
            if len(found) >= limit:
                break
        return found

    found = call(ask, address=cluster, data_dir=data_dir)
    if as_json:
        print(json.dumps([dataclasses.asdict(sample) for sample in found]))
        return
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("sample", "policy", "agent", "state", "reward", "version", "tokens"):
        grid.add_column(column)
    for one in found:
        there = one.prompt_ids is not None and one.response_ids is not None
        grid.add_row(
            escape(one.id),
            escape(one.policy),
            escape(one.agent),
            one.state,
            score(one.reward),
            "-" if one.version is None else str(one.version),
            f"{len(one.prompt_ids or [])}+{len(one.response_ids or [])}" if there else "freed",
        )
    Console().print(grid)


@app.command()
def export(
    job_id: JobId,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="New FILE.parquet or FILE.jsonl."),
    ],
    policy: Policy = None,
    step: Step = None,
    state: State = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Write rows to a Parquet or JSON Lines file.

    Rows of committed steps come without token ids and log-probs, which are freed by then.
    """
    writer = writer_for(file)

    async def ask(client: AsyncClient) -> int:
        number = 0
        with writer:
            async for sample in _slice(client.job(job_id), policy, step, state):
                writer.add(sample)
                number += 1
        return number

    number = call(ask, address=cluster, data_dir=data_dir)
    Console().print(f"wrote {number:,} samples to {file}", highlight=False, soft_wrap=True)


async def _slice(
    job: AsyncJobHandle, policy: str | None, step: int | None, state: str | None
) -> AsyncIterator[Sample]:
    policies = [policy] if policy else [one.policy for one in (await job.tables()).tables]
    for name in policies:
        async for sample in job.samples(name, step=step, state=state):
            yield sample
