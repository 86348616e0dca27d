"""`--set key.path=value`: changes single fields of a job's YAML before it is validated."""

from __future__ import annotations

from typing import Any, Final

from troupe.job import JobSpecError
from troupe.job.loading import FieldProblem, read_mapping
from troupe.yaml_input import MAX_DEPTH, UnreadableText, read_text

_VALUE: Final = "its value"


def apply(text: str, assignments: list[str], source: str = "the job") -> dict[str, Any]:
    """The mapping in YAML `text` with every `key.path=value` set; `value` is YAML.

    Sections on the way are made when they are missing; validation comes later, so a misspelt
    field is refused as it would be in the file. Raises `JobSpecError`.
    """
    raw = read_mapping(text, source)
    for assignment in assignments:
        path, value = _split(assignment)
        _set(raw, path, value, assignment)
    return raw


def _split(assignment: str) -> tuple[list[str], Any]:
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise _bad(assignment, "is not of the form key.path=value")
    if len(path) > MAX_DEPTH:
        raise _bad(assignment, f"its path is longer than {MAX_DEPTH} names")
    try:
        return path, read_text(text, _VALUE)
    except UnreadableText as error:
        if error.where != _VALUE:  # somewhere in it
            raise _bad(
                assignment, f"its value is not YAML ({error.where}: {error.problem})"
            ) from error
        raise _bad(assignment, f"{_VALUE} {error.problem}") from error


def _set(here: Any, path: list[str], value: Any, assignment: str) -> None:
    for depth, part in enumerate(path[:-1]):
        here = _child(here, part)
        if not isinstance(here, dict | list):
            section = ".".join(path[: depth + 1])
            raise _bad(assignment, f"`{section}` is a value, not a section")
    last = path[-1]
    if isinstance(here, list):
        if (place := _place(here, last)) is None:
            raise _bad(assignment, f"the list has the items 0 to {len(here) - 1}")
        here[place] = value
    else:
        here[last] = value


def _child(here: Any, part: str) -> Any:
    if isinstance(here, list):
        place = _place(here, part)
        return None if place is None else here[place]
    if here.get(part) is None:
        here[part] = {}
    return here[part]


def _place(here: list[Any], part: str) -> int | None:
    """The index that `part` writes, if the list has it."""
    plain = part.isascii() and part.isdigit() and len(part) <= len(str(len(here)))
    return int(part) if plain and int(part) < len(here) else None


def _bad(assignment: str, message: str) -> JobSpecError:
    remedy = "Write for example `--set pipeline.steps=20`."
    shown = repr(assignment if len(assignment) <= 120 else assignment[:117] + "...")
    return JobSpecError([FieldProblem("--set", shown, message, remedy)])
