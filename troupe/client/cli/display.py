"""The display of a job: its progress while it runs, its scores and files when it has ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from troupe.client.cli.options import (
    change,
    duration,
    make_table,
    number,
    score,
    shortened,
    sparkline,
)
from troupe.client.handle import AsyncJobHandle
from troupe.client.records.events import Activity, Event, MetricsLogged, Notice, StateChanged
from troupe.client.records.jobs import Checkpoint, Interval, Job, JobState, Trajectory
from troupe.contracts.metric_names import (
    BOUNDS,
    ENTROPY,
    EVALUATION,
    EVALUATIONS,
    GRAD_NORM,
    KL,
    NO_SIGNAL,
    POLICY_LOSS,
    SAMPLES,
    SKIPPED,
    STEP_SECONDS,
    TEAM,
    TEAM_MEAN,
    TOKENS_PER_SECOND,
    mean_reward,
)

# Steps over which the pace is averaged for the estimated time left.
_PACE_STEPS = 5


@dataclass(frozen=True)
class PolicyLine:
    """The newest metrics of one policy, for a line of the display."""

    name: str
    version: int
    # Whether the newest step updated it; None if no metric says so.
    updated: bool | None
    # Whether all advantages of the newest step were zero.
    flat: bool
    loss: float | None
    grad_norm: float | None
    kl: float | None
    entropy: float | None

    @property
    def without_loss(self) -> str:
        """Why the newest step has no loss; empty if it has one."""
        return "no update" if self.updated is False else "no signal" if self.flat else ""


class Progress:
    """State of a job for display, built from its events, which `apply` takes in order."""

    def __init__(self, job: Job) -> None:
        """Start from the job's record as it was before the first event."""
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
        # Only metrics of the newest step: an earlier step's value must not fill a gap.
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
                    # Time spent paused or starting must not count as a step's time.
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
            value = event.values.get(mean_reward(agent))
            if value is not None:
                self.rewards[agent].append(value)
        at = event.at.timestamp()
        seconds = event.values.get(STEP_SECONDS)
        if seconds is None and self._last_step_at is not None:
            seconds = at - self._last_step_at
        if seconds is not None:
            self._pace.append(seconds)
        self._last_step_at = at

    @property
    def tokens_per_second(self) -> float | None:
        """The number of tokens generated per second in the newest step."""
        return self.newest.get(TOKENS_PER_SECOND)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the job ends, by its recent pace; None if unknown."""
        if not self._pace or self.state.ended:
            return None
        return sum(self._pace) / len(self._pace) * max(0, self.total_steps - self.step)

    def reward(self, agent: str) -> float | None:
        """Return the agent's mean reward in the newest step."""
        return self.newest.get(mean_reward(agent))

    def policy(self, name: str) -> PolicyLine:
        """Return a policy's newest metrics; None each if the newest step did not update it."""
        known = f"{name}/{SKIPPED}" in self.newest
        updated = _updates(self.newest, name) if known else None

        def get(metric: str) -> float | None:
            # If the newest step trained the policy, an earlier step's value must not show.
            newest = self.newest if updated else self.metrics
            return None if updated is False else newest.get(f"{name}/{metric}")

        return PolicyLine(
            name=name,
            version=self._versions[name],
            updated=updated,
            flat=self.newest.get(f"{name}/{NO_SIGNAL}") == 1,
            loss=get(POLICY_LOSS),
            grad_norm=get(GRAD_NORM),
            kl=get(KL),
            entropy=get(ENTROPY),
        )


def _updates(values: Mapping[str, float], policy: str) -> bool:
    """Return whether a step with these metrics updated the policy."""
    applied = values.get(f"{policy}/{SKIPPED}") == 0
    return applied and values.get(f"{policy}/{SAMPLES}", 0) > 0


def is_step(event: MetricsLogged) -> bool:
    """Return whether the metrics come from a training step, not from an evaluation alone."""
    return any(not name.startswith((EVALUATION, EVALUATIONS)) for name in event.values)


