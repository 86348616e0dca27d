"""From what a user hands to `submit` to the text that the orchestrator gets."""

from __future__ import annotations

from pathlib import Path

from troupe.job import JobSpec, load_job, parse_job

Spec = str | Path | JobSpec


def read_spec(spec: Spec) -> JobSpec:
    """The validated specification, so that a mistake costs no round trip.

    A string with a line break or a brace is YAML or JSON text, so is an empty one; any other
    string is a path.
    Raises `troupe.job.JobSpecError`.
    """
    if isinstance(spec, JobSpec):
        return spec
    if isinstance(spec, str) and (not spec.strip() or "\n" in spec or "{" in spec):
        return parse_job(spec)
    return load_job(spec)
