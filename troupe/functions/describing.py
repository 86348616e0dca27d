"""Finds the declarations of a module's functions, by importing the module in a separate
interpreter.

So the import cannot harm the caller, and a module that is edited later is read again. `describe` is
itself a function that the reward service runs: a job's entrypoint is described where it can be
imported.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from troupe.functions.declaration import declaration_of
from troupe.outcomes import described as error_text
from troupe.outcomes import safe_text

# Importing may load a model's libraries.
IMPORT_SECONDS: Final = 60.0


class DescribeError(Exception):
    """A module cannot be imported, or lacks the function; the text gives the reason."""


@dataclass(frozen=True)
class Described:
    """The declaration of one function; `kind` is empty if it declares nothing."""

    entrypoint: str
    kind: str = ""
    name: str = ""
    version: str = "1"
    description: str = ""
    costs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)


def describe(entrypoint: str) -> dict[str, Any]:
    """Return the declaration of "package.module:attribute" as a dict of the fields of `Described`.
    Raises `DescribeError`."""
    return asdict(described(entrypoint)[0])


def described(target: str, path: str | None = None) -> list[Described]:
    """Return the declaration of "package.module:attribute", or the declarations of all functions of
    a module.

    `path`: directory that comes first on the import path. Raises `DescribeError`.
    """
    command = [sys.executable, "-P", "-m", __name__, target]
    folders = [folder for folder in (path, *sys.path) if folder]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    # A separate file for the answer: the module may print during the import. No pipes: a process
    # that the module starts would keep them open.
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
        try:
            subprocess.run(
                [*command, str(answer.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[answer.fileno()],
                timeout=IMPORT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DescribeError(f"{target} was not imported within {IMPORT_SECONDS:g} s") from error
        except OSError as error:
            raise DescribeError(f"no interpreter could be started: {error}") from error
        answer.seek(0)
        text = answer.read()
        errors.seek(0)
        said = errors.read()
    if not text:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise DescribeError(f"importing {target} terminated the interpreter: {' '.join(last)}")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DescribeError(f"importing {target} wrote into the file of its answer") from error
    if "error" in found:
        raise DescribeError(found["error"])
    return [Described(**one) for one in found["functions"]]


def _answer(target: str) -> dict[str, Any]:
    try:
        return {"functions": [asdict(one) for one in _functions(target)]}
    except BaseException as error:  # an import may raise anything, including SystemExit
        text = safe_text(error) if isinstance(error, DescribeError) else error_text(error)
        return {"error": f"{target}: {text}"}


def _functions(target: str) -> Iterator[Described]:
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    if path:
        found: Any = module
        for name in path.split("."):
            found = getattr(found, name)
        if not callable(found):
            raise DescribeError(f"is a {type(found).__name__}, not a function")
        yield _describe(target, found)
        return
    nothing = True
    for name, value in vars(module).items():
        declared = declaration_of(value)
        # A function imported from another module belongs to that module.
        if declared is not None and getattr(value, "__module__", module_name) == module_name:
            nothing = False
            yield _describe(f"{module_name}:{name}", value)
    if nothing:
        raise DescribeError(
            "does not declare a function; decorate one with @troupe.reward or @troupe.tool"
        )


def _describe(entrypoint: str, function: Any) -> Described:
    declared = declaration_of(function)
    if declared is None:
        name = entrypoint.rpartition(":")[2].rpartition(".")[2]
        return Described(entrypoint, name=name)
    return Described(
        entrypoint,
        declared.kind,
        declared.name,
        declared.version,
        declared.description,
        dict(declared.costs),
        declared.parameters,
    )


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as sending:
        # What the module starts has no part in the answer.
        os.set_inheritable(sending.fileno(), False)
        me = os.getpid()
        given = json.dumps(_answer(sys.argv[1]))
        if os.getpid() == me:
            sending.write(given)
            sending.flush()
        # Do not wait for threads that the module started.
        os._exit(0)
