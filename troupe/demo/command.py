"""`troupe demo`, which trains the example team; `troupe examples`, which copies examples to where
the user stands and runs recipes; and `troupe init`, which makes a project of its own from one.

A wheel has the repository's folder `examples` at `troupe/examples` (setup.py), as files to copy.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

import troupe
from troupe.client.cli import options
from troupe.client.cli.failures import Interrupted, Interrupts
from troupe.client.cli.train import open_session
from troupe.client.discovery import data_directory
from troupe.demo import ending_in_a_line
from troupe.rpc.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

if TYPE_CHECKING:
    from troupe.cluster.settings import ClusterSettings
    from troupe.recipes.recipe import Recipe

_PACKAGE: Final = Path(troupe.__file__).parent
_DEMO: Final = _PACKAGE / "demo"
# What `troupe demo` trains is code of the package; its copy is an example like the others.
_TEAM: Final = "reasoning_team"
# The example that `troupe init` copies.
_STARTER: Final = "starter"
# The folder of recipes, below the examples'.
_PAPERS: Final = "papers"
# What names of jobs do not have.
_NO_NAME: Final = re.compile(r"[^a-z0-9._-]+")
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
        console.print(f"{name:<24}{_title(folder)}", markup=False)


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
    source = _named(name, known)
    target = Path("examples", name)
    if target.exists():
        raise AlreadyExists(
            f"{target} exists here",
            kind="example_exists",
            field="NAME",
            value=name,
            remedy="Remove it, or stand in another directory.",
        )
    shutil.copytree(source, target, ignore=_IGNORED)
    if name == _TEAM:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", Path(__file__).name)
        shutil.copytree(_DEMO, target, ignore=ignored, dirs_exist_ok=True)
        for path in target.iterdir():
            text = path.read_text()
            text = text.replace("troupe.demo", f"examples.{_TEAM}")
            path.write_text(text.replace("troupe/demo", f"examples/{_TEAM}"))
    for package in target.parents[:-1]:
        (package / "__init__.py").touch()
    Console().print(f"copied to {target}", highlight=False, soft_wrap=True)
    for path in (*sorted(target.glob("README.md")), *sorted(target.glob("*.yaml"))):
        Console().print(f"  {path}", highlight=False, soft_wrap=True)


@examples.command("run")
@options.with_cluster_options("data_dir", "threads", "start_timeout")
def run_recipe(
    settings: options.MakeSettings,
    name: Annotated[
        str,
        typer.Argument(
            metavar="papers/NAME", help="A recipe in the list.", autocompletion=_complete
        ),
    ],
    seeds: Annotated[
        int, typer.Option(min=1, max=10, help="Run seeds 0, 1, ...; those in DIR are not repeated.")
    ] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Directory of results, picture and page; default: papers/NAME in the data "
            "directory.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="A smoke run of two steps, no measurement.")] = False,
) -> None:
    """Run all arms of a published result, and judge it by the criteria of its page.

    Minutes per seed on two cores. The jobs stay in the cluster of the data directory, where
    `troupe jobs compare` and the panel compare them.
    """
    if not (_named(name, _examples()) / "recipe.py").exists():
        recipes = [one for one, folder in _examples().items() if (folder / "recipe.py").exists()]
        raise InvalidArgument(
            "is an example, but no recipe",
            field="papers/NAME",
            value=name,
            remedy=f"Recipes: {', '.join(recipes)}. `troupe train` runs other examples' jobs.",
        )
    made = settings()
    target = (out or made.data_dir / name).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        root = _root_of(name, Path(scratch))
        status = asyncio.run(_run_recipe(name, root, made.resolved(), range(seeds), target, quick))
    raise typer.Exit(status)


async def _run_recipe(
    name: str, root: Path, settings: ClusterSettings, seeds: Sequence[int], out: Path, quick: bool
) -> int:
    """Run a recipe of the folder `root` on a cluster of `settings`; return the exit status."""
    sys.path.insert(0, str(root))
    try:
        # Here, as they import torch.
        recipe: Recipe = importlib.import_module(f"examples.{name.replace('/', '.')}.recipe").RECIPE
        from troupe.recipes.page import print_results
        from troupe.recipes.running import begun, run
    except ImportError as error:
        raise FailedPrecondition(
            f"the recipe needs a package that is not installed here: {error}",
            kind="package_missing",
            remedy='`pip install "troupe-rl[cpu,games]"`',
        ) from error
    begun(recipe, out, quick=quick)  # before a cluster is started
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def tell(text: str) -> None:
        console.print(text, markup=False)

    with Interrupts() as interrupts:
        try:
            async with open_session(
                settings, address=None, keep_up=False, interrupts=interrupts, say=tell
            ) as session:
                running = run(
                    recipe,
                    session.client,
                    seeds,
                    root=root,
                    out=out,
                    models=settings.data_dir / "models",
                    quick=quick,
                    tell=tell,
                )
                results = await interrupts.guard(running)
        except Interrupted:
            return interrupts.status
    print_results(recipe, results, out, Console(highlight=False, soft_wrap=True))
    tell(f"the jobs are in {settings.data_dir}: `troupe up --data-dir {settings.data_dir}`")
    return 0


def _root_of(name: str, scratch: Path) -> Path:
    """Return the folder with the package `examples` that has the recipe: where the user stands,
    else the checkout, else a copy of the wheel's in `scratch`."""
    for root in (Path.cwd(), _PACKAGE.parent):
        if (root / "examples" / name / "recipe.py").exists():
            return root
    shutil.copytree(_PACKAGE / "examples", scratch / "examples", ignore=_IGNORED)
    return scratch


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="New or empty directory.")
    ],
) -> None:
    """Make a project: a workflow of two agents, tasks, a job, a test, and a model for the CPU.

    It validates and trains as it is. Begin with the commands that are printed.
    """
    target = directory.expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise AlreadyExists(
            "exists and is not an empty directory",
            kind="project_exists",
            field="DIR",
            value=str(directory),
            remedy="Name a new directory.",
        )
    target.mkdir(parents=True, exist_ok=True)
    name = _NO_NAME.sub("-", target.resolve().name.lower()).strip("-.") or _STARTER
    for path in _files(_examples()[_STARTER]):
        text = path.read_text(encoding="utf-8")
        # It is a package of examples there, and files of their own here.
        text = text.replace(f"python -m examples.{_STARTER}.model", "python model.py")
        text = text.replace(f"examples/{_STARTER}/", "").replace(f"examples.{_STARTER}.", "")
        text = text.replace(f"pytest examples/{_STARTER}", "pytest")
        text = text.replace(f"name: {_STARTER}\n", f"name: {name}\n")
        (target / path.name).write_text(text, encoding="utf-8")
    say = Console(highlight=False, soft_wrap=True).print
    say(f"made a project in {target}", markup=False)
    for command, effect in (
        (f"cd {shlex.quote(str(directory))}", ""),
        ("python model.py", "a small model, for a first run on the CPU"),
        ("troupe workflow try job.yaml", "plays the team with made-up replies"),
        ("python -m pytest", "its test (`pip install pytest`)"),
        ("troupe job validate job.yaml --imports", "checks the job, its code and its data"),
        ("troupe train job.yaml", "trains it, about two minutes on two cores"),
    ):
        say(f"  {command:<40}# {effect}" if effect else f"  {command}", markup=False)


