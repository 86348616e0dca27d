"""The job's specification as a request brings it."""

from __future__ import annotations

from pydantic import ValidationError

from troupe.job import JobSpec
from troupe.job.faults import explained
from troupe.rpc import InvalidArgument


def spec_with(policy: str, spec_json: str) -> JobSpec:
    """The specification, which has this policy.

    Raises InvalidArgument, of kind "invalid_spec" for what is no specification.
    """
    try:
        spec = JobSpec.model_validate_json(spec_json)
    except ValidationError as error:
        remedy = "Send the validated specification (JobSpec.model_dump_json)."
        first = explained(error, JobSpec, remedy)[0]
        raise InvalidArgument(
            first.message,
            kind="invalid_spec",
            field="spec_json" if first.field == "job" else first.field,
            value=first.value or None,
            remedy=first.remedy,
        ) from error
    if policy not in spec.policies:
        raise InvalidArgument(
            f"the job has no policy '{policy}'",
            field="policy",
            value=policy,
            remedy=f"Known: {', '.join(sorted(spec.policies))}.",
        )
    return spec
