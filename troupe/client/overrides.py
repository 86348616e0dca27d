"""`--set key.path=value`: changes single fields of a job's YAML before it is validated."""

from __future__ import annotations

from typing import Any

import yaml

from troupe.job import JobSpecError, parse_job
from troupe.job.faults import FieldProblem
from troupe.job.loading import load_yaml


def apply(text: str, assignments: list[str]) -> dict[str, Any]:
    """The mapping in YAML `text` with every `key.path=value` set; `value` is YAML.

    Sections on the way are made when they are missing; validation comes later, so a misspelt
    field is refused as it would be in the file. Raises `JobSpecError`.
    """
    try:
        raw = load_yaml(text)
    except yaml.YAMLError:
        parse_job(text)  # raises, saying where
        raise
    if not isinstance(raw, dict):
        parse_job(text)
        raise AssertionError("parse_job takes only mappings")
    for assignment in assignments:
        path, value = _split(assignment)
        _set(raw, path, value, assignment)
    return raw


def _split(assignment: str) -> tuple[list[str], Any]:
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise _bad(assignment, "is not of the form key.path=value")
    try:
        return path, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _bad(assignment, f"its value is not YAML ({getattr(error, 'problem', error)})") from (
            error
        )


def _set(here: Any, path: list[str], value: Any, assignment: str) -> None:
    for depth, part in enumerate(path[:-1]):
        here = _child(here, part)
        if not isinstance(here, dict | list):
            section = ".".join(path[: depth + 1])
            raise _bad(assignment, f"`{section}` is a value, not a section")
    last = path[-1]
    if isinstance(here, list):
        if not last.isdigit() or int(last) >= len(here):
            raise _bad(assignment, f"the list has the items 0 to {len(here) - 1}")
        here[int(last)] = value
    else:
        here[last] = value


def _child(here: Any, part: str) -> Any:
    if isinstance(here, list):
        return here[int(part)] if part.isdigit() and int(part) < len(here) else None
    if here.get(part) is None:
        here[part] = {}
    return here[part]


def _bad(assignment: str, message: str) -> JobSpecError:
    remedy = "Write for example `--set pipeline.steps=20`."
    return JobSpecError([FieldProblem("--set", repr(assignment), message, remedy)])
