"""Reads a job specification and says precisely what is wrong with a bad one."""

from __future__ import annotations

import difflib
import json
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from troupe.job.spec import JobSpec

# YAML is parsed at a hundred kilobytes per second; specifications have a few.
MAX_BYTES = 1 << 20
# Written out. Aliases make a few lines of YAML stand for more values than any memory holds.
_MAX_VALUES = 200_000


@dataclass(frozen=True)
class FieldProblem:
    """One fault: the field as the user wrote it, its value, what is wrong, what to do."""

    field: str
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return f"{self.field}{shown}: {self.message}. {self.remedy}"


class JobSpecError(ValueError):
    """The specification is unusable; `problems` lists every fault found."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(p) for p in problems))


def load_job(path: str | Path) -> JobSpec:
    """Read and validate a YAML file. Raises `JobSpecError`."""
    source = Path(path)
    try:
        with source.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(str(source), f"is not UTF-8 text: {error.reason}") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no system can have
        reason = getattr(error, "strerror", None) or error
        raise _unreadable(str(source), f"cannot be read: {reason}", "Check the path.") from error
    return parse_job(text, str(source))


def parse_job(text: str, source: str = "the job") -> JobSpec:
    """Validate YAML (or JSON) text; `source` is what errors call it. Raises `JobSpecError`."""
    raw = _read(text, source)
    if raw is None:
        raise _unreadable(source, "is empty")
    if not isinstance(raw, dict):
        raise _unreadable(source, f"must be a mapping, not {type(raw).__name__}")
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        raise JobSpecError([_explain(raw, e) for e in error.errors()]) from error


def _read(text: str, source: str) -> Any:
    """What the text says, as plain values of a bounded size."""
    if len(text) > MAX_BYTES:
        raise _unreadable(
            source,
            f"is longer than {MAX_BYTES:,} bytes",
            "Keep data out of it: let `tasks.source` read them from files.",
        )
    try:
        if text.lstrip().startswith("{"):
            try:  # what services pass on is JSON; this is a hundred times as fast
                return json.loads(text)
            except ValueError:
                pass
        raw = yaml.safe_load(text)
        _count(raw, {}, set(), source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise _unreadable(where, str(problem), "Mend the YAML syntax there.") from error
    except JobSpecError:
        raise
    except ValueError as error:  # YAML's own conversions: 2026-13-45 is no date
        raise _unreadable(source, str(error), "Quote the value to make it a string.") from error
    except RecursionError as error:
        raise _unreadable(source, "is nested too deeply") from error
    return raw


def _count(value: Any, known: dict[int, int], open_: set[int], source: str) -> int:
    """Values that `value` consists of when it is written out, aliases and all."""
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    if id(value) in open_:
        raise _unreadable(source, "contains itself through an alias", "Remove the alias.")
    if id(value) not in known:
        open_.add(id(value))
        known[id(value)] = 1 + sum(_count(child, known, open_, source) for child in children)
        open_.remove(id(value))
    if known[id(value)] > _MAX_VALUES:
        raise _unreadable(
            source,
            f"stands for more than {_MAX_VALUES:,} values",
            "Keep data out of it: let `tasks.source` read them from files.",
        )
    return known[id(value)]


def _unreadable(
    where: str,
    message: str,
    remedy: str = "Start from an example; `troupe job schema` lists the fields.",
) -> JobSpecError:
    return JobSpecError([FieldProblem(where, "", message, remedy)])


def _explain(raw: Any, error: Any) -> FieldProblem:
    location = error["loc"]
    field = ".".join(str(part) for part in location) or "job"
    value = "" if error["type"] in ("missing", "value_error") else _short(error.get("input"))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and not location:
        field, _, message = message.partition(": ") if ": " in message else ("job", "", message)
    return FieldProblem(field, value, message, _remedy(error, location))


def _remedy(error: Any, location: tuple[Any, ...]) -> str:
    if error["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        if close:
            return f"Did you mean `{close[0]}`?"
        return f"Known fields here: {', '.join(known)}."
    if error["type"] == "missing":
        return "Add the field; `troupe job schema` describes it."
    return "`troupe job schema` describes the field."


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    """The field names of the section that `location` leads to."""
    here: Any = JobSpec
    for part in location:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = _optional(field.annotation) if field else None
        elif isinstance(here, types.UnionType):  # `part` was the tag of one of them
            here = next((one for one in get_args(here) if part in tags_of(one)), None)
        else:  # dict[str, Section]: `part` was the key
            here = get_args(here)[-1] if get_args(here) else None
    if isinstance(here, type) and issubclass(here, BaseModel):
        return sorted(here.model_fields)
    return []


def _optional(annotation: Any) -> Any:
    """What a field holds when it holds something."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    given = [one for one in get_args(annotation) if one is not types.NoneType]
    return given[0] if len(given) == 1 else annotation


def tags_of(section: Any) -> tuple[str, ...]:
    """By which a section is chosen among others: the values of its first field, if those are
    named."""
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return ()
    first = next(iter(section.model_fields.values()))
    return get_args(first.annotation) if get_origin(first.annotation) is Literal else ()


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
