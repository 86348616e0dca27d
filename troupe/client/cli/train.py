"""`troupe train`: run a job on an embedded or given cluster, and show its progress and result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.display import (
    Display,
    Progress,
    follow,
    make_display,
    print_conversations,
    print_summary,
)
from troupe.client.cli.failures import FAILED, Interrupted, Interrupts
from troupe.client.cli.specification import load_with, parse_assignments
from troupe.client.discovery import check_address, settings_for
from troupe.client.handle import AsyncJobHandle, given_text
from troupe.client.program import ProgramJob
from troupe.client.records.jobs import Job, JobState, Result
from troupe.cluster.daemon import start_detached
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.inventory import fill
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import ClusterState, running_state, sign_in_link
from troupe.doctor.examination import examine_servers
from troupe.job import JobSpec, JobSpecError
from troupe.job.loading import SPEC_FILE, job_of, load_text, read_mapping, with_overrides
from troupe.rpc.errors import InvalidArgument, TroupeError

# Held-out queries whose conversations are shown, before and after training.
_CONVERSATIONS = 2


@dataclass(frozen=True)
class Session:
    """A connection to the cluster that trains, with the cluster if this command started it."""

    client: AsyncClient
    panel: str
    # The cluster that this command started and will stop; None: another one, which stays up.
    own: EmbeddedCluster | None


@asynccontextmanager
async def open_session(
    settings: ClusterSettings,
    *,
    address: str | None,
    keep_up: bool,
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> AsyncIterator[Session]:
    """Connect to a running cluster, or start one that is always stopped at the end.

    Raises `Interrupted` when a signal comes while it starts, or the error of its start.
    """
    own: EmbeddedCluster | None = None
    try:
        if address is not None:
            target, panel = check_address(address), ""
        else:
            state = running_state(settings.data_dir)
            if state is not None:
                say(f"using the running cluster in {settings.data_dir}")
            elif keep_up:
                say(f"starting a cluster in {settings.data_dir} (`troupe down` stops it)")
                state = await interrupts.guard(asyncio.to_thread(start_detached, settings))
            else:
                say(f"starting a cluster in {settings.data_dir}")
                own = EmbeddedCluster(settings, tell=say)
                state = await interrupts.guard(own.start())
            target, panel = state.orchestrator_address, state.panel_url
            say(_addresses(state))
        client_settings = settings_for(target, settings.data_dir)
        async with AsyncClient(target, settings=client_settings) as client:
            yield Session(client, panel, own)
    finally:
        if own is not None:
            say("stopping the cluster")
            await own.stop()


def _addresses(state: ClusterState) -> str:
    panel = f"panel {state.panel_url}, " if state.panel_url else ""
    link = sign_in_link(state)
    opened = f"\nopen the panel with {link} (good once)" if link else ""
    return f"cluster is up: {panel}logs {state.data_dir / 'logs'}{opened}"


@dataclass(frozen=True)
class TrainPlan:
    """The arguments of one `troupe train`."""

    spec: JobSpec | ProgramJob | None
    job_id: str | None
    resume: str | None
    address: str | None
    keep_up: bool
    grace: float
    settings: ClusterSettings
    # The job's file as it was given; None: the fields that `spec` sets.
    given: str | None = None
    tags: Sequence[str] = ()
    notes: str = ""
    # Changes of the job that is resumed, by path.
    overrides: Mapping[str, Any] = field(default_factory=dict)


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
    "devices",
    "engine_devices",
    "trainer_devices",
)
def train(
    settings: options.MakeSettings,
    job: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", show_default=False)] = None,
    assignments: options.Assignments = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="JOB_ID",
            help="Resume this job instead of a new one.",
            autocompletion=options.complete_jobs,
        ),
    ] = None,
    job_id: Annotated[str | None, typer.Option(help="Id of the new job.")] = None,
    tags: options.Tags = None,
    notes: options.Notes = "",
    cluster: options.ClusterAddress = None,
    keep_up: Annotated[
        bool, typer.Option("--keep-up", help="Leave the cluster running afterwards.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds that Ctrl-C gives the step in flight to finish.")
    ] = 20.0,
) -> None:
    """Train a job and show its progress. Starts an embedded cluster unless one runs here.

    Ctrl-C pauses the job and stops the cluster; the job can be resumed.
    """
    if (job is None) == (resume is None):
        raise InvalidArgument(
            "give either a job file or --resume JOB_ID", field="JOB.yaml", value=job
        )
    unused = {"--job-id": job_id, "--tag": tags, "--notes": notes}
    for option, value in unused.items():
        if resume is not None and value:
            raise InvalidArgument(
                "applies to a new job",
                field=option,
                value=value if isinstance(value, str) else value[0],
                remedy="Omit it; `troupe jobs annotate` changes tags and notes.",
            )
    spec = None if job is None else load_with(job, assignments or [])
    if spec is not None and cluster is None and running_state(settings().data_dir) is None:
        refuse_without_servers(spec)
    overrides = parse_assignments(assignments or []) if resume is not None else {}
    suited = spec
    if resume is not None:
        suited = _resumed(options.stopped_job(resume, cluster, settings().data_dir), overrides)
    plan = TrainPlan(
        spec=spec,
        job_id=job_id,
        resume=resume,
        overrides=overrides,
        address=cluster,
        keep_up=keep_up,
        grace=grace,
        settings=(settings() if suited is None else settings_of_job(suited, settings())).resolved(),
        given=given_file(job, spec, assignments or []),
        tags=tags or (),
        notes=notes,
    )
    raise typer.Exit(asyncio.run(run(plan, Console())))


def _resumed(directory: Path | None, overrides: Mapping[str, Any]) -> JobSpec | None:
    """Return the job in a directory with `overrides`; None without a directory, or for a job that
    this release cannot read: the cluster says what is wrong."""
    if directory is None:
        return None
    try:
        return job_of(with_overrides(read_mapping(load_text(directory / SPEC_FILE)), overrides))
    except JobSpecError:
        return None


def given_file(path: Path | None, spec: JobSpec | None, assignments: Sequence[str]) -> str | None:
    """Return the job's file as it was given, with `--set` as a comment; None for a resumed job."""
    if path is None or spec is None:
        return None
    changes = {key: value for key, _, value in (one.partition("=") for one in assignments)}
    return given_text(path, spec, changes)


