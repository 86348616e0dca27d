"""`troupe plan`: the best split of a cluster's devices for a job, as the twin predicts it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Final

import typer
import yaml
from rich.console import Console
from rich.table import Table

from troupe.client.cli import options
from troupe.client.cli.specification import apply_assignments, load_with
from troupe.job.loading import load_text
from troupe.rpc.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from troupe.job import JobSpec
    from troupe.twin.planner import JobPlan, Prediction
    from troupe.twin.profile import JobProfile

_GB: Final = 1 << 30


def plan(
    path: Annotated[Path, typer.Argument(metavar="JOB.yaml", show_default=False)],
    devices: Annotated[
        str,
        typer.Option(
            metavar="COUNTxCLASS[-MEMORY]", help="All devices, as in 64xH100 or 8xH20-141GB."
        ),
    ],
    hosts: Annotated[int, typer.Option(help="Hosts that the devices are spread over.")] = 1,
    assignments: options.Assignments = None,
    turns: Annotated[float, typer.Option(help="Mean number of rounds in a trajectory.")] = 4.0,
    prompt_tokens: Annotated[float, typer.Option(help="New prompt tokens of a turn.")] = 500.0,
    response_tokens: Annotated[
        float,
        typer.Option(help="Tokens sampled in a turn; 0: a third of its agent's max_new_tokens."),
    ] = 0.0,
    wait_seconds: Annotated[
        float, typer.Option(help="Seconds of tools or the environment after a turn.")
    ] = 1.0,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="JOB_ID|FILE",
            help="Use measurements of an earlier run of this job instead of assumptions: its id in "
            "the cluster, or the file that `troupe jobs profile` wrote.",
        ),
    ] = None,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
    tflops: Annotated[
        float, typer.Option(help="Device's peak in dense bfloat16; default: by its class.")
    ] = 0.0,
    gigabytes_per_second: Annotated[
        float, typer.Option(help="Device's memory bandwidth; default: by its class.")
    ] = 0.0,
    write: Annotated[
        Path | None, typer.Option(help="Write the job with the best split to this new file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find how many devices should generate and how many should train, and predict the step time.

    The planner tries splits in a simulated cluster that decides as the services do. Lengths and
    waits are assumptions: give your job's values, or an earlier run of it (--profile).
    """
    plans = _plans()
    given = plans.plan_devices(devices, "--devices")
    spec = load_with(path, assignments or [])
    if write is not None and write.exists():
        raise InvalidArgument(
            "the file exists", field="--write", value=str(write), remedy="Name a new file."
        )
    found: JobPlan = plans.planned(
        spec,
        given,
        hosts=hosts,
        habits={
            "turns": turns,
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "wait_seconds": wait_seconds,
        },
        tflops=tflops,
        gigabytes_per_second=gigabytes_per_second,
        profile=None if profile is None else _profile(profile, cluster, data_dir),
    )
    changes: list[str] = plans.assignments(spec, found.best)
    if as_json:
        print(json.dumps(plans.plan_values(spec, found, hosts)))
    else:
        _show(spec, found, hosts, changes, Console())
    if write is not None:
        text = load_text(path)
        raw = apply_assignments(text, [*(assignments or []), *changes], str(path))
        write.write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True), "utf-8")


def _plans() -> ModuleType:
    """Return the planner. Raises FailedPrecondition without simpy."""
    try:
        from troupe.twin import plans
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the planner needs the package {error.name}",
            field="troupe plan",
            value=str(error.name),
            remedy='Install it: `pip install "troupe-rl[plan]"`.',
        ) from error
    return plans


def _profile(given: str, cluster: str | None, data_dir: Path | None) -> JobProfile:
    """Return the profile in a file, or of a job of the cluster. Raises InvalidArgument for other
    files."""
    from troupe.twin.profile import JobProfile

    path = Path(given).expanduser()
    if path.is_file():
        return JobProfile.of_json(path.read_text("utf-8", errors="replace"))
    return options.call(cluster, data_dir, lambda client: client.job(given).profile())


