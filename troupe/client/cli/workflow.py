"""`troupe workflow try`: plays a workflow without a model and without a cluster."""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.rehearsals import as_record, print_rehearsed, print_totals
from troupe.outcomes import described
from troupe.rpc.errors import InvalidArgument
from troupe.user_code import call_contained, interruptible
from troupe.workflow.errors import EntrypointError, WorkflowError
from troupe.workflow.query import Query
from troupe.workflow.refusals import refusal_of
from troupe.workflow.trying.policies import EchoPolicy, Policy, RandomPolicy, ScriptedPolicy
from troupe.workflow.trying.setting import Setting
from troupe.yaml_input import UnreadableText, read_file, read_json_object, read_text

app = typer.Typer(help="Write workflows.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Write workflows."""


class PolicyName(StrEnum):
    """Who takes the turns."""

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
        typer.Option(help="A job whose agents, tasks and functions to use.", show_default=False),
    ] = None,
    policy: Annotated[
        PolicyName | None, typer.Option(help="Who takes the turns.", show_default="random")
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
            help="A query to play instead of the job's tasks. May be repeated.",
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
    """Play a workflow without a model: what is said, rewarded, and would be trained on.

    Exit status 1: a trajectory failed; 2: the input is wrong.
    """
    from troupe.workflow.trying.rehearsal import Rehearsal, groups_of

    if split not in ("train", "held_out"):
        raise InvalidArgument(
            "there is no such split", field="--split", value=split, remedy="train or held_out."
        )
    chosen = _policy(policy, script)
    setting = _open(source, job, split)
    asked = _queries(setting, query or [], queries, split)
    # What a workflow leaves behind is not for the log; how it ended is shown.
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
    """The setting; what the user's own modules raise is shown with their traceback only."""
    from troupe.workflow.trying.rehearsal import explain
    from troupe.workflow.trying.setting import open_setting

    try:
        return open_setting(source, job, split=split)
    except EntrypointError as error:
        cause = error.__cause__
        if cause is not None and (own := explain(cause).traceback):
            typer.echo(f"{own}\n{described(cause)}", err=True)
        raise refusal_of(error) from error


def _policy(name: PolicyName | None, script: Path | None) -> Policy:
    if (name is PolicyName.SCRIPT) != (script is not None) and not (script and name is None):
        raise InvalidArgument(
            "a script goes with `--policy script`, and only with it",
            field="--script",
            value=script and str(script),
            remedy="Give `--script replies.yaml` alone, or another policy without it.",
        )
    if script is None:
        return EchoPolicy() if name is PolicyName.ECHO else RandomPolicy()
    try:
        return ScriptedPolicy(read_text(read_file(script), str(script)))
    except WorkflowError as error:
        raise refusal_of(error) from error
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
            "there is no query to play",
            field="--query",
            remedy="""Give `--query '{"question": "..."}'`, or a job whose tasks to use.""",
        )
    tasks, found = setting.tasks, []

    def item(index: int) -> dict[str, Any]:
        return dict(tasks[index])

    for index in range(min(count, len(tasks))):
        try:
            with interruptible():
                data = call_contained(item, index)
        except Exception as error:  # the user's code
            raise InvalidArgument(
                f"{split}[{index}] raised or is no mapping: {described(error)}",
                field="tasks.source",
                value=setting.spec.tasks.source if setting.spec and setting.spec.tasks else None,
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
