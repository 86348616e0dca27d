"""The job's specification as a request brings it."""

from __future__ import annotations

from pydantic import ValidationError

from troupe.job import JobSpec
from troupe.rpc import InvalidArgument


def spec_with(policy: str, spec_json: str) -> JobSpec:
    """The specification, which has this policy.

    Raises InvalidArgument, of kind "invalid_spec" for what is no specification.
    """
    try:
        spec = JobSpec.model_validate_json(spec_json)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(
            first["msg"],
            kind="invalid_spec",
            field=".".join(map(str, first["loc"])) or "spec_json",
            remedy="Send the validated specification (JobSpec.model_dump_json).",
        ) from error
    if policy not in spec.policies:
        raise InvalidArgument(
            f"the job has no policy '{policy}'",
            field="policy",
            value=policy,
            remedy=f"Known: {', '.join(sorted(spec.policies))}.",
        )
    return spec
