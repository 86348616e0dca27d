"""`troupe job ...`: the job specification itself, without any cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from troupe.client.cli import options
from troupe.client.cli.imports import try_imports
from troupe.client.cli.reference import reference
from troupe.client.overrides import apply
from troupe.job import JobSpec, load_job
from troupe.job.advice import advice
from troupe.job.loading import job_of, load_text

app = typer.Typer(
    help="The job specification: schema, validation, reference.", no_args_is_help=True
)


def load_with(path: Path, assignments: list[str]) -> JobSpec:
    """The job of a file with `--set` assignments applied. Raises `JobSpecError`."""
    if not assignments:
        return load_job(path)
    return job_of(apply(load_text(path), assignments, str(path)))


@app.command()
def schema() -> None:
    """Print the JSON schema of a job, for editors."""
    print(json.dumps(JobSpec.model_json_schema(), indent=2))


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(metavar="JOB.yaml", show_default=False)],
    assignments: options.Assignments = None,
    imports: Annotated[
        bool,
        typer.Option(
            "--imports",
            help="Import its workflow, tasks, environment, tools and rewards, too. Services import "
            "them where they run.",
        ),
    ] = False,
) -> None:
    """Check a job file; every fault is one line, and the exit status is 2. What is without effect
    is noted, and is no fault."""
    spec = load_with(path, assignments or [])
    code = "whether its code can be imported: --imports"
    if imports:
        tried = ", ".join(try_imports(spec))
        code = f"{tried} can be imported" if tried else "names no code to import"
    trained = ", ".join(spec.trained_policies)
    Console().print(
        f"{path} is a valid job: {len(spec.agents)} agents, trains {trained}, "
        f"{spec.pipeline.steps} steps; {code}",
        highlight=False,
        soft_wrap=True,
    )
    for line in advice(spec):
        Console().print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)


@app.command(name="reference")
def write_reference(
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Print the job reference in Markdown, made from the fields' docstrings."""
    text = reference()
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
