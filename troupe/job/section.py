"""Base class of job sections, with their common bounds and checks.

Every number has a lower and an upper bound, and every list and mapping a maximum length: values
must be representable in protobuf, JSON and the timeouts of gRPC and asyncio, and a typing error
must not keep the orchestrator busy forever.
"""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import MaxLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import (
    InitErrorDetails,
    PydanticCustomError,
    PydanticSerializationError,
    to_jsonable_python,
)

from troupe.functions.validation import MAX_SECONDS
from troupe.yaml_input import UnreadableText, as_yaml_1_1, measure

_ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
NAME = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$"
JOB_NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"

# More than the fields of any section.
_MAX_FIELDS: Final = 256
MAX_STEPS: Final = 1_000_000_000
# Tokens of anything: one response, a context, a micro-batch.
MAX_TOKENS: Final = 1 << 24
# A rate per second, a norm or a coefficient: far above any use, far below the overflow of floats.
MAX_RATE: Final = 1e12
MAX_COEFFICIENT: Final = 1e6
MAX_NORM: Final = 1e12
MAX_AGENTS: Final = 1024
MAX_POLICIES: Final = 256
# Engines of a policy on one rollout worker.
MAX_ENGINES: Final = 1024
MAX_FUNCTIONS: Final = 256
# Maximum queries of one step or evaluation, and their maximum number of trajectories.
MAX_QUERIES: Final = 1 << 16
MAX_TRAJECTORIES: Final = 1 << 18
_MIN_SEED: Final = -(1 << 63)
_MAX_SEED: Final = (1 << 63) - 1

Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MAX_STEPS)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokensOrNone = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
SecondsOrNone = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Coefficient = Annotated[float, Field(ge=0, le=MAX_COEFFICIENT)]
Norm = Annotated[float, Field(gt=0, le=MAX_NORM)]
Seed = Annotated[int, Field(ge=_MIN_SEED, le=_MAX_SEED)]
Queries = Annotated[int, Field(ge=0, le=MAX_QUERIES)]

# Spellings of `on` and `off` in fields with further choices.
_SWITCH: Final[Mapping[object, str]] = {
    **dict.fromkeys((True, "on", "yes", "y", "true"), "on"),
    **dict.fromkeys((False, "off", "no", "n", "false"), "off"),
}


class Section(BaseModel):
    """Base class of job sections: refuses unknown fields, infinity and NaN, and is immutable."""

    # Infinity and NaN are not JSON, which services exchange the specification in.
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, raw: Any) -> Any:
        """Restore `on` and `off`, which YAML 1.1 and JSON read as booleans, in fields with these
        choices; refuse booleans for numbers, which pydantic would convert to 1 or 0."""
        if not isinstance(raw, dict):
            return raw
        _check_lengths(cls, raw)
        switches, numbers = _shapes(cls)
        changed: dict[str, str] = {}
        for name, choices in switches.items():
            value = raw.get(name)
            if isinstance(value, bool | str):
                key = value.lower() if isinstance(value, str) else value
                if (meant := _SWITCH.get(key)) in choices:
                    changed[name] = meant
        for name in numbers:
            if isinstance(value := raw.get(name), bool):
                changed[name] = str(value).lower()
        return {**raw, **changed} if changed else raw


def _check_lengths(section: type[BaseModel], raw: Mapping[str, Any]) -> None:
    """Raise ValidationError for mappings and lists that are too long.

    This precedes the validation of their items: pydantic would report a fault for each of a hundred
    thousand.
    """
    bounds = [((name,), raw.get(name), most) for name, most in _most_items(section).items()]
    faults = [
        InitErrorDetails(
            type=PydanticCustomError(
                "too_long",
                "{actual} entries; at most {most} are possible",
                {"actual": len(value), "most": most},
            ),
            loc=location,
            input=value,
        )
        for location, value, most in [((), raw, _MAX_FIELDS), *bounds]
        if isinstance(value, dict | list) and len(value) > most
    ]
    if faults:
        raise ValidationError.from_exception_data(section.__name__, faults)


@cache
def _most_items(section: type[BaseModel]) -> Mapping[str, int]:
    """Return the maximum number of entries of each mapping or list of a section."""
    return {
        name: bound.max_length
        for name, field in section.model_fields.items()
        for bound in field.metadata
        if isinstance(bound, MaxLen)
    }


@cache
def _shapes(section: type[BaseModel]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return, by field, the choices that include `on` or `off`; and the numeric fields."""
    switches, numbers = {}, []
    for name, field in section.model_fields.items():
        kinds = list(_kinds(field.annotation))
        if {int, float} & set(kinds) and bool not in kinds:
            numbers.append(name)
        for kind in kinds:
            if get_origin(kind) is Literal and {"on", "off"} & set(choices := get_args(kind)):
                switches[name] = choices
    return switches, tuple(numbers)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of a field's type."""
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        for one in get_args(annotation):
            yield from _kinds(one)
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation


def check_entrypoint(value: str) -> str:
    if not _ENTRYPOINT.fullmatch(value):
        raise ValueError("must look like 'package.module:attribute'")
    return value


def check_column(name: str) -> str:
    """Return `name` if it can name a column of samples. Raises ValueError."""
    if not _COLUMN.fullmatch(name):
        raise ValueError(
            f"{name!r} does not name a column: up to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or '_'"
        )
    return name


ColumnName = Annotated[str, AfterValidator(check_column)]


def check_pattern(value: str | None) -> str | None:
    """Return `value` if it is a regular expression. Raises ValueError."""
    try:
        re.compile(value or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return value


def check_json(value: Any) -> Any:
    """Return a value of any shape, with booleans as in YAML 1.1. Raises ValueError unless it is
    JSON of bounded size."""
    try:
        measure(value, "the value")
        value = as_yaml_1_1(value)
        json.dumps(to_jsonable_python(value), allow_nan=False)
    except UnreadableText as error:
        raise ValueError(f"{error.problem}; {error.remedy}") from error
    except (ValueError, RecursionError, PydanticSerializationError) as error:
        raise ValueError(f"must consist of JSON values: {error}") from error
    return value


def no_directory(source: str) -> bool:
    """Return whether `source` is a path (not of the form of a hub id) but not a directory."""
    meant = source.startswith((".", "/", "~")) or source.count("/") > 1
    path = Path(source).expanduser()
    return (meant or path.exists()) and not path.is_dir()


def expand_home(value: str | None) -> str | None:
    """Return the path with `~` expanded. Raises ValueError for a NUL character."""
    if value is None:
        return None
    if "\0" in value:
        raise ValueError("contains a NUL character, which paths cannot have")
    # The home of the job's author, not of the services.
    return os.path.expanduser(value) if value.startswith("~") else value
