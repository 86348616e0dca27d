"""`troupe conversations`: list and show what a job's agents were told and said.

They come from the running cluster, or from the data directory of a stopped one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.options import call, duration, make_table, number, score, shortened
from troupe.client.records.jobs import Trajectory, Turn
from troupe.contracts.conversations import CONVERSATIONS, ConversationLog, TrajectoryFilter
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# Characters of the last reply that a list may show.
_REPLY = 30


def conversations(
    job_id: options.JobId,
    trajectory: Annotated[
        str | None,
        typer.Argument(
            metavar="TRAJECTORY", show_default=False, help="Show only this one, with all texts."
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those that did not complete.")
    ] = False,
    reward_below: Annotated[
        float | None,
        typer.Option(help="Only rewards below this: of --agent, else the team's, else the mean."),
    ] = None,
    reward_above: Annotated[float | None, typer.Option(help="Only rewards above this.")] = None,
    agent: Annotated[
        str,
        typer.Option(
            help="Only those in which this agent took a turn.",
            show_default=False,
            autocompletion=options.complete_policies,
        ),
    ] = "",
    text: Annotated[
        str, typer.Option(help="Only those with this text in a message or a reply.")
    ] = "",
    step: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Only of this step, from 0.")
    ] = None,
    evaluation: Annotated[
        bool | None,
        typer.Option("--evaluation/--training", help="Only of evaluations, or of training."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most the newest N.", metavar="N")] = 20,
    full: Annotated[
        bool, typer.Option("--full", help="Show the texts of each, instead of a table.")
    ] = False,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """List a job's newest conversations, or show one with its texts, rewards and versions.

    `logging.trajectories` in the job says how many are kept per step. They stay after the job has
    ended, until `troupe jobs forget`; a stopped cluster's are read from its data directory.
    """
    filters: dict[str, Any] = {
        "text": text,
        "agent": agent,
        "from_step": step,
        "to_step": step,
        # The bounds of a request are part of its range.
        "min_reward": None if reward_above is None else math.nextafter(reward_above, math.inf),
        "max_reward": None if reward_below is None else math.nextafter(reward_below, -math.inf),
        "evaluation": evaluation,
        "failed": failed,
    }

    async def ask(client: AsyncClient) -> list[Trajectory]:
        job = client.job(job_id)
        if trajectory is not None:
            return [await job.trajectory(trajectory)]
        return [one async for one in job.conversations(limit, **filters)]

    stopped = options.stopped_job(job_id, cluster, data_dir)
    log = None if stopped is None else ConversationLog(stopped / CONVERSATIONS)
    if log is None:
        found = call(cluster, data_dir, ask)
    elif trajectory is not None:
        found = [Trajectory.with_turns(log.get(trajectory))]
    else:
        found = _read(log, orchestrator_pb.ListTrajectoriesRequest(**filters), limit)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
    elif trajectory is not None or full:
        for one in found:
            print_conversation(Console(), one, whole=trajectory is not None)
    else:
        _print_list(Console(), found)


def _read(
    log: ConversationLog, request: orchestrator_pb.ListTrajectoriesRequest, limit: int
) -> list[Trajectory]:
    found: list[Trajectory] = []
    token, wanted = "", TrajectoryFilter(request)
    while True:
        page = log.page(limit - len(found), token, wanted)
        found += [Trajectory.with_turns(log.get(one.trajectory_id)) for one in page.summaries]
        token = page.token
        if not token or len(found) == limit:
            return found


def _print_list(console: Console, found: Sequence[Trajectory]) -> None:
    if not found:
        console.print("no conversations")
        return
    names = ["trajectory", "of", "rewards", "version", "last reply"]
    ended = any(not one.completed for one in found)
    table = make_table([*names, "ended"] if ended else names)
    for column in table.columns[:5]:
        column.no_wrap, column.overflow = True, "ellipsis"
    # A narrow terminal shortens the others: users copy the ids into the next command.
    table.columns[0].min_width = max(len(one.id) for one in found)
    for one in found:
        last = one.conversation[-1].response if one.conversation else ""
        rewards = " ".join(f"{name} {number(value)}" for name, value in sorted(one.rewards.items()))
        reply = " ".join(last[:_REPLY].split())
        row = (one.id, _origin(one), rewards or "-", _versions(one.conversation), reply, _end(one))
        table.add_row(*map(escape, row[: len(table.columns)]))
    console.print(table)
    console.print("texts: troupe conversations JOB TRAJECTORY, or --full", highlight=False)


def _end(one: Trajectory) -> str:
    return one.state if one.completed else f"{one.state}: {one.reason}"


def print_conversation(console: Console, one: Trajectory, *, whole: bool) -> None:
    """Print a trajectory: every turn with its messages, reply, reward and version. Unless `whole`,
    long texts are cut."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    cut: Callable[[str], str] = str if whole else shortened
    say(f"\n{one.id}  {_origin(one)}, {_end(one)}, {duration(one.seconds)}", "bold")
    # What an agent is told again with every turn is shown once.
    known: dict[str, tuple[tuple[str, str], ...]] = {}
    for turn in one.conversation:
        say(f"  {turn.agent}[{turn.turn}]", "cyan")
        before = known.get(turn.agent, ())
        again = len(before) if turn.messages[: len(before)] == before else 0
        for role, content in turn.messages[again:]:
            say(_block(f"{role}: {cut(content)}"), "dim")
        known[turn.agent] = turn.messages
        say(_block(f"-> {cut(turn.response)}"))
        say(_block(", ".join(_facts(turn))), "dim")
    rewards = "  ".join(f"{name} {score(value)}" for name, value in sorted(one.rewards.items()))
    say(f"  rewards: {rewards or 'none'}", "green")


def _facts(turn: Turn) -> list[str]:
    facts = [turn.finish_reason, f"{turn.prompt_tokens}+{turn.response_tokens} tokens"]
    if turn.version is not None:
        facts.append(f"{turn.policy} version {turn.version}")
    if turn.reward is not None:
        facts.append(f"reward {score(turn.reward)}")
    return facts


def _origin(one: Trajectory) -> str:
    return f"evaluation {one.step}" if one.evaluation else f"step {one.step}"


def _versions(turns: Sequence[Turn]) -> str:
    """Return the versions that generated the turns: `3`, `3-5`, or a dash if unknown."""
    found = [turn.version for turn in turns if turn.version is not None]
    if not found:
        return "-"
    low, high = min(found), max(found)
    return str(low) if low == high else f"{low}-{high}"


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
