"""`troupe jobs audit`: was every sample trained once, or dropped with a reason?"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.connection import call
from troupe.client.cli.failures import FAILED
from troupe.client.table_records import Audit

JobId = Annotated[str, typer.Argument(metavar="JOB", show_default=False, help="Id of the job.")]


def audit(
    job_id: JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Account for every sample of a job. Exit status 1 when something contradicts the promise."""

    async def ask(client: AsyncClient) -> Audit:
        return await client.job(job_id).audit()

    found = call(ask, address=cluster, data_dir=data_dir)
    if as_json:
        print(json.dumps(plain(found), indent=2))
    else:
        print_audit(Console(), found)
    raise typer.Exit(0 if found.passed else FAILED)


def plain(found: Audit) -> dict[str, Any]:
    """An audit as JSON values."""
    versions = [
        {**dataclasses.asdict(one), "published_at": one.published_at.isoformat()}
        for one in found.versions
    ]
    sums = {"passed": found.passed, "lost": found.lost, "duplicated": found.duplicated}
    return {**sums, **dataclasses.asdict(found), "versions": versions}


def print_audit(console: Console, found: Audit) -> None:
    """The ledger of samples, then the verdict."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("policy")
    for column in ("steps", "version", "appended", "trained", "dropped", "live", "lost", "twice"):
        grid.add_column(column, justify="right")
    for one in found.policies:
        steps = one.steps_applied + one.steps_skipped + one.steps_empty
        numbers = (steps, one.version, one.appended, one.trained, one.dropped, one.live)
        grid.add_row(
            escape(one.policy), *(f"{n:,}" for n in numbers), str(one.lost), str(one.duplicated)
        )
    console.print(grid)
    for one in found.policies:
        for reason, number in sorted(one.drop_reasons.items()):
            console.print(f"{escape(one.policy)} dropped {number:,}: {escape(reason)}")
    states = ", ".join(f"{n:,} {name}" for name, n in sorted(found.trajectories_by_state.items()))
    console.print(
        f"trajectories: {found.trajectories_admitted:,} admitted in {found.steps:,} steps, "
        f"{found.trajectories_ended:,} ended ({states})",
        highlight=False,
    )
    for version in found.versions:
        console.print(
            f"{escape(version.policy)} is at version {version.version}, checksum "
            f"{version.checksum}",
            highlight=False,
        )
    for violation in found.violations:
        console.print(f"[red]violation:[/] {escape(violation)}", highlight=False)
    verdict = "[green]passed[/]" if found.passed else "[red]failed[/]"
    console.print(f"audit {verdict}: {found.lost} lost, {found.duplicated} duplicated")
