"""`troupe train`: from a YAML file to a trained team in one command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.follow import Display, follow, make_display
from troupe.client.cli.interrupts import Interrupted, Interrupts
from troupe.client.cli.progress import Progress
from troupe.client.cli.session import Session, open_session
from troupe.client.cli.specification import load_with
from troupe.client.cli.summary import print_summary
from troupe.client.errors import JobCancelled, JobFailed
from troupe.client.handle import AsyncJobHandle
from troupe.client.records import Job, JobState
from troupe.cluster.settings import ClusterSettings
from troupe.job import JobSpec
from troupe.rpc.errors import InvalidArgument, TroupeError


@dataclass(frozen=True)
class Plan:
    """What one `troupe train` is to do."""

    spec: JobSpec | None
    job_id: str | None
    resume: str | None
    address: str | None
    keep_up: bool
    grace: float
    settings: ClusterSettings


def train(
    job: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", show_default=False)] = None,
    assignments: options.Assignments = None,
    resume: Annotated[
        str | None, typer.Option(metavar="JOB_ID", help="Go on with a job instead of a new one.")
    ] = None,
    job_id: Annotated[str | None, typer.Option(help="Id of the new job.")] = None,
    cluster: options.ClusterAddress = None,
    keep_up: Annotated[
        bool, typer.Option("--keep-up", help="Leave the cluster running afterwards.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds that Ctrl-C gives the step in flight to finish.")
    ] = 20.0,
    data_dir: options.DataDir = None,
    rollouts: options.Rollouts = None,
    trainers: options.Trainers = None,
    threads: options.Threads = None,
    panel: options.Panel = True,
    panel_port: options.PanelPort = None,
    redis_url: options.RedisUrl = None,
    redis_port: options.RedisPort = None,
    start_timeout: options.StartTimeout = 120.0,
) -> None:
    """Train a job, showing progress. Starts an embedded cluster unless one runs here.

    Ctrl-C pauses the job and stops the cluster; the job can be resumed.
    """
    if (job is None) == (resume is None):
        raise InvalidArgument(
            "give either a job file or --resume JOB_ID.", field="JOB.yaml", value=job
        )
    unused = {"--set": assignments, "--job-id": job_id}
    for option, value in unused.items():
        if resume is not None and value:
            raise InvalidArgument(
                "is of a new job; one that is resumed goes on as it was.",
                field=option,
                value=value if isinstance(value, str) else value[0],
                remedy=f"Leave it out, or change the job: troupe jobs resume {resume} --spec FILE.",
            )
    plan = Plan(
        spec=None if job is None else load_with(job, assignments or []),
        job_id=job_id,
        resume=resume,
        address=cluster,
        keep_up=keep_up,
        grace=grace,
        settings=options.cluster_settings(
            data_dir=data_dir,
            rollouts=rollouts,
            trainers=trainers,
            threads=threads,
            panel=panel,
            panel_port=panel_port,
            redis_url=redis_url,
            redis_port=redis_port,
            start_timeout=start_timeout,
        ).resolved(),
    )
    raise typer.Exit(asyncio.run(run(plan, Console())))


async def run(plan: Plan, console: Console) -> int:
    """Carry `plan` out; returns the exit status. Raises what ends in an error line."""
    with Interrupts() as interrupts:
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
            return interrupts.status
    # With the cluster stopped, so that what matters stands last on the screen.
    return conclude()


class _Training:
    """One job on one cluster, from submission to summary."""

    def __init__(
        self, plan: Plan, session: Session, interrupts: Interrupts, console: Console
    ) -> None:
        self._plan = plan
        self._session = session
        self._interrupts = interrupts
        self._console = console

    async def run(self) -> Callable[[], int]:
        """Until the job has ended or somebody interrupts; what is left to tell, as a function.

        That function returns the exit status or raises what became of the job.
        """
        # A resumed job's past is known already.
        since = datetime.now(UTC) if self._plan.resume else None
        handle = await self._interrupts.guard(self._submit_or_resume())
        job = await handle.info()
        progress = Progress(job)
        try:
            with make_display(self._console) as display:
                await self._interrupts.guard(self._follow(handle, progress, display, since))
        except Interrupted:
            await self._leave(handle)
            return lambda: self._say_how_to_go_on(handle.id)
        job, checkpoints = await handle.info(), await handle.checkpoints()
        panel = self._session.panel
        if self._session.own is not None:
            panel = f"troupe up --data-dir {self._plan.settings.data_dir}"

        def conclude() -> int:
            print_summary(self._console, job, checkpoints, progress, panel)
            return _verdict(job)

        return conclude

    async def _submit_or_resume(self) -> AsyncJobHandle:
        client = self._session.client
        if self._plan.spec is not None:
            return await client.submit(self._plan.spec, self._plan.job_id)
        assert self._plan.resume is not None  # train()
        handle = client.job(self._plan.resume)
        if (await _settled(handle)).state.resumable:
            await handle.resume()
        return handle

    async def _follow(
        self,
        handle: AsyncJobHandle,
        progress: Progress,
        display: Display,
        since: datetime | None,
    ) -> None:
        """Until the job has ended; raises when a service of our own cluster is given up."""
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
        """After Ctrl-C: pause the job if the cluster goes with us."""
        if self._session.own is None:
            return
        say = self._console.print
        say("pausing the job after its step; Ctrl-C again stops it now", style="yellow")
        try:
            await self._interrupts.guard(self._pause(handle))
        except (Interrupted, TimeoutError):
            say("stopping within a step: what is committed stays", style="yellow")
        except TroupeError as error:
            # It ended meanwhile, or the orchestrator is away: stopping is right all the same.
            say(str(error), style="yellow", highlight=False)

    def _say_how_to_go_on(self, job_id: str) -> int:
        if self._session.own is None:
            text = (
                f"the job goes on; `troupe jobs watch {job_id}` shows it, "
                f"`troupe jobs pause {job_id}` or `cancel` stops it"
            )
        else:
            data_dir = self._plan.settings.data_dir
            text = f"resume with: troupe train --resume {job_id} --data-dir {data_dir}"
        self._console.print(text, highlight=False, soft_wrap=True)
        return self._interrupts.status

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


def _verdict(job: Job) -> int:
    if job.state == JobState.FAILED:
        raise JobFailed(job)
    if job.state == JobState.CANCELLED:
        raise JobCancelled(job)
    return 0 if job.state == JobState.SUCCEEDED else FAILED
