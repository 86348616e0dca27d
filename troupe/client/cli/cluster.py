"""`troupe up`, `down`, `status`: an embedded cluster that stays."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from troupe.client.address import data_directory
from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.formats import duration, size
from troupe.client.sync import Client
from troupe.cluster.access import sign_in_link
from troupe.cluster.daemon import run_until_signal, start_detached, stop_running
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.inspection import ServiceReport, inspect
from troupe.cluster.state import ClusterState, require_running
from troupe.rpc import TroupeError


def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start in the background and return.")
    ] = False,
    data_dir: options.DataDir = None,
    rollouts: options.Rollouts = None,
    trainers: options.Trainers = None,
    threads: options.Threads = None,
    panel: options.Panel = True,
    panel_port: options.PanelPort = None,
    redis_url: options.RedisUrl = None,
    redis_port: options.RedisPort = None,
    start_timeout: options.StartTimeout = 120.0,
    trainer_idle_seconds: options.TrainerIdleSeconds = None,
) -> None:
    """Start an embedded cluster: all services and a Redis, on loopback."""
    settings = options.cluster_settings(
        data_dir=data_dir,
        rollouts=rollouts,
        trainers=trainers,
        threads=threads,
        panel=panel,
        panel_port=panel_port,
        redis_url=redis_url,
        redis_port=redis_port,
        start_timeout=start_timeout,
        trainer_idle_seconds=trainer_idle_seconds,
    )
    console = Console()
    console.print(f"starting a cluster in {settings.data_dir}", style="dim", soft_wrap=True)
    if detach:
        _tell_places(console, start_detached(settings))
        return
    cluster = EmbeddedCluster(settings, tell=lambda event: console.print(event, highlight=False))

    def ready(state: ClusterState) -> None:
        _tell_places(console, state)
        console.print("Ctrl-C stops it", style="dim")

    asyncio.run(run_until_signal(cluster, ready))


def down(data_dir: options.DataDir = None) -> None:
    """Stop the cluster that runs in the data directory. Its jobs can be resumed."""
    state = stop_running(data_directory(data_dir))
    Console().print(f"stopped the cluster in {state.data_dir}", highlight=False, soft_wrap=True)


def status(data_dir: options.DataDir = None, as_json: options.AsJson = False) -> None:
    """Show every process of the cluster. Exit status 1 unless all are healthy."""
    state = require_running(data_directory(data_dir))
    reports = asyncio.run(inspect(state))
    if as_json:
        print(json.dumps(_as_json(state, reports), indent=2))
    else:
        console = Console()
        _print_status(console, state, reports)
        _print_trainers(console, state)
    healthy = state.phase == "ready" and all(r.healthy for r in reports)
    raise typer.Exit(0 if healthy else FAILED)


def _tell_places(console: Console, state: ClusterState) -> None:
    for name, place in (
        ("panel", state.panel_url),
        ("sign in once", sign_in_link(state)),
        ("orchestrator", state.orchestrator_address),
        ("logs", str(state.data_dir / "logs")),
    ):
        if place:
            console.print(f"{name:<13} {place}", highlight=False, soft_wrap=True)


def _print_status(console: Console, state: ClusterState, reports: list[ServiceReport]) -> None:
    age = duration(time.time() - state.started_at)
    console.print(f"cluster in {state.data_dir}: {state.phase}, up {age}", highlight=False)
    if state.message:
        console.print(state.message, style="red", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("service", "state", "address", "pid", "memory", "restarts"):
        right = column in ("pid", "memory", "restarts")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for report in reports:
        record = report.record
        table.add_row(
            record.name,
            _health(report),
            record.address,
            str(record.pid or "-"),
            size(report.rss_bytes),
            str(record.restarts),
        )
    console.print(table)
    console.print(f"memory in all {size(sum(r.rss_bytes for r in reports))}", highlight=False)
    if state.panel_url:
        console.print(f"panel {state.panel_url}", highlight=False)
    if link := sign_in_link(state):
        console.print(f"sign in once {link}", highlight=False, soft_wrap=True)


def _health(report: ServiceReport) -> str:
    if not report.healthy:
        return f"[red]{report.reason}[/red]"
    return "parked" if report.record.state == "parked" else "healthy"


def _print_trainers(console: Console, state: ClusterState) -> None:
    """Who trains what, if the orchestrator answers: it is a view, not the health of anything."""
    if not state.orchestrator_address:
        return
    try:
        with Client(state.orchestrator_address) as client:
            cluster = client.cluster()
    except TroupeError:
        return
    trainers = [one for one in cluster.workers if one.utilization is not None and one.alive]
    for one in trainers:
        slots = f"{one.slots} slots" if one.slots else "any number of policies"
        busy = f"{one.utilization or 0:.0%} busy"
        console.print(f"trainer {one.id}: {slots}, {busy}", highlight=False)
    if trainers or cluster.wanted_trainers:
        console.print(f"trainers wanted {cluster.wanted_trainers}", highlight=False)
    if not cluster.bindings:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("job", "policy", "state", "version", "samples", "swaps", "swap seconds"):
        # Headings give way, not what is copied into the next command.
        table.add_column(column, no_wrap=column in ("job", "policy", "state"))
    for binding in cluster.bindings:
        table.add_row(
            binding.job_id,
            binding.policy,
            "prefetched" if binding.prefetched else binding.state,
            str(binding.version),
            str(binding.samples),
            str(binding.swaps),
            f"{binding.swap_seconds:.2f}",
        )
    console.print(table)


def _as_json(state: ClusterState, reports: list[ServiceReport]) -> dict[str, Any]:
    return {
        "data_dir": str(state.data_dir),
        "phase": state.phase,
        "orchestrator_address": state.orchestrator_address,
        "panel_url": state.panel_url,
        "supervisor_pid": state.supervisor_pid,
        "services": [
            {
                **r.record.model_dump(mode="json", exclude={"created"}),
                "healthy": r.healthy,
                "reason": r.reason,
                "rss_bytes": r.rss_bytes,
            }
            for r in reports
        ],
    }