def refuse_without_servers(spec: JobSpec) -> None:
    """Raise JobSpecError for policies whose servers' environment is not on this machine, which the
    cluster that is about to start has alone."""
    if problems := examine_servers(spec, 0)[0]:
        raise JobSpecError(problems)


def settings_of_job(spec: JobSpec, settings: ClusterSettings) -> ClusterSettings:
    """Return the settings of a cluster for this job alone, on all of the machine's devices."""
    made = settings.model_copy(update={"devices_per_trainer": 1, "colocate": bool(spec.colocated)})
    shares, _ = fill(spec, made.inventory(), made.asked)
    return made.model_copy(update={"devices_per_trainer": shares.devices_per_trainer})


async def run(plan: TrainPlan, console: Console) -> int:
    """Train as `plan` says; return the exit status. Raises errors for the command line."""
    with Interrupts() as interrupts:
        ended = await train_job(plan, console, interrupts)
    if ended is None:
        return interrupts.status
    return 0 if ended.job.require_success().state == JobState.SUCCEEDED else FAILED


async def train_job(plan: TrainPlan, console: Console, interrupts: Interrupts) -> Result | None:
    """Train as `plan` says, and print progress and summary; return the ended job, whatever its
    state, or None after a signal."""
    try:
        async with open_session(
            plan.settings,
            address=plan.address,
            keep_up=plan.keep_up,
            interrupts=interrupts,
            say=lambda text: console.print(text, style="dim", highlight=False, soft_wrap=True),
        ) as session:
            conclude = await _Training(plan, session, interrupts, console).run()
    except Interrupted:
        return None
    # The cluster has stopped, so the summary is the last output.
    return conclude()


