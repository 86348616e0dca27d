"""What is printed when a job is over: before and after, and where everything is."""

from __future__ import annotations

from pathlib import PurePath

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from troupe.client.cli.formats import change, duration, score
from troupe.client.cli.progress import Progress
from troupe.client.records import Checkpoint, Job, JobState

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
    """Print the table of scores and the places. `panel` says how to see the panel."""
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
    if rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None)
        table.add_column(title)
        for column in ("before", "after", "change"):
            table.add_column(column, justify="right")
        for name, before, after in rows:
            table.add_row(escape(name), score(before), score(after), change(before, after))
        console.print(table)
        if title == _TRAINING:
            console.print(_NO_EVALUATION, highlight=False, soft_wrap=True)
    for name, place in places(job, checkpoints, panel):
        # soft_wrap: a path broken in two cannot be copied.
        console.print(f"{name:<12} {escape(place)}", highlight=False, soft_wrap=True)


def scores(
    job: Job, progress: Progress | None
) -> tuple[str, list[tuple[str, float | None, float | None]]]:
    """Title and rows (name, before, after) of the table.

    Held-out evaluation where the job has one; else the training rewards of the first and the
    last step, which say less.
    """
    names = [n for n in {**job.before, **job.after} if not n.startswith("trajectories/")]
    if names:
        # The team's score is what the job is about: first.
        names.sort(key=lambda n: (n.startswith("reward/"), n))
        return "held out", [(n, job.before.get(n), job.after.get(n)) for n in names]
    if progress is None:
        return "", []
    rewards = {agent: values for agent, values in progress.rewards.items() if values}
    return _TRAINING, [(a, v[0], v[-1]) for a, v in rewards.items()]


def places(job: Job, checkpoints: list[Checkpoint], panel: str) -> list[tuple[str, str]]:
    """(what, where) of everything that the job left."""
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
