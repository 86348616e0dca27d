"""Whether the code that a job names can be imported where the command runs."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.job import JobSpec, JobSpecError
from troupe.job.faults import FieldProblem
from troupe.workflow.errors import EntrypointError
from troupe.workflow.loading import load_attribute, load_workflow, look_here


def try_imports(job: JobSpec) -> list[str]:
    """Import the workflow, tasks, environment, tools and rewards of `job`; their fields.

    Modules are looked for in the working directory, too. Raises `JobSpecError` with every one that
    cannot be imported, whatever that raises.
    """
    look_here()
    tried: list[str] = []
    problems: list[FieldProblem] = []
    for field, entrypoint in _entrypoints(job):
        tried.append(field)
        try:
            load = load_workflow if field == "workflow" else load_attribute
            if not callable(load(entrypoint, field)):
                problems.append(
                    FieldProblem(field, entrypoint, "cannot be called", "Name a function or class.")
                )
        except EntrypointError as error:
            problems.append(FieldProblem(field, entrypoint, error.message, error.remedy or ""))
    if problems:
        raise JobSpecError(problems)
    return tried


def _entrypoints(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Fields and what they name. Not names of what is built in or deployed."""
    if job.workflow is not None:
        yield "workflow", job.workflow
    if job.tasks is not None:
        yield "tasks.source", job.tasks.source
    if job.environment is not None and ":" in job.environment.source:
        yield "environment.source", job.environment.source
    for section, functions in (("tools", job.tools), ("rewards", job.rewards)):
        for name, function in functions.items():
            if function.entrypoint is not None:
                yield f"{section}.{name}.entrypoint", function.entrypoint
