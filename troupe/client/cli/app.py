"""The commands, and what becomes of their errors: one line, an exit status, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from troupe import __version__
from troupe.client.cli.chaos import chaos
from troupe.client.cli.cluster import down, status, up
from troupe.client.cli.environment import app as environment
from troupe.client.cli.export import export
from troupe.client.cli.failures import explain
from troupe.client.cli.functions import app as functions
from troupe.client.cli.jobs import app as jobs
from troupe.client.cli.policies import generate
from troupe.client.cli.population import app as population
from troupe.client.cli.samples import app as samples
from troupe.client.cli.specification import app as specification
from troupe.client.cli.train import train
from troupe.client.cli.workflow import app as workflow

app = typer.Typer(
    name="troupe",
    help="Train teams of language-model agents with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("up")(up)
app.command("down")(down)
app.command("status")(status)
app.add_typer(jobs, name="jobs")
app.add_typer(functions, name="functions")
app.add_typer(samples, name="samples")
app.add_typer(population, name="population")
app.command("generate")(generate)
app.command("export")(export)
app.add_typer(specification, name="job")
app.add_typer(environment, name="environment")
app.add_typer(workflow, name="workflow")
app.command("chaos")(chaos)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"troupe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train teams of language-model agents with reinforcement learning."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status.

    0: done. 1: it failed. 2: the input is wrong. 130, 143: interrupted.
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="troupe",
            standalone_mode=False,
        )
    except BaseException as error:
        lines, code = explain(error)
        for line in lines:
            # What was typed need not be text.
            print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return code
    return status if isinstance(status, int) else 0
