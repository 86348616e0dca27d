"""Commands of clusters: `troupe up`, `head`, `node`, `down`, `status`."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.options import duration, size
from troupe.client.discovery import check_address, data_directory
from troupe.cluster.daemon import run_until_signal, start_detached, stop_running
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.probes import ServiceReport, inspect
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import ClusterState, require_running, sign_in_link
from troupe.doctor.examination import quick_checks
from troupe.rpc import TroupeError

if TYPE_CHECKING:
    from troupe.client.records.cluster import Binding, Cluster, Engine, Service

Detach = Annotated[bool, typer.Option("--detach", "-d", help="Start in the background and return.")]


@options.with_cluster_options(
    "data_dir",
    "rollouts",
    "trainers",
    "threads",
    "panel",
    "panel_port",
    "redis_url",
    "redis_port",
    "start_timeout",
    "trainer_idle_seconds",
    "devices",
    "engine_devices",
    "trainer_devices",
    "devices_per_trainer",
    "colocate",
)
def up(settings: options.MakeSettings, detach: Detach = False) -> None:
    """Start an embedded cluster: all services and a Redis, on loopback."""
    _supervise(settings(), "a cluster", detach=detach)


@options.with_cluster_options(
    "data_dir",
    "host",
    "advertise",
    "port",
    "panel",
    "panel_port",
    "redis_url",
    "redis_port",
    "start_timeout",
    "jobs_dir",
)
def head(settings: options.MakeSettings, detach: Detach = False) -> None:
    """Start the head of a cluster of several hosts: Redis, orchestrator, experience store, reward
    service and panel. Nodes join it with `troupe node` and the same token ($TROUPE_TOKEN)."""
    _supervise(settings(role="head"), "the head of a cluster", detach=detach)


@options.with_cluster_options(
    "data_dir",
    "name",
    "host",
    "advertise",
    "rollouts",
    "trainers",
    "threads",
    "devices",
    "engine_devices",
    "trainer_devices",
    "devices_per_trainer",
    "colocate",
    "start_timeout",
    "jobs_dir",
)
def node(
    settings: options.MakeSettings,
    head: Annotated[str, typer.Option(metavar="HOST:PORT", help="The head's orchestrator.")],
    detach: Detach = False,
) -> None:
    """Start workers on this host's devices and join them to a head's cluster. The node waits for
    the head, also while its orchestrator restarts; SIGTERM drains its workers."""
    made = settings(role="node", head=check_address(head))
    _supervise(made, f"node {made.name}", detach=detach)


def _supervise(settings: ClusterSettings, what: str, *, detach: bool) -> None:
    """Run a supervisor until a signal, or in the background."""
    console = Console()
    console.print(f"starting {what} in {settings.data_dir}", style="dim", soft_wrap=True)
    for one in quick_checks():
        console.print(f"{one} (`troupe doctor`)", style="yellow", highlight=False, soft_wrap=True)
    if detach:
        _print_addresses(console, start_detached(settings))
        return
    cluster = EmbeddedCluster(settings, tell=lambda event: console.print(event, highlight=False))

    def ready(state: ClusterState) -> None:
        _print_addresses(console, state)
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
    cluster = _cluster_of(state)
    seen = [] if cluster is None else cluster.services
    if as_json:
        print(json.dumps(_status_json(state, reports, seen), indent=2))
    else:
        console = Console()
        _print_status(console, state, reports)
        for one in seen:
            if one.message:
                style = "yellow" if one.serving else "red"
                console.print(f"{one.name}: {one.message}", style=style, highlight=False)
        if cluster is not None:
            _print_trainers(console, cluster)
            _print_shared_engines(console, cluster)
            _print_devices(console, cluster)
            _print_decided(console, state)
    healthy = all(r.healthy for r in reports) and all(one.serving for one in seen)
    healthy = healthy and state.phase == "ready"
    raise typer.Exit(0 if healthy else FAILED)


def _print_addresses(console: Console, state: ClusterState) -> None:
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
            size(report.memory_bytes),
            str(record.restarts),
        )
    console.print(table)
    console.print(f"memory in all {size(sum(r.memory_bytes for r in reports))}", highlight=False)
    if state.panel_url:
        console.print(f"panel {state.panel_url}", highlight=False)
    if link := sign_in_link(state):
        console.print(f"sign in once {link}", highlight=False, soft_wrap=True)


def _health(report: ServiceReport) -> str:
    if not report.healthy:
        return f"[red]{report.reason}[/red]"
    return "parked" if report.record.state == "parked" else "healthy"


def _cluster_of(state: ClusterState) -> Cluster | None:
    """Return the cluster as its orchestrator sees it; None if the orchestrator does not answer."""
    from troupe.client.sync import Client  # slow to import, and a cluster starts without it

    if not state.orchestrator_address:
        return None
    try:
        with Client(state.orchestrator_address) as client:
            return client.cluster()
    except TroupeError:
        return None


def _print_trainers(console: Console, cluster: Cluster) -> None:
    """Print trainers and the policies bound to them."""
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
        # A narrow terminal shortens other columns: users copy these into the next command.
        table.add_column(column, no_wrap=column in ("job", "policy", "state"))
    for binding in cluster.bindings:
        table.add_row(
            binding.job_id,
            binding.policy,
            _binding_state(binding),
            str(binding.version),
            str(binding.samples),
            str(binding.swaps),
            f"{binding.swap_seconds:.2f}",
        )
    console.print(table)


def _binding_state(binding: Binding) -> str:
    if binding.load_bytes:
        return f"loading {binding.loaded_bytes / binding.load_bytes:.0%}"
    return "prefetched" if binding.prefetched else binding.state


def _shared_engines(cluster: Cluster) -> dict[str, list[Engine]]:
    """Return the engines of each server or model that serves several policies, by its id."""
    found: defaultdict[str, list[Engine]] = defaultdict(list)
    for engine in cluster.engines:
        if engine.host:
            found[engine.host].append(engine)
    return found


def _print_shared_engines(console: Console, cluster: Cluster) -> None:
    """Print the engines that serve several policies, with the versions and turns of each policy."""
    # Lines, since ids are wider than the columns of a table in a narrow terminal.
    for name, engines in sorted(_shared_engines(cluster).items()):
        serves = "; ".join(f"{_serving(one)}, {one.running} running" for one in engines)
        text = f"shared engine {name}: {serves}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _serving(engine: Engine) -> str:
    return f"{engine.policy} {engine.versions} {engine.state}"


def _print_devices(console: Console, cluster: Cluster) -> None:
    """Print the devices of all nodes and their users; print nothing if there are no devices."""
    if not any(one.devices for one in cluster.nodes):
        return
    # The holder of a device is an engine, or what several engines share.
    holders = {engine.id: [engine] for engine in cluster.engines} | _shared_engines(cluster)
    shown = {holder: [_serving(one) for one in engines] for holder, engines in holders.items()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("node", "device", "class", "memory", "busy", "process", "on it"):
        table.add_column(column, no_wrap=column in ("node", "device", "process"))
    for one in cluster.nodes:
        for device in one.devices:
            used = "" if device.used_bytes is None else f"{size(device.used_bytes)} of "
            on_it = [text for holder in device.holders for text in shown.get(holder, [holder])]
            table.add_row(
                one.id if one.alive else f"[red]{one.id} (lost)[/red]",
                str(device.index),
                device.device_class,
                used + size(device.memory_bytes),
                "-" if device.utilization is None else f"{device.utilization:.0%}",
                device.process or "-",
                ", ".join(on_it) or "-",
            )
    console.print(table)


def _print_decided(console: Console, state: ClusterState) -> None:
    """Print the numbers of engines and the gangs that running jobs have for `auto`."""
    from troupe.client.records.jobs import JobState  # as above
    from troupe.client.sync import Client
    from troupe.job.automatic import AUTOMATIC

    try:
        with Client(state.orchestrator_address) as client:
            running = client.jobs(JobState.RUNNING)
    except TroupeError:
        return
    for job in running:
        for one in job.resolved:
            if one.source.startswith(AUTOMATIC):
                text = f"{job.id}: {one.field} = {one.value} ({one.source})"
                console.print(text, markup=False, highlight=False, soft_wrap=True)


def _status_json(
    state: ClusterState, reports: list[ServiceReport], seen: Sequence[Service]
) -> dict[str, Any]:
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
                "memory_bytes": r.memory_bytes,
            }
            for r in reports
        ],
        "warnings": {one.name: one.message for one in seen if one.message},
    }
