"""`troupe train`: runs a job on an embedded or given cluster, and shows its progress and result.

`Progress`, the displays and `print_summary` also serve `troupe jobs`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Annotated, TextIO

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from troupe.client.aio import AsyncClient, check_address, settings_for
from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.interrupts import Interrupted, Interrupts
from troupe.client.cli.options import change, duration, make_table, number, score, sparkline
from troupe.client.cli.specification import load_with
from troupe.client.handle import AsyncJobHandle
from troupe.client.records import (
    Activity,
    Checkpoint,
    Event,
    Job,
    JobCancelled,
    JobFailed,
    JobState,
    MetricsLogged,
    Notice,
    StateChanged,
)
from troupe.cluster.daemon import start_detached
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import ClusterState, running_state, sign_in_link
from troupe.job import JobSpec
from troupe.rpc.errors import InvalidArgument, TroupeError

# Steps over which the pace is averaged for the estimated time left.
_PACE_STEPS = 5
# What metrics of evaluations begin with: that of the section `evaluation`, and named ones.
EVALUATION = "evaluation/"
EVALUATIONS = "evaluations/"


@dataclass(frozen=True)
class PolicyLine:
    """The newest metrics of one policy, for a line of the display."""

    name: str
    version: int
    # Whether the newest step updated it; None: the step has no metric about that.
    updated: bool | None
    loss: float | None
    grad_norm: float | None
    kl: float | None
    entropy: float | None


class Progress:
    """State of a job for display, built from its events, which `apply` takes in order."""

    def __init__(self, job: Job) -> None:
        """Starts from the job's record as it was before the first event."""
        spec = job.spec
        self.job_id = job.id
        self.mode = job.mode
        self.total_steps = job.total_steps
        self.agents = list(spec.get("agents", {}))
        self.policies = [
            name for name, policy in spec.get("policies", {}).items() if policy["trainable"]
        ]
        self.state = job.state
        self.step = 0
        self.activity = ""
        self.activity_done: tuple[float, float] = (0.0, 0.0)
        self.metrics: dict[str, float] = {}
        # Metrics of the newest step alone: a missing value must not be one of an earlier step.
        self.newest: Mapping[str, float] = {}
        self.rewards: defaultdict[str, list[float]] = defaultdict(list)
        self.before: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self.problem = job.problem
        # Counted from the events, so that a replay shows the versions of its time.
        self._versions = dict.fromkeys(self.policies, 0)
        self._pace: deque[float] = deque(maxlen=_PACE_STEPS)
        self._last_step_at: float | None = None

    def apply(self, event: Event) -> None:
        """Update the state with one event."""
        match event:
            case StateChanged():
                self.state = event.state
                self.problem = event.problem
                if event.state != JobState.RUNNING:
                    # Time spent paused or starting must not count as that of a step.
                    self._last_step_at = None
                if event.state.ended:
                    self.activity = ""
            case MetricsLogged():
                self._add_metrics(event)
            case Activity():
                self.activity = event.text
                self.activity_done = (event.done, event.total)
                self.total_steps = event.total_steps or self.total_steps
            case Notice():
                pass

    def _add_metrics(self, event: MetricsLogged) -> None:
        self.metrics.update(event.values)
        if is_step(event):
            self.newest = event.values
        evaluation = evaluation_of(event)
        if evaluation:
            self.before = evaluation | self.before
            self.evaluation = self.evaluation | evaluation
        if not is_step(event):
            return
        self.step = max(self.step, event.step)
        for policy in self.policies:
            self._versions[policy] += _updates(event.values, policy)
        for agent in self.agents:
            value = event.values.get(f"reward/{agent}/mean")
            if value is not None:
                self.rewards[agent].append(value)
        at = event.at.timestamp()
        seconds = event.values.get("step/seconds")
        if seconds is None and self._last_step_at is not None:
            seconds = at - self._last_step_at
        if seconds is not None:
            self._pace.append(seconds)
        self._last_step_at = at

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second in the newest step."""
        return self.newest.get("rollout/tokens_per_second")

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the job ends, by the pace of the newest steps; None: unknown."""
        if not self._pace or self.state.ended:
            return None
        return sum(self._pace) / len(self._pace) * max(0, self.total_steps - self.step)

    def reward(self, agent: str) -> float | None:
        """The agent's mean reward in the newest step."""
        return self.newest.get(f"reward/{agent}/mean")

    def policy(self, name: str) -> PolicyLine:
        """The newest metrics of a policy; None each where the newest step did not update it."""
        known = f"{name}/skipped" in self.newest
        updated = _updates(self.newest, name) if known else None

        def get(metric: str) -> float | None:
            return None if updated is False else self.metrics.get(f"{name}/{metric}")

        return PolicyLine(
            name=name,
            version=self._versions[name],
            updated=updated,
            loss=get("loss/policy"),
            grad_norm=get("grad_norm"),
            kl=get("kl"),
            entropy=get("entropy"),
        )


