"""`troupe jobs ...`: look at jobs and steer them."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.audit import audit
from troupe.client.cli.connection import call
from troupe.client.cli.failures import FAILED
from troupe.client.cli.follow import follow, make_display
from troupe.client.cli.formats import duration, score
from troupe.client.cli.progress import Progress
from troupe.client.cli.summary import print_summary
from troupe.client.records import Job, JobState
from troupe.rpc.errors import TroupeError

app = typer.Typer(help="Look at jobs and steer them.", no_args_is_help=True)
app.command("audit")(audit)
# Jobs that a list shows unless it is asked for more.
_LISTED = 50
JobId = Annotated[str, typer.Argument(metavar="JOB", show_default=False, help="Id of the job.")]


@app.command("list")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="At most so many; the newest.", metavar="N")
    ] = _LISTED,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """List the newest jobs of the cluster, the newest last."""

    async def ask(client: AsyncClient) -> list[Job]:
        return await client.jobs(state, limit + 1)

    jobs = call(ask, address=cluster, data_dir=data_dir)
    more, jobs = len(jobs) > limit, jobs[-limit:]
    if as_json:
        print(json.dumps([plain(job) for job in jobs], indent=2))
        return
    console = Console()
    if not jobs:
        console.print("no jobs")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("job", "state", "mode", "step", "reward", "age"):
        table.add_column(column, justify="right" if column in ("step", "reward", "age") else "left")
    for job in jobs:
        age = (datetime.now(UTC) - job.created_at).total_seconds() if job.created_at else None
        table.add_row(
            escape(job.id),
            str(job.state),
            job.mode,
            f"{job.step}/{job.total_steps}",
            score(job.metrics.get("reward/mean")),
            duration(age),
        )
    console.print(table)
    if more:
        console.print(f"these are the newest {limit}; --limit shows more", highlight=False)


@app.command()
def show(
    job_id: JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Show a job: where it is, its scores, and where its files are."""

    async def ask(client: AsyncClient) -> tuple[Job, Any]:
        handle = client.job(job_id)
        return await handle.info(), await handle.checkpoints()

    job, checkpoints = call(ask, address=cluster, data_dir=data_dir)
    if as_json:
        print(json.dumps(plain(job), indent=2))
        return
    console = Console()
    print_summary(console, job, checkpoints)
    if job.activity:
        console.print(f"{'now':<12} {escape(job.activity)}", highlight=False)
    for policy, version in sorted(job.versions.items()):
        console.print(f"{'policy':<12} {escape(policy)} version {version}", highlight=False)
    if job.problem is not None and job.state != JobState.SUCCEEDED:  # the summary has it
        console.print(f"{'problem':<12} {escape(str(job.problem))}", highlight=False)


@app.command()
def watch(
    job_id: JobId,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Follow a job until it ends; Ctrl-C leaves it running."""
    console = Console()

    async def ask(client: AsyncClient) -> Job:
        handle = client.job(job_id)
        progress = Progress(await handle.info())
        with make_display(console) as display:
            await follow(handle, progress, display)
        job = await handle.info()
        print_summary(console, job, await handle.checkpoints(), progress)
        return job

    job = call(ask, address=cluster, data_dir=data_dir)
    raise typer.Exit(0 if job.state == JobState.SUCCEEDED else FAILED)


@app.command()
def pause(
    job_id: JobId, cluster: options.ClusterAddress = None, data_dir: options.DataDir = None
) -> None:
    """Let the step in flight finish, then give the workers back."""

    async def ask(client: AsyncClient) -> Job:
        return await client.job(job_id).pause()

    _tell(call(ask, address=cluster, data_dir=data_dir))


@app.command()
def resume(
    job_id: JobId,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="Go on under this job file: the same job with more steps, other limits, ...",
            show_default=False,
        ),
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Go on with a paused, failed or cancelled job from its last committed step."""

    async def ask(client: AsyncClient) -> Job:
        return await client.job(job_id).resume(spec)

    _tell(call(ask, address=cluster, data_dir=data_dir))


@app.command()
def cancel(
    job_id: JobId,
    reason: Annotated[str, typer.Option(help="Kept with the job.")] = "",
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """End a job now. What it committed stays, and it can be resumed."""

    async def ask(client: AsyncClient) -> Job:
        return await client.job(job_id).cancel(reason)

    _tell(call(ask, address=cluster, data_dir=data_dir))


@app.command()
def forget(
    job_id: JobId, cluster: options.ClusterAddress = None, data_dir: options.DataDir = None
) -> None:
    """Delete what the cluster's memory holds of an ended job: its record, log, metrics,
    trajectories, rows and weights. What is in its directory stays, as checkpoints do."""

    async def ask(client: AsyncClient) -> Job:
        return await client.job(job_id).forget()

    job = call(ask, address=cluster, data_dir=data_dir)
    Console().print(f"{job.id} is forgotten; its files stay in {job.directory}", highlight=False)


def plain(job: Job) -> dict[str, Any]:
    """A job as JSON values."""

    def value(item: Any) -> Any:
        if isinstance(item, datetime):
            return item.isoformat()
        if isinstance(item, TroupeError):
            return {"kind": item.kind, "message": str(item)}
        return item

    fields = {f.name: value(getattr(job, f.name)) for f in dataclasses.fields(job)}
    del fields["spec_json"]
    return {**fields, "spec": job.spec}


def _tell(job: Job) -> None:
    Console().print(f"{job.id} is {job.state}", highlight=False)