def _files(folder: Path) -> list[Path]:
    """Return the files of an example without those that make it a package."""
    ignored = _IGNORED(str(folder), [one.name for one in folder.iterdir()])
    return [one for one in sorted(folder.iterdir()) if one.name not in {*ignored, "__init__.py"}]


def _examples() -> dict[str, Path]:
    """Folders of the examples, by name: those of the wheel, or of the checkout that this is."""
    for root in (_PACKAGE / "examples", _PACKAGE.parent / "examples"):
        found = {one.relative_to(root).as_posix(): one for one in sorted(_folders(root))}
        if found:
            return found
    raise FailedPrecondition(
        "this installation of Troupe has no examples",
        kind="examples_missing",
        remedy="Install Troupe's wheel, or run this in a checkout.",
    )


def _named(name: str, known: dict[str, Path]) -> Path:
    """Return the folder of an example. Raises `NotFound` for a name that is not `known`."""
    if name not in known:
        raise NotFound(
            f"there is no example of this name; there are {', '.join(known)}",
            kind="no_such_example",
            field="NAME",
            value=name,
            remedy="Take one of these names.",
        )
    return known[name]


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders of examples and of recipes."""
    if root.is_dir():
        for one in root.iterdir():
            if one.name == _PAPERS:
                yield from _folders(one)
            elif (one / "__init__.py").exists():
                yield one


def _title(folder: Path) -> str:
    """Return what an example shows: the first paragraph of its package's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
