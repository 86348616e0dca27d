"""What a call answers when the workflow, tasks or environment that it names cannot be used."""

from __future__ import annotations

from troupe.rpc.errors import InvalidArgument
from troupe.workflow.errors import WorkflowError


def refusal_of(error: WorkflowError) -> InvalidArgument:
    """The same words as the error of a call."""
    return InvalidArgument(
        error.message,
        kind=error.kind,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )
