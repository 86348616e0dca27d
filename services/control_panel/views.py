"""What the REST interface answers with: typed views of the orchestrator's messages."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import BaseModel, ConfigDict

from troupe.v1 import common_pb2, orchestrator_pb2


class View(BaseModel):
    """Base of all views: field docstrings become OpenAPI descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Problem(View):
    """RFC 9457 problem details (`application/problem+json`)."""

    type: str = "about:blank"
    title: str
    """Kind of the problem, stable: `invalid_argument`, `not_found`, ..."""
    status: int
    """HTTP status."""
    detail: str
    """What went wrong."""
    field: str | None = None
    """The offending field, as the caller wrote it."""
    value: str | None = None
    """Its value."""
    remedy: str | None = None
    """What the caller can do."""


class JobView(View):
    """A training job."""

    job_id: str
    name: str
    state: str
    """`submitted`, `starting`, `running`, `pausing`, `paused`, `cancelling`, `succeeded`,
    `failed` or `cancelled`."""
    mode: str
    """Pipeline mode."""
    step: int
    """Steps done."""
    total_steps: int
    activity: str
    """What it does now, for people."""
    versions: dict[str, int]
    """Version per policy."""
    metrics: dict[str, float]
    """Newest value of every metric."""
    before: dict[str, float]
    """Held-out evaluation before the first step."""
    after: dict[str, float]
    """Held-out evaluation after the last step."""
    directory: str
    """Where metrics, TensorBoard events and checkpoints are."""
    created_at: str | None
    started_at: str | None
    ended_at: str | None
    problem: dict[str, Any] | None
    """Why it failed."""
    spec: str
    """The specification as JSON, defaults filled in."""


class MetricsRowView(View):
    """The metrics logged for one step."""

    step: int
    values: dict[str, float]


class Generated(View):
    """What a policy answered."""

    text: str
    finish_reason: str
    output_ids: list[int]
    version: int | None
    """Version of the policy that generated the last token."""


def enum_word(enum: Any, number: int, prefix: str) -> str:
    """`JOB_STATE_RUNNING` -> `running`."""
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower()


def when(stamp: Timestamp) -> str | None:
    """RFC 3339 text of a timestamp, None when unset."""
    return stamp.ToJsonString() if stamp.seconds else None


def job(message: orchestrator_pb2.Job) -> JobView:
    """View of a job."""
    return JobView(
        job_id=message.job_id,
        name=message.name,
        state=enum_word(common_pb2.JobState, message.state, "JOB_STATE_"),
        mode=enum_word(common_pb2.PipelineMode, message.mode, "PIPELINE_MODE_"),
        step=message.step,
        total_steps=message.total_steps,
        activity=message.activity,
        versions=dict(message.versions),
        metrics=dict(message.metrics),
        before=dict(message.before),
        after=dict(message.after),
        directory=message.directory,
        created_at=when(message.created_at),
        started_at=when(message.started_at),
        ended_at=when(message.ended_at),
        problem=plain(message.problem) if message.HasField("problem") else None,
        spec=message.spec_json,
    )


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON values: proto field names, zeros kept, absent optionals None.

    Enum values become words and 64-bit integers numbers, which protobuf's own JSON mapping does
    not offer.
    """
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            out[field.name] = dict(value)
        elif field.is_repeated:
            out[field.name] = [_value(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            out[field.name] = None
        else:
            out[field.name] = _value(field, value)
    return out


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        # JOB_STATE_RUNNING of enum JobState: the prefix is the enum's name in capitals.
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", field.enum_type.name).upper() + "_"
        return field.enum_type.values_by_number[value].name.removeprefix(prefix).lower()
    if isinstance(value, bytes):
        return value.hex()
    return value
