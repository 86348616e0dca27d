"""The command line `troupe`: `main`, the list of its commands, and the commands on clusters.

An error is one line on stderr and an exit status, without a traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troupe import __version__
from troupe.checkpoints.hub import HubRepository, is_export, rewards_in, rewards_of, write_card
from troupe.checkpoints.merging import ByteBar, is_adapter_folder, merge_in_place
from troupe.checkpoints.retention import choose, copy_files, only_policy
from troupe.checkpoints.verifying import LINEAGE, Lineage
from troupe.client.aio import ADDRESS_VARIABLE, AsyncClient, check_address, data_directory
from troupe.client.cli import options
from troupe.client.cli.chaos import chaos
from troupe.client.cli.doctor import doctor
from troupe.client.cli.failures import FAILED, HintingGroup, explain
from troupe.client.cli.functions import app as functions
from troupe.client.cli.jobs.commands import app as jobs
from troupe.client.cli.jobs.commands import generate, submit
from troupe.client.cli.jobs.conversations import conversations
from troupe.client.cli.jobs.evaluate import evaluate
from troupe.client.cli.jobs.population import app as population
from troupe.client.cli.jobs.samples import app as samples
from troupe.client.cli.options import byte_bar, call, duration, size
from troupe.client.cli.plan import plan
from troupe.client.cli.slurm import slurm
from troupe.client.cli.specification import app as specification
from troupe.client.cli.train import train
from troupe.client.cli.workflow import app as workflow
from troupe.client.records.cluster import (
    Binding,
    Cluster,
    Service,
)
from troupe.client.records.jobs import JobState
from troupe.client.sync import Client
from troupe.cluster.daemon import run_until_signal, start_detached, stop_running
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.probes import ServiceReport, inspect
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import ClusterState, require_running, running_state, sign_in_link
from troupe.demo.command import demo, init
from troupe.demo.command import examples as examples_app
from troupe.doctor.examination import quick_checks
from troupe.job.automatic import AUTOMATIC
from troupe.job.spec import policy_of
from troupe.rpc import TroupeError
from troupe.rpc.errors import FailedPrecondition, Internal, InvalidArgument, recast
from troupe.storage import LocalPlace, Place, place_at
from troupe.yaml_input import read_value

environment_app = typer.Typer(help="Check environments.", no_args_is_help=True)


@environment_app.command()
def check(
    entrypoint: Annotated[
        str, typer.Argument(metavar="MODULE:ATTRIBUTE", help="Class or factory of environments.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=VALUE", help="Argument of the factory, as YAML."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 5,
    first_seed: Annotated[int, typer.Option(help="Seed of the first episode.")] = 0,
) -> None:
    """Check an environment against the whole interface; exit status 1 when it breaks a rule.

    For example: troupe environment check
    troupe.workflow.environments.adapters.openspiel:OpenSpiel --arg game=kuhn_poker
    """
    # Imports numpy and the environment's own packages, which other commands do not need.
    from troupe.workflow.environments.conformance import check as conform
    from troupe.workflow.environments.host import open_environment
    from troupe.workflow.errors import EntrypointError, WorkflowError
    from troupe.workflow.loading import add_working_directory

    add_working_directory()
    given = _arguments(args or [])
    try:  # an environment that cannot be made is an error of the input, not a broken promise
        open_environment(entrypoint, given, "entrypoint").close()
    except WorkflowError as error:
        refused = InvalidArgument if isinstance(error, EntrypointError) else Internal
        raise recast(error, refused) from error
    report = conform(
        lambda: open_environment(entrypoint, given, "entrypoint"),
        seeds=range(first_seed, first_seed + seeds),
    )
    console = Console(highlight=False, soft_wrap=True)
    for line in str(report).splitlines():
        style = "red" if line.lstrip().startswith("BROKEN") else None
        console.print(escape(line), style=style)
    if not report.ok:
        raise typer.Exit(1)


def _arguments(given: list[str]) -> dict[str, Any]:
    """Parse assignments of the form `name=value`, the value in YAML. Raises `InvalidArgument`."""
    arguments = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            if not equals or not name.isidentifier():
                raise ValueError("it is not of the form NAME=VALUE")
            arguments[name] = read_value(value, "its value")
        except ValueError as error:
            shown = text if len(text) <= 80 else f"{text[:77]}..."
            raise InvalidArgument(
                f"--arg {shown}: {error}",
                kind="bad_argument",
                field="--arg",
                value=text,
                remedy="Give --arg NAME=VALUE, the value in YAML.",
            ) from error
    return arguments


def export(
    job_id: options.JobId,
    directory: options.ExportTarget,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy, or an agent that it plays; default: the only policy.",
            autocompletion=options.complete_policies,
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="Checkpointed version; default: the newest.")
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter",
            help="If the policy trained an adapter: export a whole model, or the adapter alone.",
            show_default="adapter",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Path of the base for --merged; default: the job's path."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Also upload it to this repository (HF_TOKEN, HF_ENDPOINT), private if new.",
        ),
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Copy a checkpoint into DIR. transformers, PEFT and SGLang load it from there;
    `troupe.networks.exported` loads a small network.

    The checkpoint comes from the running cluster, or from the data directory of a stopped one.
    Repeat the command after a failed upload: it continues, without copying again to DIR.
    """
    place = place_at(directory, "DIR")
    if base is not None and not merged:
        raise InvalidArgument(
            "needs --merged",
            field="--base",
            value=base,
            remedy="Add --merged, or leave --base out.",
        )
    repository, lineage = None, None
    if push_to_hub is not None:
        if not isinstance(place, LocalPlace):
            raise InvalidArgument(
                "must be a directory on this host, so that a failed upload can be repeated from it",
                field="DIR",
                value=directory,
                remedy="Name a directory, or leave --push-to-hub out.",
            )
        repository = HubRepository(push_to_hub)
        if is_export(place.path, job_id, policy, version):
            lineage = Lineage.read(place.path)
    if lineage is None:
        lineage = _export(job_id, place, policy, version, merged, base, cluster, data_dir)
    name = lineage.policy if lineage is not None else policy or job_id
    say = Console().print
    say(f"exported {name} to {place.name}", highlight=False, soft_wrap=True)
    if repository is not None:
        label = name if lineage is None else f"{lineage.job}: {name} @ {lineage.version}"
        address = repository.upload(Path(place.name), label)
        say(f"uploaded to {address}", highlight=False, soft_wrap=True)


