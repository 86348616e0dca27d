"""`troupe jobs ...` and `troupe generate`: list, show, follow and control jobs."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.display import Progress, follow, make_display, print_summary
from troupe.client.cli.failures import FAILED, HintingGroup
from troupe.client.cli.jobs.results import compare, logs, metrics
from troupe.client.cli.options import call, duration, make_table, score
from troupe.client.cli.specification import load_with, parse_assignments
from troupe.client.cli.train import given_file
from troupe.client.records.jobs import Job, JobState
from troupe.client.records.samples import Audit
from troupe.contracts import metric_names
from troupe.rpc.errors import InvalidArgument, TroupeError


def audit(
    job_id: options.JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Account for every sample of a job. Exit status 1 if one was lost or trained too often."""
    found = call(cluster, data_dir, lambda client: client.job(job_id).audit())
    if as_json:
        print(json.dumps(audit_values(found), indent=2))
    else:
        print_audit(Console(), found)
    raise typer.Exit(0 if found.passed else FAILED)


def audit_values(found: Audit) -> dict[str, Any]:
    """Return an audit as JSON values."""
    versions = [
        {**dataclasses.asdict(one), "published_at": one.published_at.isoformat()}
        for one in found.versions
    ]
    sums = {"passed": found.passed, "lost": found.lost, "duplicated": found.duplicated}
    return {**sums, **dataclasses.asdict(found), "versions": versions}


def print_audit(console: Console, found: Audit) -> None:
    """Print the counts of samples per policy, violations, and the verdict."""
    grid = make_table(
        ("policy",),
        ("steps", "version", "appended", "trained", "dropped", "live", "lost", "twice"),
    )
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


Policy = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        show_default=False,
        help="A policy, or an agent that it plays.",
        autocompletion=options.complete_policies,
    ),
]


def generate(
    job_id: options.JobId,
    policy: Policy,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", show_default=False, help="User message; -: from stdin.")
    ],
    system: Annotated[str | None, typer.Option(help="System message before it.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of likeliest tokens.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, for a repeatable answer.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300.0,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Let the newest version of a policy answer a message."""
    prompt = sys.stdin.read() if text == "-" else text
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})

    answer = call(
        cluster,
        data_dir,
        lambda client: client.job(job_id).generate(
            policy,
            messages,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            seed=seed,
            timeout=timeout,
        ),
    )
    print(json.dumps(dataclasses.asdict(answer)) if as_json else answer.text)


