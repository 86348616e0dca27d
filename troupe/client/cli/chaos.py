"""`troupe chaos`: run a job undisturbed and with injected faults, and compare the results."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from troupe.client.cli import options
from troupe.client.cli.failures import FAILED, Interrupted, Interrupts
from troupe.client.cli.options import duration, make_table
from troupe.client.cli.specification import load_with
from troupe.client.discovery import data_directory
from troupe.rpc.errors import FailedPrecondition
from troupe.workflow.loading import add_working_directory

if TYPE_CHECKING:
    from testbed.chaos import ChaosPlan, ChaosReport
    from testbed.chaos.report import JobOutcome


@options.with_cluster_options("rollouts", "trainers", "threads", "panel", "start_timeout")
def chaos(
    settings: options.MakeSettings,
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", show_default=False)],
    kills: Annotated[int, typer.Option(min=0, help="Processes to kill.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the faults and their order.")] = 0,
    faults: Annotated[
        str,
        typer.Option(
            help="Kinds: kill, stall, freeze, slow_disk, partition, delay, duplicate, full_queue."
        ),
    ] = "all",
    power_off: Annotated[
        int, typer.Option(min=0, metavar="K", help="Also kill everything at once K times.")
    ] = 0,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also run the job undisturbed.")
    ] = True,
    max_minutes: Annotated[
        float, typer.Option(min=0.1, help="Time after which to stop cleanly.")
    ] = 30.0,
    assignments: options.Assignments = None,
    data_dir: options.DataDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON in the last line.")
    ] = False,
) -> None:
    """Run a job twice, undisturbed and while processes are killed, and compare the results.

    Exit status 1 when a sample was lost or trained twice, or when the weights differ.
    """
    add_working_directory()
    try:
        from testbed.chaos import ChaosPlan, parse_kinds
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the package {error.name} is missing: the chaos harness is part of Troupe's "
            "repository, but not of the package that pip installs",
            kind="package_missing",
            remedy="Run it in a checkout of the repository, at its root.",
        ) from error

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    plan = ChaosPlan(
        spec=load_with(job, assignments or []),
        settings=settings(data_dir=data_dir),
        directory=data_dir or data_directory(None) / f"chaos-{stamp}",
        kills=kills,
        seed=seed,
        kinds=parse_kinds(faults),
        power_offs=power_off,
        baseline=baseline,
        max_seconds=max_minutes * 60,
    )
    raise typer.Exit(asyncio.run(_run(plan, Console(), as_json=as_json)))


async def _run(plan: ChaosPlan, console: Console, *, as_json: bool) -> int:
    from testbed.chaos import run

    with Interrupts() as interrupts:
        try:
            with _Screen(console) as screen:
                report = await interrupts.guard(run(plan, screen))
        except Interrupted:
            console.print("interrupted: the cluster is stopped", style="yellow")
            return interrupts.status
    _print(console, plan, report)
    if as_json:
        print(json.dumps(report.document()))
    return 0 if report.passed else FAILED


class _Screen:
    """Output of a run: log lines, on a terminal with a status line below. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        live = console.is_terminal and not console.is_dumb_terminal
        self._status = Status("", console=console) if live else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Print one log line."""
        now = datetime.now().strftime("%H:%M:%S")
        self._console.print(f"{now} {escape(text)}", style="dim", highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        """Replace the status line; do nothing without a terminal."""
        if self._status is not None:
            self._status.update(escape(text))


def _print(console: Console, plan: ChaosPlan, report: ChaosReport) -> None:
    console.print(_faults(report))
    console.print(_runs(report))
    for text in [*report.disturbance.troubles, *report.disturbed.failures]:
        console.print(f"note: {escape(text)}", style="yellow", highlight=False, soft_wrap=True)
    if report.disturbance.kills < report.kills_wanted:
        console.print(
            f"only {report.disturbance.kills} of {report.kills_wanted} kills: the job ended first; "
            "take more steps with --set pipeline.steps=N",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    for text in report.differences:
        console.print(escape(text), highlight=False, soft_wrap=True)
    for text in report.faults:
        console.print(f"FAULT: {escape(text)}", style="bold red", highlight=False, soft_wrap=True)
    if report.passed:
        equal = "; final weights bitwise equal" if report.bitwise_equal else ""
        console.print(
            f"nothing lost, nothing duplicated{equal}", style="bold green", highlight=False
        )
    console.print(f"everything is in {plan.directory}", style="dim", soft_wrap=True)


def _faults(report: ChaosReport) -> Table:
    table = make_table(("kind", "victim", "by"), ("times", "seconds", "longest"), "faults")
    injected = report.disturbance.injected
    counted = Counter((one.kind, one.victim, one.means) for one in injected)
    for (kind, victim, means), times in sorted(counted.items()):
        seconds = sorted(
            one.seconds
            for one in injected
            if (one.kind, one.victim, one.means) == (kind, victim, means)
        )
        table.add_row(
            kind,
            victim,
            means,
            str(times),
            f"{seconds[len(seconds) // 2]:.1f}",
            f"{seconds[-1]:.1f}",
        )
    return table


def _runs(report: ChaosReport) -> Table:
    table = make_table(("",), ("undisturbed", "disturbed"), "runs")
    base, disturbed = report.baseline, report.disturbed
    rows: list[tuple[str, Callable[[JobOutcome], str]]] = [
        ("job", lambda o: o.state),
        ("seconds", lambda o: duration(o.seconds)),
        ("steps", lambda o: f"{o.steps} of {o.total_steps}"),
        ("samples appended", lambda o: str(o.accounts.appended)),
        ("trained", lambda o: str(o.accounts.trained)),
        ("dropped", lambda o: str(o.accounts.dropped)),
        ("unaccounted", lambda o: "?" if o.accounts.missing else str(o.accounts.unaccounted)),
        ("duplicated", lambda o: "?" if o.accounts.missing else str(o.accounts.duplicated)),
    ]
    for name, value in rows:
        table.add_row(name, "-" if base is None else value(base), value(disturbed))
    for policy in sorted(disturbed.versions):
        cells = []
        for one in (base, disturbed):
            version = None if one is None else one.versions.get(policy)
            cells.append("-" if version is None else f"{version[0]} {version[1][:16]}")
        table.add_row(f"{policy} (version, checksum)", *cells)
    return table
