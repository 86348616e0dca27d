"""From what a user hands to `deploy` to functions with their source: read, imported once in an
interpreter of its own to see what it declares, and sent as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from troupe.functions.costs import to_spec
from troupe.functions.describing import Described, DescribeError, described
from troupe.job import FunctionSpec
from troupe.job.faults import FieldProblem, explained
from troupe.rpc.errors import InvalidArgument
from troupe.v1 import reward_pb2 as pb

_LISTED: Final = "docs/job-reference.md lists what a function can declare."
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_FILES: Final = 1000
_MOST_BYTES: Final = 16 * 2**20
_NO_COSTS: Final = frozenset(("name", "source", "entrypoint", "function", "version", "arguments"))
_REMEDY: Final = (
    "Give FILE.py, FILE.py:function, FOLDER with an entrypoint in it, or "
    "package.module[:function] that is installed where the cluster runs."
)


@dataclass(frozen=True)
class Deployment:
    """Functions to deploy; `files` are empty where the code is installed with the cluster."""

    files: tuple[pb.SourceFile, ...]
    functions: tuple[pb.FunctionSpec, ...]


def prepare(
    source: str | Path,
    entrypoint: str | None,
    name: str | None,
    version: str | None,
    costs: Mapping[str, Any],
) -> Deployment:
    """What `source` holds; see `AsyncFunctions.deploy`. Raises `InvalidArgument`."""
    target, folder, files = _read(str(source), entrypoint)
    try:
        found = described(target, folder)
    except DescribeError as error:
        raise InvalidArgument(
            str(error),
            kind="not_importable",
            field="source",
            value=source,
            remedy="Make it importable here, or mend what it says.",
        ) from error
    if (name or version) and len(found) > 1:
        raise InvalidArgument(
            f"there are {len(found)} functions: {', '.join(one.name for one in found)}",
            field="name" if name else "version",
            value=name or version,
            remedy="Name one of them: FILE.py:function.",
        )
    found = [replace(one, name=name or one.name, version=version or one.version) for one in found]
    own = checked_costs(costs)
    return Deployment(files, tuple(_spec(one, own) for one in found))


def _spec(one: Described, costs: Mapping[str, Any]) -> pb.FunctionSpec:
    return to_spec(
        one.name,
        one.version,
        one.entrypoint,
        costs,
        declared=one.costs,
        kind=one.kind,
        description=one.description,
        parameters=one.parameters,
    )


def checked_costs(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, as a job's `rewards` and `tools` take them. Raises `InvalidArgument`."""
    for field in _NO_COSTS & given.keys():
        raise InvalidArgument(
            "is no cost of a function",
            field=field,
            value=given[field],
            remedy="Name, version and code are said beside the costs, arguments by whoever calls.",
        )
    try:
        return FunctionSpec(entrypoint="any:function", **given).costs
    except (ValidationError, TypeError) as error:
        if isinstance(error, ValidationError):
            first = explained(error, FunctionSpec, _LISTED)[0]
        else:
            first = FieldProblem("costs", "", str(error), _LISTED)
        raise InvalidArgument(
            first.message,
            field=first.field,
            value=given.get(first.field),
            remedy=first.remedy,
        ) from error


def _read(source: str, entrypoint: str | None) -> tuple[str, str | None, tuple[pb.SourceFile, ...]]:
    """What to describe, the directory to import it from, and the files to upload."""
    path, attribute = source, entrypoint or ""
    if not Path(source).exists() and ":" in source:
        path, _, attribute = source.rpartition(":")
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == ".py":
        if not _MODULE.fullmatch(place.stem):
            raise InvalidArgument(
                "is no name of a module", field="source", value=place.name, remedy="Rename it."
            )
        file = pb.SourceFile(path=place.name, content=place.read_bytes())
        _, _, attribute = attribute.rpartition(":")
        return _joined(place.stem, attribute), str(place.resolve().parent), (file,)
    if place.is_dir():
        if not attribute:
            raise InvalidArgument(
                "is a folder: say which module of it holds the functions",
                field="entrypoint",
                value="",
                remedy="Give `module` or `package.module:function`, as seen from the folder.",
            )
        return attribute, str(place.resolve()), tuple(_files(place))
    if place.is_file():
        raise InvalidArgument(
            "is a file, but no Python source", field="source", value=source, remedy=_REMEDY
        )
    if place.suffix == ".py" or not _MODULE.fullmatch(path):
        raise InvalidArgument(
            "there is no such file, folder or module", field="source", value=source, remedy=_REMEDY
        )
    return _joined(path, attribute), str(Path.cwd()), ()


def _joined(module: str, attribute: str) -> str:
    return f"{module}:{attribute}" if attribute else module


def _files(folder: Path) -> Iterator[pb.SourceFile]:
    """The text files of a folder; hidden ones and what the interpreter made are not code."""
    size = 0
    for count, path in enumerate(_walk(folder)):
        content = path.read_bytes()
        size += len(content)
        if count >= _MOST_FILES or size > _MOST_BYTES:
            raise InvalidArgument(
                f"holds more than {_MOST_FILES:,} files or {_MOST_BYTES // 2**20} MiB",
                field="source",
                value=folder,
                remedy="Deploy the folder of the code alone; install what is large as a package.",
            )
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue  # no code, and no text that code reads
        yield pb.SourceFile(path=path.relative_to(folder).as_posix(), content=content)


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or path.is_symlink():
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path
