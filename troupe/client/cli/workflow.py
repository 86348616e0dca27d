"""`troupe workflow try`: run a workflow without a model and without a cluster."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.options import score, shortened
from troupe.outcomes import described
from troupe.rpc.errors import InvalidArgument
from troupe.user_code import call_contained, interruptible
from troupe.workflow.agent import UNAWAITED
from troupe.workflow.errors import EntrypointError, WorkflowError, as_invalid_argument
from troupe.workflow.loading import Query
from troupe.workflow.trying.policies import EchoPolicy, Policy, RandomPolicy, ScriptedPolicy
from troupe.workflow.trying.rehearsal import Rehearsal, Rehearsed, explain, groups_of
from troupe.workflow.trying.setting import Setting, open_setting
from troupe.workflow.turns import TurnRecord
from troupe.yaml_input import UnreadableText, read_file, read_json_object, read_text

app = typer.Typer(help="Write workflows.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Write workflows."""


class PolicyName(StrEnum):
    """The stand-in policies that can take the agents' turns."""

    RANDOM = "random"
    SCRIPT = "script"
    ECHO = "echo"


@app.command("try")
def try_workflow(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JOB.yaml, FILE.py[:attribute] or package.module:attribute.",
            show_default=False,
        ),
    ],
    job: Annotated[
        Path | None,
        typer.Option(help="Job that supplies agents, tasks, functions.", show_default=False),
    ] = None,
    policy: Annotated[
        PolicyName | None, typer.Option(help="Stand-in for the models.", show_default="random")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            help="YAML: replies in order, as a list, or by agent (a text instead of a list is "
            "repeated).",
            show_default=False,
        ),
    ] = None,
    query: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON",
            help="Query to play instead of the job's tasks. May be repeated.",
            show_default=False,
        ),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries of the job's tasks to play.")] = 2,
    split: Annotated[str, typer.Option(help="`train` or `held_out`.")] = "train",
    group_size: Annotated[int, typer.Option(min=1, help="Trajectories per query.")] = 2,
    seed: Annotated[int, typer.Option(help="Root of all randomness.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds per trajectory.")
    ] = 60.0,
    as_json: options.AsJson = False,
) -> None:
    """Play a workflow without a model; show messages, rewards and the rows to train on.

    Exit status 1: a trajectory failed; 2: invalid input.
    """
    if split not in ("train", "held_out"):
        raise InvalidArgument(
            "is not a split", field="--split", value=split, remedy="Use train or held_out."
        )
    chosen = _policy(policy, script)
    setting = _open(source, job, split)
    asked = _queries(setting, query or [], queries, split)
    # asyncio would log the tasks of a failed workflow; the command shows the failure itself.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    rehearsal = Rehearsal(setting, asked, chosen, group_size, seed, timeout)
    console = Console()
    if not as_json:
        for note in setting.notes:
            console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    ended = []
    for one in rehearsal.run():
        ended.append(one)
        if not as_json:
            print_rehearsed(console, one)
    groups = groups_of(ended)
    failed = sum(one.failure is not None for one in ended)
    if as_json:
        record: dict[str, Any] = {
            "workflow": setting.source,
            "notes": list(setting.notes),
            "trajectories": [as_record(one) for one in ended],
            "groups": dict(groups),
            "failed": failed,
        }
        print(json.dumps(record, indent=2))
    else:
        print_totals(console, ended, groups, setting.roles or ())
    raise typer.Exit(FAILED if failed else 0)


def _open(source: str, job: Path | None, split: str) -> Setting:
    """Load the setting; an exception in the user's modules shows only their part of the
    traceback."""
    try:
        return open_setting(source, job, split=split)
    except EntrypointError as error:
        cause = error.__cause__
        if cause is not None and (own := explain(cause).traceback):
            typer.echo(f"{own}\n{described(cause)}", err=True)
        raise as_invalid_argument(error) from error


def _policy(name: PolicyName | None, script: Path | None) -> Policy:
    if (name is PolicyName.SCRIPT) != (script is not None) and not (script and name is None):
        raise InvalidArgument(
            "--script requires `--policy script`, and vice versa",
            field="--script",
            value=script and str(script),
            remedy="Give `--script replies.yaml` alone, or omit it with another policy.",
        )
    if script is None:
        return EchoPolicy() if name is PolicyName.ECHO else RandomPolicy()
    try:
        return ScriptedPolicy(read_text(read_file(script), str(script)))
    except WorkflowError as error:
        raise as_invalid_argument(error) from error
    except UnreadableText as error:
        at = "" if error.where == str(script) else f"{error.where}: "
        raise InvalidArgument(
            f"{at}{error.problem}",
            field="--script",
            value=str(script),
            remedy="Write a YAML list of replies, or a mapping from agent to replies.",
        ) from error


def _queries(setting: Setting, given: list[str], count: int, split: str) -> list[Query]:
    if given:
        return [Query(f"q{i}", split, i, _parsed(text)) for i, text in enumerate(given)]
    if setting.tasks is None:
        raise InvalidArgument(
            "needs a query to play",
            field="--query",
            remedy="""Give `--query '{"question": "..."}'`, or a job with tasks.""",
        )
    tasks, found = setting.tasks, []

    def item(index: int) -> dict[str, Any]:
        return dict(tasks[tasks.position(index)])

    for index in range(min(count, len(tasks))):
        try:
            with interruptible():
                data = call_contained(item, index)
        except Exception as error:  # the user's code
            raise InvalidArgument(
                f"{split}[{index}] raised an error or is not a mapping: {described(error)}",
                field="tasks",
                value=tasks.source,
                remedy="`tasks[index]` must return a dict of JSON values.",
            ) from error
        found.append(Query(f"q{index}", split, index, data))
    return found