def _show(spec: JobSpec, found: JobPlan, hosts: int, changes: list[str], console: Console) -> None:
    best = found.best
    means, split = best.means, best.split
    engines, trainers = split.devices
    console.print(
        f"{means.seconds:.1f} s per step (predicted; mode {spec.pipeline.mode}): "
        f"{_where(best, hosts)}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="Best split", title_justify="left")
    for column in ("policy", "engines", "devices of each", "turns at once", "gang", "GB to train"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    per_host = f" x {split.engine_hosts} hosts" if split.engine_hosts > 1 else ""
    for name, one in split.policies.items():
        table.add_row(
            name,
            f"with {one.shares}" if one.shares else f"{one.engines}{per_host}",
            str(one.tensor_parallel),
            str(one.engine_turns),
            str(one.gang or "-"),
            f"{one.trainer_bytes / _GB:.0f}" if one.gang else "-",
        )
    console.print(table)
    console.print(
        f"engines are busy {means.engines:.0%} of the time, trainers {means.trainers:.0%}; "
        f"{means.response_tokens_per_second:,.0f} response tokens/s; "
        f"a step waits for {_BOTTLENECKS[best.bottleneck]}",
        highlight=False,
        soft_wrap=True,
    )
    if found.more_seconds is not None and math.isfinite(found.more_seconds):
        gain = 1 - found.more_seconds / means.seconds
        console.print(
            f"one more host of {(engines + trainers) // hosts if hosts else 0} devices: "
            f"{found.more_seconds:.1f} s per step ({gain:.0%} shorter)"
            if gain > 0.005
            else "one more host would not shorten the step",
            highlight=False,
            soft_wrap=True,
        )
    if others_of := _plans().alternatives(found):
        others = Table(title=f"Next best of {found.considered} that fit", title_justify="left")
        for column in ("s/step", "split", "engines busy", "trainers busy", "waits for"):
            others.add_column(column, justify="right" if column == "s/step" else "left")
        for one_of in others_of[:4]:
            others.add_row(
                f"{one_of.means.seconds:.1f}",
                f"{_where(one_of, hosts)}: {_short(one_of)}",
                f"{one_of.means.engines:.0%}",
                f"{one_of.means.trainers:.0%}",
                one_of.bottleneck,
            )
        console.print(others)
    for line in found.shared:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for title, lines in (("measured", found.measured), ("assumed", found.assumed)):
        for line in lines:
            console.print(f"{title}: {line}", highlight=False, markup=False, soft_wrap=True)
    console.print("In the job, or as options of `troupe train`:", highlight=False)
    for change in changes:
        console.print(f"  --set {change}", highlight=False, markup=False, soft_wrap=True)


_BOTTLENECKS: Final = {
    "engines": "engines: more of them shorten it",
    "trainers": "trainers: more of them shorten it",
    "longest trajectories": "its longest trajectories: faster engines (tensor_parallel) or mode "
    "async shorten it, more engines do not",
    "hand-over": "the services: commits, weights, the start of the next step",
}


def _where(one: Prediction, hosts: int) -> str:
    engines, trainers = one.split.devices
    if one.split.engine_hosts == one.split.training_hosts == hosts and hosts > 1:
        return f"all {hosts} hosts generate and train in turns"
    if hosts == 1:
        return f"{engines} devices generate, {trainers} train"
    return (
        f"{one.split.engine_hosts} hosts generate ({engines} devices), "
        f"{one.split.training_hosts} train ({trainers})"
    )


def _short(one: Prediction) -> str:
    return ", ".join(
        f"{name} {f'with {p.shares}' if p.shares else f'{p.engines}x{p.tensor_parallel}'}"
        + (f" gang {p.gang}" if p.gang else "")
        for name, p in one.split.policies.items()
    )
