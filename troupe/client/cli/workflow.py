"""`troupe workflow try`: run a workflow without a cluster, by stand-ins or by real models.
`troupe environment check`: check an environment against its interface."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from troupe.checkpoints.merging import is_adapter_folder, whole_model
from troupe.checkpoints.retention import choose, only_policy
from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.options import call, score, shortened
from troupe.client.discovery import data_directory
from troupe.job import JobSpec
from troupe.outcomes import described
from troupe.rpc.errors import Internal, InvalidArgument, recast
from troupe.user_code import call_contained, interruptible
from troupe.workflow.agent import UNAWAITED
from troupe.workflow.errors import EntrypointError, WorkflowError, as_invalid_argument
from troupe.workflow.loading import Query
from troupe.workflow.trying.policies import EchoPolicy, Policy, RandomPolicy, ScriptedPolicy
from troupe.workflow.trying.rehearsal import Rehearsal, Rehearsed, explain, groups_of
from troupe.workflow.trying.setting import ANY, Setting, open_setting
from troupe.workflow.turns import TurnRecord
from troupe.yaml_input import UnreadableText, read_file, read_json_object, read_text, read_value

app = typer.Typer(help="Write workflows.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Write workflows."""


# Seconds per trajectory that is played by stand-ins, and by models.
_SECONDS: Final = 60.0
_MODEL_SECONDS: Final = 3600.0


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
        str | None,
        typer.Option(
            metavar="random|script|echo|PATH|JOB[@VERSION]",
            help="What takes the turns: a stand-in, a model in a directory, or the policies of a "
            "job, by their newest or the given checkpoint. Models play on this machine's CPU.",
            show_default="random",
        ),
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
        float | None,
        typer.Option(
            min=0.1,
            max=86_400,
            help="Seconds per trajectory.",
            show_default="60; 3600 with a model",
        ),
    ] = None,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Play a workflow without a cluster; show messages, rewards and the rows to train on.

    Exit status 1: a trajectory failed; 2: invalid input.
    """
    if split not in ("train", "held_out"):
        raise InvalidArgument(
            "is not a split", field="--split", value=split, remedy="Use train or held_out."
        )
    stand_in = policy is None or policy in [one.value for one in PolicyName]
    named = PolicyName(policy) if policy and stand_in else None
    chosen: Policy | dict[str, Policy] = _policy(named, script)
    if not stand_in and script is not None:
        raise _either_script_or_policy(script)
    # asyncio would log the tasks of a failed workflow; the command shows the failure itself.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    console = Console()
    ended = []
    with ExitStack() as stack:
        models = None
        if policy is not None and not stand_in:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="troupe-policies-")))
            models = partial(_models, policy, place, cluster, data_dir)
        setting = _open(source, job, split, models)
        if setting.models is not None:
            setting, chosen = _with_engines(setting, stack)
        asked = _queries(setting, query or [], queries, split)
        seconds = timeout or (_SECONDS if setting.models is None else _MODEL_SECONDS)
        rehearsal = Rehearsal(setting, asked, chosen, group_size, seed, seconds)
        if not as_json:
            for note in setting.notes:
                console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
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
        names = setting.roles if isinstance(setting.roles, Mapping) else ()
        print_totals(console, ended, groups, names)
    raise typer.Exit(FAILED if failed else 0)


def _models(
    policy: str, place: Path, cluster: str | None, data_dir: Path | None, job: JobSpec | None
) -> dict[str, Path]:
    """Return the directory of the model that plays each policy of `job` (None: the only one):
    the model in the directory `policy`, or the checkpoints of the job `policy`. Adapters are merged
    into copies in `place`, where checkpoints of a cluster's job go, too."""
    agents = () if job is None else job.agents.values()
    names = list(dict.fromkeys(one.policy for one in agents)) or [ANY]
    path = Path(policy).expanduser()
    if path.is_dir() and ((path / "config.json").is_file() or is_adapter_folder(path)):
        return dict.fromkeys(names, whole_model(path, place / "model"))
    job_id, _, number = policy.partition("@")
    root = data_directory(data_dir)
    if "/" in policy or not job_id or (number and not number.isdecimal()):
        raise InvalidArgument(
            "is neither a directory with a model nor a job",
            field="--policy",
            value=policy,
            remedy="Give a directory as transformers or PEFT saves it, JOB, or JOB@VERSION.",
        )
    found: dict[str, Path] = {}
    for name in names:
        wanted, version = None if name is ANY else name, int(number) if number else None
        if (root / job_id).is_dir():
            checkpoint = choose(root, job_id, wanted, version)
        else:
            checkpoint = place / f"exported-{name}"
            call(cluster, data_dir, partial(_export, job_id, wanted, version, checkpoint))
        found[name] = whole_model(checkpoint, place / name)
    return found


async def _export(
    job_id: str, policy: str | None, version: int | None, to: Path, client: AsyncClient
) -> None:
    job = client.job(job_id)
    kept = dict.fromkeys(one.policy for one in await job.checkpoints())
    await job.export(only_policy(kept, policy), to, version)


def _with_engines(setting: Setting, stack: ExitStack) -> tuple[Setting, Policy | dict[str, Policy]]:
    """Start the engines of a setting's models until `stack` closes; return the setting with their
    contexts, and the policies."""
    # Imports torch and transformers, which the stand-ins do not need.
    from services.rollout.local_models import LocalModels

    assert setting.models is not None, "a model plays"
    spec = setting.spec
    asked = {
        name: None if spec is None else spec.policies[name].engine.max_context
        for name in setting.models
    }
    models = stack.enter_context(LocalModels(setting.models, asked))
    setting = replace(setting, contexts=models.contexts)
    if spec is None:
        return setting, models.policy(ANY)
    return setting, {name: models.policy(one.policy) for name, one in spec.agents.items()}


def _open(
    source: str,
    job: Path | None,
    split: str,
    models: Callable[[JobSpec | None], dict[str, Path]] | None,
) -> Setting:
    """Load the setting; an exception in the user's modules shows only their part of the
    traceback."""
    try:
        return open_setting(source, job, split=split, models=models)
    except EntrypointError as error:
        cause = error.__cause__
        if cause is not None and (own := explain(cause).traceback):
            typer.echo(f"{own}\n{described(cause)}", err=True)
        raise as_invalid_argument(error) from error


def _policy(name: PolicyName | None, script: Path | None) -> Policy:
    if (name is PolicyName.SCRIPT) != (script is not None) and not (script and name is None):
        raise _either_script_or_policy(script)
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


def _either_script_or_policy(script: Path | None) -> InvalidArgument:
    return InvalidArgument(
        "--script requires `--policy script`, and vice versa",
        field="--script",
        value=script and str(script),
        remedy="Give `--script replies.yaml` alone, or omit it with another policy.",
    )


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
