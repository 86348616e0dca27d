"""The command line `troupe`: `main`, and the list of its commands.

An error is one line on stderr and an exit status, without a traceback.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import typer

from troupe import __version__
from troupe.client.cli.failures import HintingGroup, explain

# The function of each command, or the `Typer` of a group of commands.
_COMMANDS: Final[Mapping[str, str]] = {
    "demo": "troupe.demo.command:demo",
    "init": "troupe.demo.command:init",
    "train": "troupe.client.cli.train:train",
    "submit": "troupe.client.cli.jobs.commands:submit",
    "evaluate": "troupe.client.cli.jobs.evaluate:evaluate",
    "up": "troupe.client.cli.cluster:up",
    "head": "troupe.client.cli.cluster:head",
    "node": "troupe.client.cli.cluster:node",
    "slurm": "troupe.client.cli.slurm:slurm",
    "plan": "troupe.client.cli.plan:plan",
    "down": "troupe.client.cli.cluster:down",
    "status": "troupe.client.cli.cluster:status",
    "doctor": "troupe.client.cli.doctor:doctor",
    "jobs": "troupe.client.cli.jobs.commands:app",
    "functions": "troupe.client.cli.functions:app",
    "samples": "troupe.client.cli.jobs.samples:app",
    "population": "troupe.client.cli.jobs.population:app",
    "conversations": "troupe.client.cli.jobs.conversations:conversations",
    "generate": "troupe.client.cli.jobs.commands:generate",
    "export": "troupe.client.cli.export:export",
    "job": "troupe.client.cli.specification:app",
    "environment": "troupe.client.cli.workflow:environment_app",
    "workflow": "troupe.client.cli.workflow:app",
    "examples": "troupe.demo.command:examples",
    "chaos": "troupe.client.cli.chaos:chaos",
}


class _ImportedCommands(Mapping[str, Any]):
    """The commands by name. Each is imported when it is first read: all of them take a second,
    twice what `troupe up` or `troupe status` needs."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            self._imported[name] = _import_command(name)
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)

    def __contains__(self, name: object) -> bool:
        return name in _COMMANDS


def _import_command(name: str) -> Any:
    """Return the command, or group of commands. Raises KeyError."""
    module, _, attribute = _COMMANDS[name].partition(":")
    found = getattr(_import_without_collections(module), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name = name
        return group
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name)(found)
    return typer.main.get_command(single)


def _import_without_collections(module: str) -> Any:
    """Import `module` without garbage collections: they would take a tenth of a command's start
    and free nothing. Later collections skip the imported objects."""
    if module in sys.modules or not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()


class _Commands(HintingGroup):
    """The commands of `troupe`, each imported when it is named."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _ImportedCommands()  # type: ignore[assignment]


app = typer.Typer(
    name="troupe",
    help="Train teams of language-model agents with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=_Commands,
)


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
    """Run a command line and return the exit status.

    0: success. 1: failure. 2: invalid input. 130, 143: interrupted.
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
            # Arguments quoted in an error need not be valid UTF-8.
            print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return code
    return status if isinstance(status, int) else 0