def submit(
    path: Annotated[Path, typer.Argument(metavar="JOB.yaml", show_default=False)],
    assignments: options.Assignments = None,
    job_id: Annotated[str | None, typer.Option(help="Id of the new job.")] = None,
    tags: options.Tags = None,
    notes: options.Notes = "",
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Submit a job to a running cluster and return; print its id and the commands to follow it."""
    spec = load_with(path, assignments or [])

    given = given_file(path, spec, assignments or [])

    async def send(client: AsyncClient) -> Job:
        handle = await client.submit(spec, job_id, tags=tags or (), notes=notes, given=given)
        return await handle.info()

    job = call(cluster, data_dir, send)
    if as_json:
        print(json.dumps(job_values(job), indent=2))
        return
    # The commands need the address or the directory that this one was given.
    where = "" if cluster is None else f" --cluster {cluster}"
    where += "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
    print(job.id)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for command, effect in (
        ("jobs watch", "follows its progress"),
        ("jobs logs --follow", "prints what it logs"),
        ("jobs metrics", "prints its metrics"),
        ("conversations", "shows what its agents said"),
        ("jobs pause", "pauses it after its step"),
    ):
        line = f"  troupe {command} {job.id}{where}"
        console.print(f"{line:<50}  # {effect}", markup=False, style="dim")


app = typer.Typer(help="Inspect and control jobs.", no_args_is_help=True, cls=HintingGroup)
app.command("audit")(audit)
app.command("metrics")(metrics)
app.command("logs")(logs)
app.command("compare")(compare)
# Default length of `troupe jobs list`.
_LISTED = 50


@app.command("list")
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Show at most the newest N.", metavar="N")
    ] = _LISTED,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """List the newest jobs of the cluster, newest last."""
    jobs = call(cluster, data_dir, lambda client: client.jobs(state, limit + 1))
    more, jobs = len(jobs) > limit, jobs[-limit:]
    if as_json:
        print(json.dumps([job_values(job) for job in jobs], indent=2))
        return
    console = Console()
    if not jobs:
        console.print("no jobs")
        return
    table = make_table(("job", "state", "mode", "tags"), ("priority", "step", "reward", "age"))
    for job in jobs:
        age = (datetime.now(UTC) - job.created_at).total_seconds() if job.created_at else None
        table.add_row(
            escape(job.id),
            str(job.state),
            job.mode,
            escape(" ".join(job.tags)),
            str(job.priority),
            f"{job.step}/{job.total_steps}",
            score(job.metrics.get(metric_names.REWARD_MEAN)),
            duration(age),
        )
    console.print(table)
    if more:
        console.print(f"these are the newest {limit}; --limit shows more", highlight=False)


@app.command()
def show(
    job_id: options.JobId,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Show a job: its progress, its scores and its files."""

    async def fetch(client: AsyncClient) -> tuple[Job, Any]:
        handle = client.job(job_id)
        return await handle.info(), await handle.checkpoints()

    job, checkpoints = call(cluster, data_dir, fetch)
    if as_json:
        print(json.dumps(job_values(job), indent=2))
        return
    console = Console()
    print_summary(console, job, checkpoints)
    _print_annotations(console, job)
    if job.activity:
        console.print(f"{'now':<12} {escape(job.activity)}", highlight=False)
    for policy, version in sorted(job.versions.items()):
        console.print(f"{'policy':<12} {escape(policy)} version {version}", highlight=False)
    for one in job.resolved:
        text = f"{one.field} = {one.value} ({one.source})"
        console.print(f"{'setting':<12} {escape(text)}", highlight=False)
    for policy, origin in sorted(job.origins.items()):
        console.print(f"{'began with':<12} {escape(f'{policy}: {origin}')}", highlight=False)
    for change in job.history:
        console.print(f"{'changed':<12} {escape(str(change))}", highlight=False)
    if job.problem is not None and job.state != JobState.SUCCEEDED:  # the summary has it
        console.print(f"{'problem':<12} {escape(str(job.problem))}", highlight=False)


@app.command()
def profile(
    job_id: options.JobId,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the profile to this new file, for `troupe plan --profile`."),
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Show a job's measurements: turns, lengths, waits, and the speed of engines and trainers."""
    if write is not None and write.exists():
        raise InvalidArgument(
            "the file exists", field="--write", value=str(write), remedy="Name a new file."
        )
    found = call(cluster, data_dir, lambda client: client.job(job_id).profile())
    console = Console()
    lengths = make_table(("agent", "policy"), ("turns", "new prompt tokens", "p90", "drawn", "p90"))
    for agent, policy in found.agents.items():
        read, drawn = found.prompts[agent], found.responses[agent]
        lengths.add_row(
            escape(agent),
            escape(policy),
            f"{found.turns[agent].mean:.1f}",
            *(f"{value:,.0f}" for one in (read, drawn) for value in (one.mean, one.quantile(0.9))),
        )
    console.print(lengths)
    speeds = make_table(
        ("policy",), ("engine tokens/s", "turns at once", "waited s", "trainer tokens/s")
    )
    for name, times in found.policies.items():
        speed = times.engine.speed()
        each = speed and speed.step_seconds(speed.concurrency)
        speeds.add_row(
            escape(name),
            f"{speed.concurrency / each:,.0f}" if speed and each else "-",
            f"{speed.concurrency:.1f}" if speed else "-",
            f"{times.queue_seconds.mean:.2f}",
            f"{times.trained_tokens_per_second:,.0f}" if times.trained_tokens_per_second else "-",
        )
    console.print(speeds)
    waits = found.waits
    console.print(
        f"a turn waits {waits.mean:.2f} s for tools and environment (p90 {waits.quantile(0.9):.2f})"
        + "".join(f"; {escape(name)} {mean:.2f} s" for name, mean in sorted(found.tools.items())),
        highlight=False,
    )
    if write is not None:
        write.write_text(found.to_json(), "utf-8")


@app.command()
def watch(
    job_id: options.JobId,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Follow a job until it ends; Ctrl-C leaves it running."""
    console = Console()

    async def fetch(client: AsyncClient) -> Job:
        handle = client.job(job_id)
        progress = Progress(await handle.info())
        with make_display(console) as display:
            await follow(handle, progress, display)
        job = await handle.info()
        print_summary(console, job, await handle.checkpoints(), progress)
        return job

    job = call(cluster, data_dir, fetch)
    raise typer.Exit(0 if job.state == JobState.SUCCEEDED else FAILED)


@app.command()
def pause(
    job_id: options.JobId, cluster: options.ClusterAddress = None, data_dir: options.DataDir = None
) -> None:
    """Pause a job: let the step in flight finish, then release the workers."""
    _print_state(call(cluster, data_dir, lambda client: client.job(job_id).pause()))


@app.command()
def resume(
    job_id: options.JobId,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="Continue with this job file: the same job with more steps, other limits, ...",
            show_default=False,
        ),
    ] = None,
    assignments: options.Assignments = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Continue a job that is paused or has ended from its last committed step.

    `--set` changes steps, learning rates, temperatures, limits and the like, from the next step on;
    a job that has succeeded needs more steps. `troupe jobs show` lists the changes.
    """
    overrides = parse_assignments(assignments or [])
    _print_state(call(cluster, data_dir, lambda client: client.job(job_id).resume(spec, overrides)))


@app.command()
def cancel(
    job_id: options.JobId,
    reason: Annotated[str, typer.Option(help="Kept with the job.")] = "",
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Cancel a job now. Its committed steps stay, and it can be resumed."""
    _print_state(call(cluster, data_dir, lambda client: client.job(job_id).cancel(reason)))


@app.command()
def annotate(
    job_id: options.JobId,
    tags: options.Tags = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove-tag", help="Remove this tag; may be repeated.")
    ] = None,
    notes: Annotated[
        str | None, typer.Option(help='Replace the notes; "": remove them.', show_default=False)
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Change a job's tags and notes, in any of its states."""
    if tags is None and remove is None and notes is None:
        raise InvalidArgument("give at least one of --tag, --remove-tag and --notes", field="--tag")
    job = call(
        cluster,
        data_dir,
        lambda client: client.job(job_id).annotate(
            add_tags=tags or (), remove_tags=remove or (), notes=notes
        ),
    )
    _print_annotations(Console(), job)


def _print_annotations(console: Console, job: Job) -> None:
    for label, text in (("tags", " ".join(job.tags)), ("notes", job.notes)):
        if text:
            console.print(f"{label:<12} {escape(text)}", highlight=False)


@app.command()
def spec(
    job_id: options.JobId,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="With all defaults filled in, without comments.")
    ] = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Print a job's file as it was submitted, with its comments."""

    async def fetch(client: AsyncClient) -> str:
        handle = client.job(job_id)
        given = "" if resolved else await handle.given_spec()
        fields = (await handle.info()).spec
        return given or yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)

    print(call(cluster, data_dir, fetch).rstrip())


@app.command()
def forget(
    job_id: options.JobId, cluster: options.ClusterAddress = None, data_dir: options.DataDir = None
) -> None:
    """Delete an ended job from the cluster's memory: its record, log, metrics, rows and weights;
    and its conversations. Other files in its directory, such as checkpoints, stay."""
    job = call(cluster, data_dir, lambda client: client.job(job_id).forget())
    Console().print(
        f"{job.id} is forgotten; its checkpoints stay in {job.directory}", highlight=False
    )


def job_values(job: Job) -> dict[str, Any]:
    """Return a job as JSON values."""

    def value(item: Any) -> Any:
        if isinstance(item, datetime):
            return item.isoformat()
        if isinstance(item, TroupeError):
            return {"kind": item.kind, "message": str(item)}
        if isinstance(item, tuple):
            return [value(one) for one in item]
        if isinstance(item, dict):
            return {name: value(one) for name, one in item.items()}
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        return item

    fields = {f.name: value(getattr(job, f.name)) for f in dataclasses.fields(job)}
    del fields["spec_json"]
    return {**fields, "spec": job.spec}


def _print_state(job: Job) -> None:
    Console().print(f"{job.id} {job.state.clause}", highlight=False)
