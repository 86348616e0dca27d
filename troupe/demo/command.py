"""`troupe demo`, which trains the example team, and `troupe examples`, which copies examples to
where the user stands.

A wheel has the repository's folder `examples` at `troupe/examples` (setup.py), as files to copy.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

import troupe
from troupe.client.aio import data_directory
from troupe.client.cli import options
from troupe.demo import ending_in_a_line
from troupe.rpc.errors import AlreadyExists, FailedPrecondition, NotFound

_PACKAGE: Final = Path(troupe.__file__).parent
_DEMO: Final = _PACKAGE / "demo"
# What `troupe demo` trains is code of the package; its copy is an example like the others.
_TEAM: Final = "reasoning_team"
_IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.pyc")

examples = typer.Typer(help="Examples to start from.", no_args_is_help=True)


def demo(
    seed: Annotated[int, typer.Option(help="Of models, questions and samples.")] = 0,
    data_dir: options.DataDir = None,
    assignments: options.Assignments = None,
) -> None:
    """Train the example team on this machine, and show its success before and after.

    Warm-starts two small models, then does what `troupe train` does with their job: minutes on two
    cores, no GPU.
    """
    root = data_directory(data_dir)
    models = root / "models" / f"{_TEAM}-{seed}"
    environment = dict(os.environ)  # as the user has it, before torch adds to it
    with ending_in_a_line():
        try:
            # Here, as it takes seconds: Ctrl-C meanwhile ends in a line, too.
            from troupe.demo.warm_start import Settings, warm_start
        except ModuleNotFoundError as error:
            raise FailedPrecondition(
                f"the demo needs the package {error.name}, which is not installed here",
                kind="package_missing",
                remedy='`pip install "troupe-rl[cpu]"`',
            ) from error
        warm_start(models, Settings(seed=seed))
    changes = [
        f"seed={seed}",
        f"policies.solver.model.path={models / 'solver'}",
        f"policies.checker.model.path={models / 'checker'}",
        *(assignments or []),
    ]
    command = [sys.executable, "-m", "troupe.client.cli", "train", str(_DEMO / "job.yaml")]
    command += ["--data-dir", str(root)]
    command += [part for change in changes for part in ("--set", change)]
    sys.stdout.flush()
    # In its place: Ctrl-C, SIGTERM and the exit status mean what they mean for `troupe train`.
    os.execve(sys.executable, command, environment)


@examples.command("list")
def list_examples() -> None:
    """List the examples by name, with what each shows."""
    console = Console(highlight=False, soft_wrap=True)
    for name, folder in _examples().items():
        console.print(f"{name:<20}{_title(folder)}", markup=False)


def _complete(incomplete: str) -> list[str]:
    try:
        return [name for name in _examples() if name.startswith(incomplete)]
    except FailedPrecondition:  # shown by the command, not between a shell's words
        return []


@examples.command("copy")
def copy_example(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="As `troupe examples list` has it.", autocompletion=_complete
        ),
    ],
) -> None:
    """Copy an example to ./examples/NAME, where the commands of its README work."""
    known = _examples()
    if name not in known:
        raise NotFound(
            f"there is no example of this name; there are {', '.join(known)}",
            kind="no_such_example",
            field="NAME",
            value=name,
            remedy="Take one of these names.",
        )
    target = Path("examples", name)
    if target.exists():
        raise AlreadyExists(
            f"{target} exists here",
            kind="example_exists",
            field="NAME",
            value=name,
            remedy="Remove it, or stand in another directory.",
        )
    shutil.copytree(known[name], target, ignore=_IGNORED)
    if name == _TEAM:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", Path(__file__).name)
        shutil.copytree(_DEMO, target, ignore=ignored, dirs_exist_ok=True)
        for path in target.iterdir():
            text = path.read_text()
            text = text.replace("troupe.demo", f"examples.{_TEAM}")
            path.write_text(text.replace("troupe/demo", f"examples/{_TEAM}"))
    Path("examples/__init__.py").touch()
    Console().print(f"copied to {target}", highlight=False, soft_wrap=True)
    for path in (*sorted(target.glob("README.md")), *sorted(target.glob("*.yaml"))):
        Console().print(f"  {path}", highlight=False, soft_wrap=True)


def _examples() -> dict[str, Path]:
    """Folders of the examples, by name: those of the wheel, or of the checkout that this is."""
    for root in (_PACKAGE / "examples", _PACKAGE.parent / "examples"):
        found = {one.name: one for one in sorted(_folders(root))}
        if found:
            return found
    raise FailedPrecondition(
        "this installation of Troupe has no examples",
        kind="examples_missing",
        remedy="Install Troupe's wheel, or run this in a checkout.",
    )


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (one for one in root.iterdir() if (one / "__init__.py").exists())


def _title(folder: Path) -> str:
    """What an example shows: the first line of its package's docstring."""
    return (folder / "__init__.py").read_text().strip().strip('"').splitlines()[0]
