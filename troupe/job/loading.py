"""Reads a job specification and says precisely what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError

from troupe.job.faults import FieldProblem, explained
from troupe.job.spec import JobSpec

# YAML is parsed at a hundred kilobytes per second; specifications have a few.
MAX_BYTES = 1 << 20
# Written out. Aliases make a few lines of YAML stand for more values than any memory holds.
_MAX_VALUES = 200_000


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
        raise JobSpecError(explained(error, JobSpec)) from error


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
                return json.loads(text, object_pairs_hook=_each_once)
            except ValueError:
                pass
        raw = load_yaml(text)
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


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError for a key that is there twice: read as YAML, it is told where."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def load_yaml(text: str) -> Any:
    """Plain values of YAML `text`. Raises `YAMLError`, also for a key written twice."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """Refuses a key that its mapping has already, of which YAML's own keeps the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Not when it is constructed: by then `<<` has brought in keys that may be there twice.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                problem = f"`{key.value}` is there a second time; a name stands for one thing"
                raise ComposerError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return node


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
