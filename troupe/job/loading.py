"""Reads a job specification and says precisely what is wrong with a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from troupe.job.faults import FieldProblem, explained
from troupe.job.spec import JobSpec
from troupe.yaml_input import MAX_BYTES, UnreadableText, read_file, read_text


class JobSpecError(ValueError):
    """The specification is unusable; `problems` lists every fault found."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(p) for p in problems))


def load_job(path: str | Path) -> JobSpec:
    """Read and validate a YAML file. Raises `JobSpecError`."""
    return parse_job(load_text(path), str(path))


def load_text(path: str | Path) -> str:
    """The text of a job file. Raises `JobSpecError`."""
    try:
        return read_file(Path(path))
    except UnreadableText as error:
        raise _unreadable(error) from error


def parse_job(text: str, source: str = "the job") -> JobSpec:
    """Validate YAML (or JSON) text; `source` is what errors call it. Raises `JobSpecError`."""
    return job_of(read_mapping(text, source))


def read_mapping(text: str, source: str = "the job") -> dict[str, Any]:
    """The mapping in YAML (or JSON) text, not validated. Raises `JobSpecError`."""
    try:
        raw = read_text(text, source)
    except UnreadableText as error:
        raise _unreadable(error) from error
    if isinstance(raw, dict):
        return raw
    problem = "is empty" if raw is None else f"must be a mapping, not {type(raw).__name__}"
    remedy = "Start from an example; `troupe job schema` lists the fields."
    raise JobSpecError([FieldProblem(source, "", problem, remedy)])


def job_of(raw: dict[str, Any]) -> JobSpec:
    """The job of a mapping as `read_mapping` gives it. Raises `JobSpecError`."""
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        raise JobSpecError(explained(error, JobSpec)) from error
    # Services pass it on as JSON, with everything written out.
    if (size := len(spec.model_dump_json())) > MAX_BYTES:
        problem = f"has {size:,} bytes with all defaults filled in, more than {MAX_BYTES:,}"
        remedy = "Keep data out of it: let `tasks.source` read them from files."
        raise JobSpecError([FieldProblem("job", "", problem, remedy)])
    return spec


def _unreadable(error: UnreadableText) -> JobSpecError:
    return JobSpecError([FieldProblem(error.where, "", error.problem, error.remedy)])