def evaluation_of(event: MetricsLogged) -> dict[str, float]:
    """Return the held-out scores among the metrics by name: the team's and each agent's, pass@k and
    maj@k. Scores of a named evaluation are called `<evaluation>/<name>`."""
    return {name: event.values[metric] for name, metric in _scores_among(event.values)}


def _scores_among(metrics: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the metric of each held-out score."""
    for metric in sorted(metrics):
        if metric.startswith(EVALUATIONS):
            label, _, name = metric.removeprefix(EVALUATIONS).partition("/")
            label += "/"
        elif metric.startswith(EVALUATION):
            label, name = "", metric.removeprefix(EVALUATION)
        else:
            continue
        parts = name.split("/")
        if name.startswith(("pass@", "maj@")) and len(parts) == 1:
            yield label + name, metric
        elif parts[0] == "reward" and len(parts) == 3:
            yield label + parts[1], metric
        elif parts == [TEAM, "mean"]:
            yield f"{label}team", metric


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
        """Return the tables of agents and policies with the current activity."""
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
        if TEAM in progress.evaluation or TEAM_MEAN in progress.metrics:
            team = progress.newest.get(TEAM_MEAN)
            held_out = progress.evaluation.get(TEAM)
            table.add_row(Text(TEAM, style="italic"), score(team), score(held_out), "")
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
                policy.without_loss or number(policy.loss),
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
    """A display for output that is not a terminal: one line per event. A context manager."""

    def __init__(self, stream: IO[str]) -> None:
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
        """Print a line about `event`, which has been applied to `progress`; skip activities."""
        match event:
            case StateChanged():
                why = f": {event.problem}" if event.problem else ""
                self.say(f"job {progress.job_id} {event.state.clause}{why}")
            case Notice():
                self.say(f"{event.severity}: {event.text}")
            case MetricsLogged() if is_step(event):
                self.say(self._step_line(progress))
            case MetricsLogged():
                scores = " ".join(
                    f"{name} {with_interval(event.values[metric], bounds_in(event.values, metric))}"
                    for name, metric in _scores_among(event.values)
                )
                when = f"after step {event.step}" if event.step else "before step 1"
                self.say(f"evaluation {when} | {scores}")

    def _step_line(self, progress: Progress) -> str:
        parts = [f"step {progress.step}/{progress.total_steps}"]
        rewards = [
            f"{agent} {score(value)}"
            for agent in progress.agents
            if (value := progress.reward(agent)) is not None
        ]
        if TEAM_MEAN in progress.newest:
            rewards.append(f"team {score(progress.newest[TEAM_MEAN])}")
        if rewards:
            parts.append("reward " + " ".join(rewards))
        for name in progress.policies:
            policy = progress.policy(name)
            numbers = f"loss {number(policy.loss)} grad {number(policy.grad_norm)}"
            numbers = policy.without_loss or numbers
            parts.append(f"{name} v{policy.version} {numbers}")
        if progress.tokens_per_second:  # small networks generate no tokens
            parts.append(f"{number(progress.tokens_per_second)} tok/s")
        parts.append(f"eta {duration(progress.seconds_left)}")
        return " | ".join(parts)


Display = LiveDisplay | PlainDisplay


def make_display(console: Console) -> Display:
    """Return the live display on a terminal, else the plain one."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console.file)


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
    """Print a job's scores and the places of its files. `panel` tells how to open the panel."""
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
    if job.early_end is not None:
        text = f"before its last step: {job.early_end.text}"
        console.print(f"{'end':<12} {escape(text)}", highlight=False, soft_wrap=True)
    if job.best is not None:
        one = job.best
        policies = ", ".join(f"{policy}@{version}" for policy, version in one.versions.items())
        text = f"{policies} of step {one.step}: {one.metric} = {one.value:g}"
        console.print(f"{'best':<12} {escape(text)}", highlight=False, soft_wrap=True)
    if job.split_hint:
        console.print(f"{'split':<12} {escape(job.split_hint)}", highlight=False, soft_wrap=True)
    if signals := signal_line(job):
        console.print(f"{'signal':<12} {escape(signals)}", highlight=False, soft_wrap=True)
    title, rows = scores(job, progress)
    if rows and not job.total_steps:
        table = make_table((title,), ("score",))
        for name, value, _ in rows:
            table.add_row(escape(name), with_interval(value, job.before_intervals.get(name)))
        console.print(table)
    elif rows:
        table = make_table((title,), ("before", "after", "change"))
        for name, before, after in rows:
            table.add_row(
                escape(name),
                with_interval(before, job.before_intervals.get(name)),
                with_interval(after, job.after_intervals.get(name)),
                change(before, after),
            )
        console.print(table)
        if title == _TRAINING:
            console.print(_NO_EVALUATION, highlight=False, soft_wrap=True)
    if job.before_intervals or job.after_intervals:
        console.print("In brackets: 95 % confidence intervals.", highlight=False)
    for name, place in places(job, checkpoints, panel):
        # soft_wrap: a path with a line break cannot be copied.
        console.print(f"{name:<12} {escape(place)}", highlight=False, soft_wrap=True)


def print_conversations(console: Console, pairs: Sequence[tuple[Trajectory, Trajectory]]) -> None:
    """Print conversations about held-out queries, before and after training side by side."""
    for before, after in pairs:
        # A trajectory that failed before its first turn has none.
        turns = (*before.conversation[:1], *after.conversation[:1])
        asked = next((text for t in turns for role, text in t.messages if role == "user"), "")
        table = Table(
            title=Text(shortened(asked), style="bold"), title_justify="left", box=box.SIMPLE_HEAD
        )
        for one in (before, after):
            table.add_column(f"after step {one.step}" if one.step else "before", ratio=1)
        table.add_row(_conversation(before), _conversation(after))
        console.print(table)


def _conversation(trajectory: Trajectory) -> Text:
    text = Text()
    for turn in trajectory.conversation:
        text.append(f"{turn.agent}: ", style="cyan")
        text.append(f"{shortened(turn.response.strip())}\n")
    rewards = "  ".join(f"{name} {score(value)}" for name, value in trajectory.rewards.items())
    return text.append(rewards or trajectory.reason or trajectory.state, style="dim")


def with_interval(value: float | None, bounds: Interval | None) -> str:
    """Return a score with its 95 % interval, if known: `0.280 [0.222, 0.346]`."""
    text = score(value)
    return text if bounds is None else f"{text} [{score(bounds.low)}, {score(bounds.high)}]"


def bounds_in(metrics: Mapping[str, float], metric: str) -> Interval | None:
    """Return the interval of a metric; None if the metrics do not have it."""
    low, high = (metrics.get(f"{metric}{end}") for end in BOUNDS)
    return None if low is None or high is None else Interval(low, high)


def signal_line(job: Job) -> str:
    """Return the number of steps with a signal: `solver 12 of 20 steps, checker 0 of 20 steps`."""
    return ", ".join(
        f"{policy} {count} of {job.step} steps"
        for policy, count in sorted(job.signal_steps.items())
    )


def scores(
    job: Job, progress: Progress | None
) -> tuple[str, list[tuple[str, float | None, float | None]]]:
    """Return the title and rows (name, before, after) of the table of scores.

    It shows the held-out evaluation if the job has one, else the training rewards of the first and
    the last step.
    """
    names = [n for n in {**job.before, **job.after} if "trajectories/" not in n]
    if names:
        # Grouped by evaluation; within each, rewards come last.
        names.sort(key=lambda n: (n.partition("reward/")[0].rpartition("/")[0], "reward/" in n, n))
        return "held out", [(n, job.before.get(n), job.after.get(n)) for n in names]
    if progress is None:
        return "", []
    rewards = {agent: values for agent, values in progress.rewards.items() if values}
    return _TRAINING, [(a, v[0], v[-1]) for a, v in rewards.items()]


def places(job: Job, checkpoints: list[Checkpoint], panel: str) -> list[tuple[str, str]]:
    """Return (name, path or command) for a job's metrics, logs and checkpoints."""
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
