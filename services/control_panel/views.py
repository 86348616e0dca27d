"""Answers of the REST interface as models, for validation and OpenAPI."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from troupe.client.conversion import to_json
from troupe.job.compatibility import changeable_values
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


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
    """Message of the error."""
    field: str | None = None
    """The offending field, as the caller wrote it."""
    value: str | None = None
    """The field's value."""
    remedy: str | None = None
    """The remedy: how the caller can correct the error."""


class SettingView(View):
    """A setting that the job may leave open."""

    field: str
    value: str
    """The value that a worker resolved."""
    source: str
    """Origin of the value: `given`, `checkpoint`, or the class of the worker's device."""


class IntervalView(View):
    """A 95 % confidence interval."""

    low: float
    high: float


class OriginView(View):
    """The origin of a policy's first weights (`init_from`)."""

    job_id: str
    """Job of the policy; empty for a checkpoint of unknown origin."""
    policy: str
    version: int | None
    path: str
    """Where the checkpoint is, or was fetched from."""
    optimizer: bool
    """Whether the optimizer's state came along."""


class FieldChangeView(View):
    """The values of a field before and after a change, as JSON; empty: there is none."""

    field: str
    old: str
    new: str


class JobChangeView(View):
    """A change of a job's specification by a resume."""

    at: str
    step: int
    """Steps that were done: the first step under the change is the next one."""
    fields: list[FieldChangeView]


class JobView(View):
    """A training job."""

    job_id: str
    name: str
    state: str
    """`submitted`, `starting`, `running`, `pausing`, `paused`, `cancelling`, `succeeded`,
    `failed` or `cancelled`."""
    mode: str
    """Pipeline mode."""
    priority: int
    """Precedence over other jobs."""
    step: int
    """Number of steps done."""
    total_steps: int
    activity: str
    """Current activity of the job, for people."""
    versions: dict[str, int]
    """Version per policy."""
    metrics: dict[str, float]
    """Newest value of every metric."""
    before: dict[str, float]
    """Held-out evaluation before the first step."""
    after: dict[str, float]
    """Held-out evaluation after the last step."""
    before_intervals: dict[str, IntervalView]
    """Intervals of the scores in `before`, by score."""
    after_intervals: dict[str, IntervalView]
    """Intervals of the scores in `after`, by score."""
    directory: str
    """Directory of metrics, TensorBoard events and checkpoints."""
    created_at: str | None
    started_at: str | None
    ended_at: str | None
    problem: dict[str, Any] | None
    """The reason of its failure."""
    split_hint: str
    """The change of engines or trainers that would shorten the job's steps; empty if none would, or
    if measurements are too few."""
    early_end: dict[str, Any] | None
    """The decision to end before the last step: `field`, `step`, `text`."""
    best: dict[str, Any] | None
    """The best checkpoint: `metric`, `value`, `step`, `versions` by policy."""
    ran_seconds: float
    """Time that the job has run, as `limits.job_seconds` counts it."""
    resolved: list[SettingView]
    """Resolved values of settings that the job leaves open; a field has several values where
    workers differ."""
    tags: list[str]
    """Users' own words to find the job by, in order."""
    notes: str
    """Users' own text about the job."""
    history: list[JobChangeView]
    """Changes of its specification by resumes, oldest first."""
    origins: dict[str, OriginView]
    """Origins of its policies' first weights (`init_from`), by policy."""
    spec: str
    """The specification as JSON, defaults filled in."""


class Specification(View):
    """A job's specification in two forms, both YAML."""

    given: str
    """As its author wrote it, with comments; empty if that is not known."""
    resolved: str
    """With its defaults filled in."""
    changeable: dict[str, Any]
    """Values that a resume may change, by path."""


class HostUtilization(View):
    """A host's utilization as fractions at common times; null where there is no value."""

    host: str
    cpu: list[float | None]
    """Cores that computed, of those that the host's processes may use."""
    memory: list[float | None]
    gpu: list[float | None]
    """Mean over the host's GPUs; null without GPUs."""
    gpu_memory: list[float | None]
    """Of the memory of all of the host's GPUs."""


class Utilization(View):
    """The utilization of all hosts in a range of time."""

    times: list[float]
    """End of each part of the range, in seconds since 1970 (UTC), ascending; parts without any
    value are left out."""
    hosts: list[HostUtilization]


class MetricsRowView(View):
    """The metrics logged for one step."""

    step: int
    values: dict[str, float]


class Curves(View):
    """A page of metrics as columns."""

    steps: list[int]
    """Steps in ascending order."""
    columns: dict[str, list[float | None]]
    """Values of each metric at these steps, to six digits; null where a step has none."""
    next_page: str
    """Token of the page of older steps; empty on the last."""


class FieldFault(View):
    """A fault of a job's specification."""

    field: str
    """Path of the field, `policies.solver.lora.rank`."""
    value: str
    """Value of the field, shortened; empty where it has none."""
    message: str
    remedy: str
    """The remedy."""


class CheckedSpecification(View):
    """Result of checking a job's specification."""

    problems: list[FieldFault]
    """The first twenty faults; empty for a valid specification."""
    advice: list[str]
    """Settings of a valid specification that have no effect."""
    summary: str
    """A summary of a valid specification in one line; empty otherwise."""


class Generated(View):
    """A reply of a policy."""

    text: str
    finish_reason: str
    output_ids: list[int]
    version: int | None
    """Version of the policy that generated the last token."""


def job(message: orchestrator_pb.Job) -> JobView:
    """Return the view of a job."""
    spec = json.loads(message.spec_json or "{}")
    return JobView(
        spec=message.spec_json, priority=int(spec.get("priority", 0)), **to_json(message)
    )


def specification(reply: orchestrator_pb.GetJobResponse) -> Specification:
    """Return the view of a job's specification."""
    spec = json.loads(reply.job.spec_json or "{}")
    return Specification(
        given=reply.given_spec,
        resolved=yaml.safe_dump(spec, sort_keys=False, allow_unicode=True),
        changeable=changeable_values(spec),
    )


def utilization(reply: orchestrator_pb.ListHostUseResponse) -> Utilization:
    """Return the view of the hosts' utilization, to three digits."""

    def column(values: Iterable[float]) -> list[float | None]:
        return [None if math.isnan(value) else float(f"{value:.3g}") for value in values]

    hosts = [
        HostUtilization(
            host=one.host,
            cpu=column(one.cpu),
            memory=column(one.memory),
            gpu=column(one.gpu),
            gpu_memory=column(one.gpu_memory),
        )
        for one in reply.hosts
    ]
    return Utilization(times=list(reply.times), hosts=hosts)


def curves(reply: orchestrator_pb.ListMetricsResponse) -> Curves:
    """Return the view of a page of metrics. A step's rows of training and of evaluations share an
    index."""
    steps = sorted({row.step for row in reply.rows})
    places = {step: place for place, step in enumerate(steps)}
    columns: defaultdict[str, list[float | None]] = defaultdict(lambda: [None] * len(steps))
    for row in reply.rows:
        place = places[row.step]
        for name, value in row.values.items():
            columns[name][place] = float(f"{value:.6g}")
    return Curves(steps=steps, columns=columns, next_page=reply.next_page_token)