def _export(
    job_id: str,
    place: Place,
    policy: str | None,
    version: int | None,
    merged: bool | None,
    base: Path | None,
    cluster: str | None,
    data_dir: Path | None,
) -> Lineage | None:
    """Write the export to `place`, or leave nothing there; return its lineage."""
    root = data_directory(data_dir)
    # An incomplete export is useless, and its directory would block the next attempt.
    with place.new_folder(last=LINEAGE) as draft, byte_bar() as progress:
        if cluster or os.environ.get(ADDRESS_VARIABLE) or running_state(root) is not None:
            rewards = _from_cluster(job_id, draft, policy, version, cluster, data_dir, progress)
        else:
            checkpoint = choose(root, job_id, policy, version)
            add = progress("copying", sum(one.stat().st_size for one in checkpoint.rglob("*")))
            copy_files(checkpoint, draft, add)
            rewards = {}
        _finish(draft, rewards, root, job_id, merged, base, progress)
        return Lineage.read(draft)


def _finish(
    target: Path,
    rewards: Mapping[str, float],
    root: Path,
    job_id: str,
    merged: bool | None,
    base: Path | None,
    progress: ByteBar,
) -> None:
    """Merge the copied adapter if the user wants that, and write the model card."""
    lineage = Lineage.read(target)
    if lineage is not None:
        rewards = rewards or rewards_in(root / job_id / "metrics.jsonl", lineage.step + 1)
        beside = root / job_id / "checkpoints" / ".base" / lineage.base_checksum
        if base is None and lineage.base_checksum and beside.is_dir():
            base = beside
    if merged and is_adapter_folder(target):
        merge_in_place(target, base, progress)
    elif merged is False and not is_adapter_folder(target):
        raise FailedPrecondition(
            "the policy trained all weights; it has no adapter",
            kind="no_adapter",
            field="--adapter",
            remedy="Leave --adapter out: the export is the whole model.",
        )
    write_card(target, rewards)


