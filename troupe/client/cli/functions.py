"""`troupe functions ...`: deploy and call rewards and tools, show their state and output."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from troupe.client.aio import AsyncClient
from troupe.client.cli import options
from troupe.client.cli.failures import FAILED
from troupe.client.cli.options import call, make_table
from troupe.client.functions import checked_costs
from troupe.client.records.functions import Invocation
from troupe.rpc.errors import DeadlineExceeded, InvalidArgument
from troupe.yaml_input import UnreadableText, read_json_object, read_value

app = typer.Typer(help="Deploy, call and inspect rewards and tools.", no_args_is_help=True)
Name = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="NAME or NAME@VERSION.")
]


@app.command()
def deploy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_MODULE",
            show_default=False,
            help="FILE.py[:function] or a folder to upload, or package.module[:function].",
        ),
    ],
    entrypoint: Annotated[
        str | None,
        typer.Option(help="A function in it; in a folder MODULE[:FUNCTION].", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Default: as declared.", show_default=False)
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Default: as declared.", show_default=False)
    ] = None,
    costs: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Override the declaration, e.g. --set cores=2. May be repeated.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Deploy the functions that a file or module declares with @troupe.reward and @troupe.tool."""
    own = _assignments(costs or [])

    deployed = call(
        cluster,
        data_dir,
        lambda client: client.functions.deploy(
            source, entrypoint=entrypoint, name=name, version=version, **checked_costs(own)
        ),
    )
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in deployed], indent=2))
        return
    for one in deployed:
        code = f"source {one.source_sha256[:12]}" if one.source_sha256 else one.entrypoint
        kind = f"{one.kind} " if one.kind else ""
        Console().print(f"deployed {kind}{one.name}@{one.version} ({code})", highlight=False)


@app.command("list")
def list_functions(
    everything: Annotated[
        bool, typer.Option("--all", help="Include functions of jobs, which have no deployed name.")
    ] = False,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """List functions and the outcomes of their calls."""
    found = call(cluster, data_dir, lambda client: client.functions.list())
    shown = [one for one in found if everything or not one.job_id]
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in shown], indent=2))
        return
    console = Console()
    if not shown:
        console.print("no functions")
        return
    table = make_table(
        ("function", "kind"), ("calls", "errors", "running", "queued", "mean s", "warm")
    )
    for one in shown:
        table.add_row(
            escape(f"{one.name}@{one.version}"),
            one.kind or "-",
            str(one.invocations),
            str(one.errors),
            str(one.running),
            str(one.queued),
            f"{one.mean_seconds:.3g}",
            str(one.warm_workers),
        )
    console.print(table)


@app.command()
def show(
    name: Name,
    as_json: options.AsJson = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Show a function: its costs, arguments and measurements."""
    one = call(cluster, data_dir, lambda client: client.functions.get(*_split(name)))
    fields = dataclasses.asdict(one)
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    Console().print(
        yaml.safe_dump(fields, sort_keys=False, allow_unicode=True).rstrip(),
        highlight=False,
        markup=False,
    )


@app.command()
def invoke(
    name: Name,
    arguments: Annotated[
        str, typer.Option(metavar="JSON", help="Keyword arguments; -: from stdin.")
    ] = "{}",
    trajectory: Annotated[
        str,
        typer.Option(help="Trajectory whose files a stateful function uses.", show_default=False),
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait.")] = 600.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide the function's output.")] = False,
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Call a function; print its value as JSON, and its output on stderr meanwhile.

    Exit status 1: the call failed.
    """
    given = _object(sys.stdin.read() if arguments == "-" else arguments)
    function, version = _split(name)

    async def run(client: AsyncClient) -> Invocation:
        stream = client.functions.invoke_stream(
            function, given, version=version, trajectory_id=trajectory
        )
        async with asyncio.timeout(timeout):
            async for event in stream:
                if isinstance(event, Invocation):
                    return event
                if event.output and not quiet:
                    print(event.output, end="", file=sys.stderr, flush=True)
        raise AssertionError("a stream ends with the outcome of the call")

    try:
        ended = call(cluster, data_dir, run)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} gave no result within {timeout:g} s") from error
    if ended.error is not None:
        if ended.error.traceback:
            print(ended.error.traceback, file=sys.stderr)
        raise ended.error
    print(json.dumps(ended.value, ensure_ascii=False))


@app.command()
def logs(
    name: Name,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines.")
    ] = False,
    lines: Annotated[int, typer.Option(min=0, help="Number of last lines; 0: all.")] = 100,
    job: Annotated[str, typer.Option(help="Only calls of this job.", show_default=False)] = "",
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Print the logs of a function's calls; Ctrl-C ends `--follow`."""
    function, version = _split(name)

    async def print_lines(client: AsyncClient) -> None:
        async for line in client.functions.logs(
            function, version=version, job_id=job, lines=lines, follow=follow
        ):
            at = line.at.astimezone().strftime("%H:%M:%S")
            print(f"{at} {line.invocation_id} {line.text}", flush=True)

    call(cluster, data_dir, print_lines)


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME@VERSION", show_default=False)],
    cluster: options.ClusterAddress = None,
    data_dir: options.DataDir = None,
) -> None:
    """Delete a deployed function and cancel its calls."""
    function, version = _split(name)
    if version is None:
        raise InvalidArgument(
            "names no version", field="NAME@VERSION", value=name, remedy="Write NAME@VERSION."
        )

    if not call(cluster, data_dir, lambda client: client.functions.delete(function, version)):
        print(f"error: there is no deployed function {name}.", file=sys.stderr)
        raise typer.Exit(FAILED)
    Console().print(f"{name} is deleted", highlight=False)


def _split(name: str) -> tuple[str, str | None]:
    """Split NAME or NAME@VERSION into name and version."""
    function, at, version = name.partition("@")
    return function, version if at else None


def _object(text: str) -> dict[str, Any]:
    try:
        return read_json_object(text, "it")
    except UnreadableText as error:
        raise InvalidArgument(
            error.problem, field="--arguments", value=text, remedy=error.remedy
        ) from error


def _assignments(given: list[str]) -> dict[str, Any]:
    costs = {}
    for one in given:
        field, equals, value = one.partition("=")
        if not equals or not field:
            raise InvalidArgument(
                "is not an assignment", field="--set", value=one, remedy="Write FIELD=VALUE."
            )
        try:
            costs[field] = read_value(value, "its value")
        except UnreadableText as error:
            raise InvalidArgument(
                f"{error.where}: {error.problem}", field="--set", value=one, remedy=error.remedy
            ) from error
    return costs
