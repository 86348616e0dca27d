"""Reading and validation of a job specification; every fault is described by field, value and
remedy."""

from __future__ import annotations

import asyncio
import difflib
import reprlib
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from troupe.job.spec import JobSpec
from troupe.rpc.addresses import without_secrets
from troupe.yaml_input import MAX_BYTES, UnreadableText, read_file, read_text

SPEC_FILE: Final = "job.yaml"
"""File of a job's specification in its directory."""
_SCHEMA = "`troupe job schema` describes the field."
# A single thread: several that parse YAML simultaneously would leave little interpreter time to an
# event loop, and could occupy all threads that others wait for.
_PARSER: Final = ThreadPoolExecutor(1, thread_name_prefix="parse-job")
# Maximum number of faults in an error, which has to fit into gRPC's trailing metadata.
_MAX_PROBLEMS = 20


@dataclass(frozen=True)
class FieldProblem:
    """One fault of a job: field path, value, message, remedy."""

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
    """Return the first faults of a value that `model` refused, and the number of further ones;
    `remedy`: the default remedy."""
    faults = error.errors(include_url=False)
    found = [problem_of(one, one["loc"], model, remedy) for one in faults[:_MAX_PROBLEMS]]
    if more := len(faults) - len(found):
        problem = f"{more:,} more fields are wrong"
        found.append(FieldProblem("job", "", problem, "Correct these first."))
    return found


def problem_of(
    fault: Mapping[str, Any],
    location: tuple[Any, ...],
    model: type[BaseModel] | None,
    remedy: str = _SCHEMA,
) -> FieldProblem:
    """Return one fault reported by pydantic, at `location` within a value of `model` (None:
    unknown)."""
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
    """Return the field names of the section of `model` that `location` leads to."""
    here: Any = model
    for part in location:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = _optional(field.annotation) if field else None
        elif isinstance(here, types.UnionType):  # `part` was the tag of one alternative
            here = next((one for one in get_args(here) if part in tags_of(one)), None)
        else:  # dict[str, Section]: `part` was the key
            here = get_args(here)[-1] if get_args(here) else None
    if isinstance(here, type) and issubclass(here, BaseModel):
        return sorted(here.model_fields)
    return []