class _Training:
    """A run of one job: submitted or resumed, then followed until its end or a signal."""

    def __init__(
        self, plan: TrainPlan, session: Session, interrupts: Interrupts, console: Console
    ) -> None:
        self._plan = plan
        self._session = session
        self._interrupts = interrupts
        self._console = console

    async def run(self) -> Callable[[], Result | None]:
        """Run until the job has ended or a signal comes; return the conclusion as a function.

        That function prints the summary and returns the ended job, or None after a signal.
        """
        # A resumed job's earlier events are not shown again.
        since = datetime.now(UTC) if self._plan.resume else None
        handle = await self._interrupts.guard(self._submit_or_resume())
        job = await handle.info()
        progress = Progress(job)
        try:
            with make_display(self._console) as display:
                await self._interrupts.guard(self._follow(handle, progress, display, since))
        except Interrupted:
            await self._leave(handle)
            return lambda: self._print_how_to_resume(handle.id)
        job, checkpoints = await handle.info(), await handle.checkpoints()
        pairs = await handle.before_and_after(_CONVERSATIONS)
        panel = self._session.panel
        if self._session.own is not None:
            panel = f"troupe up --data-dir {self._plan.settings.data_dir}"

        def conclude() -> Result:
            print_conversations(self._console, pairs)
            print_summary(self._console, job, checkpoints, progress, panel)
            return Result(job, tuple(checkpoints))

        return conclude

    async def _submit_or_resume(self) -> AsyncJobHandle:
        client = self._session.client
        plan = self._plan
        if plan.spec is not None:
            return await client.submit(
                plan.spec, plan.job_id, tags=plan.tags, notes=plan.notes, given=plan.given
            )
        assert self._plan.resume is not None  # train()
        handle = client.job(self._plan.resume)
        overrides = self._plan.overrides
        state = (await _settled(handle)).state
        # Without more steps, a job that has succeeded has nothing left.
        if overrides or (state.resumable and state != JobState.SUCCEEDED):
            await handle.resume(overrides=overrides)
        return handle

    async def _follow(
        self,
        handle: AsyncJobHandle,
        progress: Progress,
        display: Display,
        since: datetime | None,
    ) -> None:
        """Follow the job until it has ended; raises when a service of our cluster has failed."""
        following = asyncio.create_task(follow(handle, progress, display, since))
        waiting: set[asyncio.Task[object]] = {following}
        if self._session.own is not None:
            waiting.add(asyncio.create_task(self._session.own.failure()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting - {following}:
                if task.done():
                    failure = task.result()
                    assert isinstance(failure, TroupeError)
                    raise failure
            following.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _leave(self, handle: AsyncJobHandle) -> None:
        """After Ctrl-C: pause the job if the cluster ends with this command."""
        if self._session.own is None:
            return
        say = self._console.print
        say("pausing the job after its step; Ctrl-C again stops it now", style="yellow")
        try:
            await self._interrupts.guard(self._pause(handle))
        except (Interrupted, TimeoutError):
            say("stopping within a step: committed steps stay", style="yellow")
        except TroupeError as error:
            # The job has ended meanwhile, or the orchestrator is unreachable: stop anyway.
            say(str(error), style="yellow", highlight=False)

    def _print_how_to_resume(self, job_id: str) -> None:
        if self._session.own is None:
            text = (
                f"the job keeps running; `troupe jobs watch {job_id}` shows it, "
                f"`troupe jobs pause {job_id}` or `cancel` stops it"
            )
        else:
            data_dir = self._plan.settings.data_dir
            text = f"resume with: troupe train --resume {job_id} --data-dir {data_dir}"
        self._console.print(text, highlight=False, soft_wrap=True)

    async def _pause(self, handle: AsyncJobHandle) -> None:
        async with asyncio.timeout(self._plan.grace):
            await handle.pause()
            await _settled(handle)


async def _settled(handle: AsyncJobHandle) -> Job:
    """Wait until a pausing or cancelling job is paused or has ended."""
    job = await handle.info()
    while job.state in (JobState.PAUSING, JobState.CANCELLING):
        await asyncio.sleep(0.25)
        job = await handle.info()
    return job