def _parsed(text: str) -> dict[str, Any]:
    try:
        return read_json_object(text, "it")
    except UnreadableText as error:
        raise InvalidArgument(
            error.problem,
            field="--query",
            value=text,
            remedy="""Write `{"question": "..."}`.""",
        ) from error


def as_record(one: Rehearsed) -> dict[str, Any]:
    """Return a rehearsed trajectory as JSON values."""
    groups = {} if one.played is None else {id(r.turn): r for r in one.played.samples}
    record: dict[str, Any] = {
        "query_id": one.query.id,
        "trajectory_id": one.trajectory_id,
        "query": dict(one.query.data),
        "turns": [_turn_record(turn, groups.get(id(turn))) for turn in one.turns],
    }
    if one.played is not None:
        record["rewards"] = one.played.rewards
        record["metrics"] = one.played.metrics
    if one.failure is not None:
        record["failure"] = {
            "kind": one.failure.kind,
            "message": one.failure.message,
            "remedy": one.failure.remedy,
            "traceback": one.failure.traceback,
        }
    return record


def _turn_record(turn: TurnRecord, sample: Any) -> dict[str, Any]:
    assert turn.reply is not None
    record: dict[str, Any] = {
        "agent": turn.role.name,
        "policy": turn.role.policy,
        "turn": turn.number,
        "messages": [{"role": role, "content": content} for role, content in turn.messages],
        "response": turn.reply.text,
        "finish_reason": turn.reply.finish_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "response_tokens": len(turn.reply.response),
        "reward": turn.reply.reward,
    }
    if sample is not None:
        record["sample"] = {
            "sample_id": sample.sample_id,
            "group_id": sample.group_id,
            "reward": sample.reward,
        }
    return record


def print_rehearsed(console: Console, one: Rehearsed) -> None:
    """Print a trajectory: its conversation, rewards, metrics and failure."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(f"\n{one.trajectory_id}  {shortened(repr(dict(one.query.data)))}", "bold")
    samples = {} if one.played is None else {id(r.turn): r for r in one.played.samples}
    for turn in one.turns:
        assert turn.reply is not None
        drawn = "" if turn.siblings is None else f" ({turn.sibling + 1} of {turn.siblings})"
        say(f"  {turn.role.name}[{turn.number}]{drawn}", "cyan")
        # Sibling turns share their prompt: it is shown once.
        if turn.sibling == 0:
            for role, content in turn.messages:
                say(_block(f"{role}: {content}"), "dim")
        say(_block(f"-> {turn.reply.text}"))
        tokens = f"{len(turn.prompt_ids)}+{len(turn.reply.token_ids)} tokens"
        facts = [turn.reply.finish_reason, tokens]
        if row := samples.get(id(turn)):
            facts += [f"reward {score(row.reward)}", f"group {row.group_id}"]
        say(_block(", ".join(facts)), "dim")
    if one.played is not None:
        rewards = "  ".join(f"{name} {score(value)}" for name, value in one.played.rewards.items())
        say(f"  rewards: {rewards or 'none'}", "green")
        if left := one.played.metrics.get(UNAWAITED):
            say(f"  {left:g} turns were requested and never awaited", "yellow")
        if logged := one.query.metrics:
            say("  logged: " + "  ".join(f"{k} {score(v)}" for k, v in logged.items()), "green")
    if one.failure is not None:
        say(f"  FAILED after {len(one.turns)} turns: {one.failure.kind}", "bold red")
        if one.failure.traceback:
            say(one.failure.traceback)
        reason = f"{one.failure.message.rstrip('.')}. {one.failure.remedy}"
        say("  " + " ".join(reason.split()), "red")


def print_totals(
    console: Console,
    ended: Sequence[Rehearsed],
    groups: Counter[str],
    agents: Collection[str] = (),
) -> None:
    """Print counts of turns and samples, and notes on groups and agents that train nothing."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    turns: Counter[str] = Counter()
    for one in ended:
        turns.update(turn.role.name for turn in one.turns)
    failed = sum(one.failure is not None for one in ended)
    counted = ", ".join(f"{name} {count}" for name, count in sorted(turns.items())) or "none"
    say(f"\n{len(ended)} trajectories, {failed} failed; turns: {counted}", "bold")
    sizes = Counter(groups.values())
    shown = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
    say(f"{sum(groups.values())} samples in {len(groups)} groups" + (f": {shown}" if shown else ""))
    if sizes[1]:
        say(
            f"note: {sizes[1]} groups have one sample and nothing to compare it with; see "
            "`algorithm.group_by` and `--group-size`",
            "yellow",
        )
    for name in sorted(set(agents) - turns.keys()):
        say(f"note: agent {name} was never asked", "yellow")
    if broken := sum(turn.prefix_broken for one in ended for turn in one.turns):
        say(
            f"note: {broken} turns changed an earlier reply of their agent, so its tokens could "
            "not be reused",
            "yellow",
        )


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in shortened(text).splitlines() or [""])