def _optional(annotation: Any) -> Any:
    """Return the type of an optional field without None."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    given = [one for one in get_args(annotation) if one is not types.NoneType]
    return given[0] if len(given) == 1 else annotation


def tags_of(section: Any) -> tuple[str, ...]:
    """Return the values of a section's first field if that is a Literal: the tag of a union of
    sections."""
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return ()
    first = next(iter(section.model_fields.values()))
    return get_args(first.annotation) if get_origin(first.annotation) is Literal else ()


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length():,} bits"
    # The `repr` of a key or item may raise.
    try:
        return _cut(repr(value) if isinstance(value, int | float | str) else _REPR.repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def _cut(text: str, limit: int = 60) -> str:
    # Before cutting, while secrets can be recognised.
    text = without_secrets(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Repr(reprlib.Repr):
    """A shortened `repr` without secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 20
        self.maxstring = self.maxother = 80
        self.maxlevel = 4

    def repr_str(self, x: str, level: int) -> str:
        """Return the text, without secrets even at its beginning."""
        return super().repr_str(without_secrets(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Return an integer of any size."""
        return _short(x)


_REPR = _Repr()


class JobSpecError(ValueError):
    """The specification is invalid; `problems` lists every fault found."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(p) for p in problems))


def load_job(path: str | Path) -> JobSpec:
    """Read and validate a YAML file. Raises `JobSpecError`."""
    return parse_job(load_text(path), str(path))


def load_text(path: str | Path) -> str:
    """Return the text of a job file. Raises `JobSpecError`."""
    try:
        return read_file(Path(path))
    except UnreadableText as error:
        raise _unreadable(error) from error


def parse_job(
    text: str, source: str = "the job", overrides: Mapping[str, str] | None = None
) -> JobSpec:
    """Validate YAML (or JSON) text; `source` is its name in errors. `overrides`: other values by
    path, as YAML. Raises `JobSpecError`."""
    raw = read_mapping(text, source)
    if not overrides:
        return job_of(raw)
    job = job_of(with_overrides(raw, _values(overrides)))
    for path, value in overrides.items():
        section, _, name = path.partition(".")
        if section == "policies" and name.partition(".")[0] in job.slots:
            problem = "is of a slot, whose values follow from its learner's policy"
            remedy = "Change that policy, or population.engine."
            raise JobSpecError([FieldProblem(path, _cut(value), problem, remedy)])
    return job


async def parse_job_in_thread(
    text: str, source: str = "the job", overrides: Mapping[str, str] | None = None
) -> JobSpec:
    """Call `parse_job` in a thread, one text at a time, while the event loop continues."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_PARSER, parse_job, text, source, overrides)


def _values(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values of overrides. Raises `JobSpecError` that names the field."""
    found = {}
    for path, text in overrides.items():
        try:
            found[path] = read_text(text, path)
        except UnreadableText as error:
            message = f"its value is not YAML ({error.problem})"
            problem = FieldProblem(path, _cut(repr(text)), message, error.remedy)
            raise JobSpecError([problem]) from error
    return found


def read_mapping(text: str, source: str = "the job") -> dict[str, Any]:
    """Return the unvalidated mapping in YAML (or JSON) text. Raises `JobSpecError`."""
    try:
        raw = read_text(text, source)
    except UnreadableText as error:
        raise _unreadable(error) from error
    if isinstance(raw, dict):
        return raw
    problem = "is empty" if raw is None else f"must be a mapping, not {type(raw).__name__}"
    remedy = "Start from an example; `troupe job schema` lists the fields."
    raise JobSpecError([FieldProblem(source, "", problem, remedy)])


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an unvalidated job with other values, by path: `{"pipeline.steps": 20}`.

    Missing sections on a path are made. Raises `JobSpecError` for a path through a value.
    """
    changed: dict[str, Any] = _copied(raw)
    for path, value in overrides.items():
        try:
            set_field(changed, path.split("."), value)
        except ValueError as error:
            remedy = 'Write for example {"pipeline.steps": 20}.'
            raise JobSpecError([FieldProblem(path, _short(value), str(error), remedy)]) from error
    return changed


def _copied(value: Any) -> Any:
    """Return a copy of mappings and lists at any depth, with the same values in them."""
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def set_field(node: Any, path: Sequence[str], value: Any) -> None:
    """Set the field `path` below `node`, a mapping or list of an unvalidated job, to `value`.
    Missing sections are made. Raises ValueError."""
    if not all(path):
        raise ValueError("a name in the path is empty")
    for depth, part in enumerate(path[:-1]):
        node = _child(node, part)
        if not isinstance(node, dict | list):
            raise ValueError(f"`{'.'.join(path[: depth + 1])}` is a value, not a section")
    last = path[-1]
    if isinstance(node, list):
        if (index := _index(node, last)) is None:
            raise ValueError(f"the list has the items 0 to {len(node) - 1}")
        node[index] = value
    else:
        node[last] = value


def _child(node: Any, part: str) -> Any:
    if isinstance(node, list):
        index = _index(node, part)
        return None if index is None else node[index]
    if node.get(part) is None:
        node[part] = {}
    return node[part]


def _index(items: list[Any], part: str) -> int | None:
    """Return `part` as an index of `items`; None if it is not one."""
    plain = part.isascii() and part.isdigit() and len(part) <= len(str(len(items)))
    return int(part) if plain and int(part) < len(items) else None


def job_of(raw: dict[str, Any]) -> JobSpec:
    """Return the job of a mapping from `read_mapping`. Raises `JobSpecError`."""
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        raise JobSpecError(explained(error, JobSpec)) from error
    # Services pass it on as JSON, with all defaults written out.
    if (size := len(spec.model_dump_json())) > MAX_BYTES:
        problem = f"has {size:,} bytes with all defaults filled in, more than {MAX_BYTES:,}"
        remedy = "Keep data out of it: let `tasks.source` read data from files."
        raise JobSpecError([FieldProblem("job", "", problem, remedy)])
    return spec


def _unreadable(error: UnreadableText) -> JobSpecError:
    return JobSpecError([FieldProblem(error.where, "", error.problem, error.remedy)])
