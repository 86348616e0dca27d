"""What pydantic refused, told to whoever wrote it: field, value, what is wrong, what to do."""

from __future__ import annotations

import difflib
import reprlib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from troupe.rpc.addresses import without_secrets

_SCHEMA = "`troupe job schema` describes the field."
# An error has to fit into what gRPC carries beside an answer.
_MOST_TOLD = 20


@dataclass(frozen=True)
class FieldProblem:
    """One fault: the field as the user wrote it, its value, what is wrong, what to do."""

    field: str
    value: str
    message: str
    remedy: str

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return without_secrets(f"{self.field}{shown}: {self.message}. {self.remedy}")


def explained(
    error: ValidationError, model: type[BaseModel], remedy: str = _SCHEMA
) -> list[FieldProblem]:
    """The first faults of a value that `model` refused, and how many more there are; `remedy` where
    nothing better can be said."""
    faults = error.errors(include_url=False)
    told = [problem_of(one, one["loc"], model, remedy) for one in faults[:_MOST_TOLD]]
    if more := len(faults) - len(told):
        told.append(FieldProblem("job", "", f"{more:,} more fields are wrong", "Mend these first."))
    return told


def problem_of(
    fault: Mapping[str, Any],
    location: tuple[Any, ...],
    model: type[BaseModel] | None,
    remedy: str = _SCHEMA,
) -> FieldProblem:
    """One fault, as pydantic tells it, at `location` within a value of `model` (None: unknown)."""
    field = ".".join(_cut(str(part)) for part in location) or "job"
    kind = fault["type"]
    value = "" if kind in ("missing", "value_error") else _short(fault.get("input"))
    message = _cut(str(fault["msg"]).removeprefix("Value error, "), 600)
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


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length():,} bits"
    # `repr` writes all of it out; a key or an item that cannot say what it is must not end this.
    try:
        return _cut(repr(value) if isinstance(value, int | float | str) else _REPR.repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def _cut(text: str, limit: int = 60) -> str:
    # Before it is cut: half of a password is not known as one.
    text = without_secrets(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Repr(reprlib.Repr):
    """As `repr`, of the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 20
        self.maxstring = self.maxother = 80
        self.maxlevel = 4

    def repr_str(self, x: str, level: int) -> str:
        """The text, whose beginning shows no secrets either."""
        return super().repr_str(without_secrets(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """An integer of any size."""
        return _short(x)


_REPR = _Repr()
