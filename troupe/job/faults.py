"""What pydantic refused, told to whoever wrote it: field, value, what is wrong, what to do."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

_SCHEMA = "`troupe job schema` describes the field."


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


def explained(
    error: ValidationError, model: type[BaseModel], remedy: str = _SCHEMA
) -> list[FieldProblem]:
    """Every fault of a value that `model` refused; `remedy` where nothing better can be said."""
    return [problem_of(fault, fault["loc"], model, remedy) for fault in error.errors()]


def problem_of(
    fault: Mapping[str, Any],
    location: tuple[Any, ...],
    model: type[BaseModel] | None,
    remedy: str = _SCHEMA,
) -> FieldProblem:
    """One fault, as pydantic tells it, at `location` within a value of `model` (None: unknown)."""
    field = ".".join(str(part) for part in location) or "job"
    kind = fault["type"]
    value = "" if kind in ("missing", "value_error") else _short(fault.get("input"))
    message = str(fault["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and not location:
        field, _, message = message.partition(": ") if ": " in message else ("job", "", message)
    if kind == "extra_forbidden":
        message = "there is no such field"
        known = _fields_at(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        if close:
            remedy = f"Did you mean `{close[0]}`?"
        elif known:
            remedy = f"Known fields here: {', '.join(known)}."
    elif kind == "missing":
        remedy = f"Add the field; {remedy}"
    return FieldProblem(field, value, message, remedy)


def _fields_at(model: type[BaseModel] | None, location: tuple[Any, ...]) -> list[str]:
    """The field names of the section of `model` that `location` leads to."""
    here: Any = model
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