def _from_cluster(
    job_id: str,
    directory: Path,
    policy: str | None,
    version: int | None,
    cluster: str | None,
    data_dir: Path | None,
    progress: ByteBar,
) -> dict[str, float]:
    """Export from a running cluster into `directory`; return the rewards of the version's step."""

    async def export(client: AsyncClient) -> dict[str, float]:
        job = client.job(job_id)
        listed = await job.checkpoints()
        wanted = policy
        if wanted is None:
            wanted = only_policy(dict.fromkeys(one.policy for one in listed), None)
        else:
            wanted = policy_of((await job.info()).spec, wanted)
        of_it = [o for o in listed if o.policy == wanted and version in (None, o.version)]
        add = progress("copying", of_it[-1].num_bytes if of_it else 0)
        target = await job.export(wanted, directory, version, progress=add)
        lineage = await asyncio.to_thread(Lineage.read, target)
        if lineage is None or lineage.step < 0:
            return {}
        rows = await job.metrics(after_step=lineage.step)
        return next((rewards_of(row.values) for row in rows if row.step == lineage.step + 1), {})

    return call(cluster, data_dir, export)


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


def _cluster_of(state: ClusterState) -> Cluster | None:
    """Return the cluster as its orchestrator sees it; None if the orchestrator does not answer."""
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


def _print_devices(console: Console, cluster: Cluster) -> None:
    """Print the devices of all nodes and their users; print nothing if there are no devices."""
    if not any(one.devices for one in cluster.nodes):
        return
    versions = {engine.id: engine for engine in cluster.engines}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("node", "device", "class", "memory", "busy", "process", "on it"):
        table.add_column(column, no_wrap=column in ("node", "device", "process"))
    for one in cluster.nodes:
        for device in one.devices:
            used = "" if device.used_bytes is None else f"{size(device.used_bytes)} of "
            on_it = []
            for holder in device.holders:
                engine = versions.get(holder)
                on_it.append(
                    holder
                    if engine is None
                    else f"{engine.policy} v{engine.version} {engine.state}"
                )
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
                "rss_bytes": r.rss_bytes,
            }
            for r in reports
        ],
        "warnings": {one.name: one.message for one in seen if one.message},
    }


app = typer.Typer(
    name="troupe",
    help="Train teams of language-model agents with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=HintingGroup,
)
app.command("demo")(demo)
app.command("init")(init)
app.command("train")(train)
app.command("submit")(submit)
app.command("evaluate")(evaluate)
app.command("up")(up)
app.command("head")(head)
app.command("node")(node)
app.command("slurm")(slurm)
app.command("plan")(plan)
app.command("down")(down)
app.command("status")(status)
app.command("doctor")(doctor)
app.add_typer(jobs, name="jobs")
app.add_typer(functions, name="functions")
app.add_typer(samples, name="samples")
app.add_typer(population, name="population")
app.command("conversations")(conversations)
app.command("generate")(generate)
app.command("export")(export)
app.add_typer(specification, name="job")
app.add_typer(environment_app, name="environment")
app.add_typer(workflow, name="workflow")
app.add_typer(examples_app, name="examples")
app.command("chaos")(chaos)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"troupe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train teams of language-model agents with reinforcement learning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status.

    0: success. 1: failure. 2: invalid input. 130, 143: interrupted.
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="troupe",
            standalone_mode=False,
        )
    except BaseException as error:
        lines, code = explain(error)
        for line in lines:
            # Arguments quoted in an error need not be valid UTF-8.
            print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return code
    return status if isinstance(status, int) else 0
