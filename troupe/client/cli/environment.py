"""`troupe environment ...`: environments tried out before a job plays them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from troupe.rpc.errors import Internal, InvalidArgument
from troupe.yaml_input import read_value

app = typer.Typer(help="Environments: does one keep its promises?", no_args_is_help=True)


@app.command()
def check(
    entrypoint: Annotated[
        str, typer.Argument(metavar="MODULE:ATTRIBUTE", help="What makes environments.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=VALUE", help="An argument of it, as YAML."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 5,
    first_seed: Annotated[int, typer.Option(help="Seed of the first one.")] = 0,
) -> None:
    """Try an environment against the whole interface; exit status 1 when something is broken.

    For example: troupe environment check
    troupe.workflow.environments.adapters.openspiel:OpenSpiel --arg game=kuhn_poker
    """
    # Imports numpy and whatever the environment needs: not for every command.
    from troupe.workflow.environments.conformance import check as conform
    from troupe.workflow.environments.opening import open_environment
    from troupe.workflow.errors import EntrypointError, WorkflowError
    from troupe.workflow.loading import look_here

    look_here()
    given = _arguments(args or [])
    try:  # what cannot even be made is told as the error that it is
        open_environment(entrypoint, given, "entrypoint").close()
    except WorkflowError as error:
        refused = InvalidArgument if isinstance(error, EntrypointError) else Internal
        raise refused(
            error.message,
            kind=error.kind,
            field=error.field,
            value=error.value,
            remedy=error.remedy,
        ) from error
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
    """`name=value` each, the value in YAML. Raises `InvalidArgument`."""
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