def _updates(values: Mapping[str, float], policy: str) -> bool:
    """Whether a step with these metrics updated the policy."""
    return values.get(f"{policy}/skipped") == 0 and values.get(f"{policy}/samples", 0) > 0


def is_step(event: MetricsLogged) -> bool:
    """Whether the metrics are those of a training step (and not of an evaluation alone)."""
    return any(not name.startswith((EVALUATION, EVALUATIONS)) for name in event.values)


def evaluation_of(event: MetricsLogged) -> dict[str, float]:
    """Held-out scores among the metrics: the team's and each agent's, pass@k and maj@k, by name;
    those of a named evaluation as `<evaluation>/<name>`."""
    scores: dict[str, float] = {}
    for metric, value in sorted(event.values.items()):
        if metric.startswith(EVALUATIONS):
            label, _, name = metric.removeprefix(EVALUATIONS).partition("/")
            label += "/"
        elif metric.startswith(EVALUATION):
            label, name = "", metric.removeprefix(EVALUATION)
        else:
            continue
        parts = name.split("/")
        if name.startswith(("pass@", "maj@")) and len(parts) == 1:
            scores[label + name] = value
        elif parts[0] == "reward" and len(parts) == 3:
            scores[label + parts[1]] = value
        elif parts == ["team", "mean"]:
            scores[f"{label}team"] = value
    return scores


_STATE_STYLE = {
    "running": "bold green",
    "succeeded": "bold green",
    "failed": "bold red",
    "cancelled": "bold yellow",
    "paused": "bold yellow",
    "pausing": "yellow",
    "cancelling": "yellow",
}
_SEVERITY_STYLE = {"info": "dim", "warning": "yellow", "error": "red"}


