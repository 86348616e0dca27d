"""Reads a job specification and says precisely what is wrong with a bad one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from troupe.job.spec import JobSpec


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
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobSpecError(
            [FieldProblem(str(source), "", f"cannot be read: {error}", "Check the path.")]
        ) from error
    return parse_job(text)


def parse_job(text: str) -> JobSpec:
    """Validate YAML (or JSON) text. Raises `JobSpecError`."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise JobSpecError(
            [FieldProblem(where, "", str(problem), "Mend the YAML syntax there.")]
        ) from error
    if not isinstance(raw, dict):
        raise JobSpecError(
            [
                FieldProblem(
                    "the file",
                    "",
                    f"must be a mapping, not {type(raw).__name__}",
                    "Start from an example; `troupe job schema` lists the fields.",
                )
            ]
        )
    try:
        return JobSpec.model_validate(raw)
    except ValidationError as error:
        raise JobSpecError([_explain(raw, e) for e in error.errors()]) from error


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
            here = field.annotation if field else None
        else:  # dict[str, Section]: `part` was the key
            here = get_args(here)[-1] if get_args(here) else None
    if isinstance(here, type) and issubclass(here, BaseModel):
        return sorted(here.model_fields)
    return []


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