class LiveDisplay:
    """A live table on a terminal, below the lines of notices. A context manager."""

    def __init__(self, console: Console) -> None:
        """`console` must be a terminal."""
        self._console = console
        self._live = Live(
            console=console, refresh_per_second=4, transient=False, vertical_overflow="ellipsis"
        )
        self._ascii = not (console.encoding or "").lower().startswith("utf")

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """Print one line above the live table."""
        self._console.print(escape(text), style="dim", highlight=False)

    def show(self, progress: Progress, event: Event) -> None:
        """Redraw `progress`, to which `event` has been applied."""
        match event:
            case Notice():
                style = _SEVERITY_STYLE[event.severity]
                self._console.print(escape(event.text), style=style, highlight=False)
            case StateChanged() if event.problem is not None:
                self._console.print(escape(str(event.problem)), style="red", highlight=False)
        self._live.update(self.picture(progress))

    def picture(self, progress: Progress) -> RenderableType:
        """The tables of agents and policies with the current activity."""
        parts: list[RenderableType] = [self._header(progress), self._agents(progress)]
        if progress.policies:
            parts.append(self._policies(progress))
        parts.append(_activity(progress))
        return Group(*parts)

    def _header(self, progress: Progress) -> RenderableType:
        line = Text.assemble(
            (progress.job_id, "bold"),
            "  ",
            (str(progress.state), _STATE_STYLE.get(progress.state, "cyan")),
            f"  {progress.mode}  step {progress.step}/{progress.total_steps}",
            f"  eta {duration(progress.seconds_left)}",
            # Small networks generate no tokens.
            f"  {number(progress.tokens_per_second)} tok/s" if progress.tokens_per_second else "",
        )
        grid = Table.grid(padding=(0, 0))
        grid.add_row(line)
        grid.add_row(ProgressBar(total=max(1, progress.total_steps), completed=progress.step))
        return grid

    def _agents(self, progress: Progress) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("agent")
        table.add_column("reward", justify="right")
        table.add_column("held out", justify="right")
        table.add_column("training reward per step", min_width=24)
        for agent in progress.agents:
            values = progress.rewards.get(agent, [])
            table.add_row(
                escape(agent),
                score(progress.reward(agent)),
                score(progress.evaluation.get(agent)),
                Text(sparkline(values, ascii_only=self._ascii), style="cyan"),
            )
        if "team" in progress.evaluation or "team/mean" in progress.metrics:
            team, held_out = progress.newest.get("team/mean"), progress.evaluation.get("team")
            table.add_row(Text("team", style="italic"), score(team), score(held_out), "")
        return table

    def _policies(self, progress: Progress) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("policy", "version", "loss", "grad norm", "kl", "entropy"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name in progress.policies:
            policy = progress.policy(name)
            table.add_row(
                escape(name),
                str(policy.version),
                "no update" if policy.updated is False else number(policy.loss),
                number(policy.grad_norm),
                number(policy.kl),
                number(policy.entropy),
            )
        return table


def _activity(progress: Progress) -> RenderableType:
    done, total = progress.activity_done
    grid = Table.grid(padding=(0, 2, 0, 0))
    if not progress.activity or total <= 0:
        grid.add_row(Text(progress.activity, style="dim"))
    else:
        bar = ProgressBar(total=total, completed=done, width=24)
        grid.add_row(bar, Text(progress.activity, style="dim"))
    return grid


class PlainDisplay:
    """Prints a line per event, where the output is no terminal. A context manager."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` is flushed after each line, for `tee` and CI logs."""
        self._stream = stream

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Print one line."""
        print(text, file=self._stream, flush=True)

    def show(self, progress: Progress, event: Event) -> None:
        """Print a line about `event`, which has been applied to `progress`; none for activities."""
        match event:
            case StateChanged():
                why = f": {event.problem}" if event.problem else ""
                self.say(f"job {progress.job_id} is {event.state}{why}")
            case Notice():
                self.say(f"{event.severity}: {event.text}")
            case MetricsLogged() if is_step(event):
                self.say(self._step_line(progress))
            case MetricsLogged():
                scores = " ".join(f"{k} {score(v)}" for k, v in evaluation_of(event).items())
                self.say(f"evaluation after {event.step} steps | {scores}")

    def _step_line(self, progress: Progress) -> str:
        parts = [f"step {progress.step}/{progress.total_steps}"]
        rewards = [
            f"{agent} {score(value)}"
            for agent in progress.agents
            if (value := progress.reward(agent)) is not None
        ]
        if "team/mean" in progress.newest:
            rewards.append(f"team {score(progress.newest['team/mean'])}")
        if rewards:
            parts.append("reward " + " ".join(rewards))
        for name in progress.policies:
            policy = progress.policy(name)
            numbers = f"loss {number(policy.loss)} grad {number(policy.grad_norm)}"
            if policy.updated is False:
                numbers = "no update"
            parts.append(f"{name} v{policy.version} {numbers}")
        if progress.tokens_per_second:  # small networks generate no tokens
            parts.append(f"{number(progress.tokens_per_second)} tok/s")
        parts.append(f"eta {duration(progress.seconds_left)}")
        return " | ".join(parts)


Display = LiveDisplay | PlainDisplay


def make_display(console: Console) -> Display:
    """The live display on a terminal, else the plain one."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(sys.stdout)


async def follow(
    handle: AsyncJobHandle,
    progress: Progress,
    display: Display,
    since: datetime | None = None,
) -> None:
    """Show the job until it has ended; events before `since` are applied but not shown."""
    async for event in handle.watch():
        progress.apply(event)
        if since is None or event.at >= since:
            display.show(progress, event)


_TRAINING = "training reward"
_NO_EVALUATION = (
    "Of the first and the last step; what was not trained on is scored where the job has "
    "evaluation.queries."
)


def print_summary(
    console: Console,
    job: Job,
    checkpoints: list[Checkpoint],
    progress: Progress | None = None,
    panel: str = "",
) -> None:
    """Print the scores of a job and where its files are. `panel`: how to open the panel."""
    console.print()
    took = ""
    if job.started_at and job.ended_at:
        took = f" in {duration((job.ended_at - job.started_at).total_seconds())}"
    console.print(
        f"[bold]{escape(job.id)}[/bold] {job.state}{took} after {job.step} of "
        f"{job.total_steps} steps",
        highlight=False,
    )
    if job.problem is not None and job.state == JobState.SUCCEEDED:
        console.print(
            f"[bold yellow]nothing was learned[/bold yellow]: {escape(str(job.problem))}",
            highlight=False,
            soft_wrap=True,
        )
    title, rows = scores(job, progress)
    if rows and not job.total_steps:
        table = make_table((title,), ("score", "95 % interval"))
        for name, value, _ in rows:
            table.add_row(escape(name), score(value), interval_of(job, name))
        console.print(table)
    elif rows:
        table = make_table((title,), ("before", "after", "change"))
        for name, before, after in rows:
            table.add_row(
                escape(name),
                score(before),
                f"{score(after)} {interval_of(job, name)}".rstrip(),
                change(before, after),
            )
        console.print(table)
        if title == _TRAINING:
            console.print(_NO_EVALUATION, highlight=False, soft_wrap=True)
    for name, place in places(job, checkpoints, panel):
        # soft_wrap: a path with a line break cannot be copied.
        console.print(f"{name:<12} {escape(place)}", highlight=False, soft_wrap=True)


def interval_of(job: Job, name: str) -> str:
    """The newest 95 % interval of a score, where it has one."""
    for prefix in (EVALUATION, EVALUATIONS):
        bounds = [job.metrics.get(f"{prefix}{name}/{end}") for end in ("low", "high")]
        if None not in bounds:
            return " to ".join(map(score, bounds))
    return ""


def scores(
    job: Job, progress: Progress | None
) -> tuple[str, list[tuple[str, float | None, float | None]]]:
    """Title and rows (name, before, after) of the table of scores.

    Held-out evaluation where the job has one, else the training rewards of the first and the last
    step.
    """
    names = [n for n in {**job.before, **job.after} if "trajectories/" not in n]
    if names:
        # Named evaluations one after another, in each of them rewards last.
        names.sort(key=lambda n: (n.partition("reward/")[0].rpartition("/")[0], "reward/" in n, n))
        return "held out", [(n, job.before.get(n), job.after.get(n)) for n in names]
    if progress is None:
        return "", []
    rewards = {agent: values for agent, values in progress.rewards.items() if values}
    return _TRAINING, [(a, v[0], v[-1]) for a, v in rewards.items()]


def places(job: Job, checkpoints: list[Checkpoint], panel: str) -> list[tuple[str, str]]:
    """(name, path or command) of the metrics, logs and checkpoints of a job."""
    found: list[tuple[str, str]] = []
    if job.directory:
        directory = PurePath(job.directory)
        found.append(("metrics", str(directory / "metrics.jsonl")))
        if job.spec.get("logging", {}).get("tensorboard"):
            found.append(("tensorboard", f"tensorboard --logdir {directory / 'tensorboard'}"))
    newest: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        known = newest.get(checkpoint.policy)
        if known is None or known.version < checkpoint.version:
            newest[checkpoint.policy] = checkpoint
    for index, policy in enumerate(sorted(newest)):
        found.append(("checkpoints" if index == 0 else "", newest[policy].path))
    if panel:
        found.append(("panel", panel))
    return found


@dataclass(frozen=True)
class Session:
    """A connection to the cluster that trains, and that cluster where this command started it."""

    client: AsyncClient
    panel: str
    # The cluster of this command, which ends with it; None: another one, which runs on.
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
    """Connect to a running cluster or start one, which is stopped at the end in any case.

    Raises `Interrupted` when a signal comes while it starts, or the error of its start.
    """
    own: EmbeddedCluster | None = None
    try:
        if address is not None:
            target, panel = check_address(address), ""
        else:
            state = running_state(settings.data_dir)
            if state is not None:
                say(f"using the cluster that runs in {settings.data_dir}")
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
    """Arguments of one `troupe train`."""

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
    devices: options.Devices = None,
    engine_devices: options.EngineDevices = None,
    trainer_devices: options.TrainerDevices = None,
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
    spec = None if job is None else load_with(job, assignments or [])
    plan = TrainPlan(
        spec=spec,
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
            devices=devices,
            engine_devices=engine_devices,
            trainer_devices=trainer_devices,
            devices_per_trainer=None if spec is None else _largest_gang(spec),
            colocate=spec is not None and bool(spec.colocated),
        ).resolved(),
    )
    raise typer.Exit(asyncio.run(run(plan, Console())))


def _largest_gang(spec: JobSpec) -> int:
    """Devices that the job's largest gang needs of one trainer."""
    return max((one.trainer.gang for one in spec.policies.values() if one.trainable), default=1)


async def run(plan: TrainPlan, console: Console) -> int:
    """Train as `plan` says; returns the exit status. Raises errors for the command line."""
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
    # After the cluster has stopped, so that the summary is the last output.
    return conclude()


class _Training:
    """Submits or resumes one job and follows it until it has ended or a signal comes."""

    def __init__(
        self, plan: TrainPlan, session: Session, interrupts: Interrupts, console: Console
    ) -> None:
        self._plan = plan
        self._session = session
        self._interrupts = interrupts
        self._console = console

    async def run(self) -> Callable[[], int]:
        """Run until the job has ended or a signal comes; returns the conclusion as a function.

        That function prints the summary and returns the exit status, or raises the job's error.
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
            say("stopping within a step: what is committed stays", style="yellow")
        except TroupeError as error:
            # The job has ended meanwhile, or the orchestrator is unreachable: stop all the same.
            say(str(error), style="yellow", highlight=False)

    def _print_how_to_resume(self, job_id: str) -> int:
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
