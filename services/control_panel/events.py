"""Live updates: the orchestrator's streams as server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from services.control_panel import problems, views
from services.control_panel.upstream import Upstream
from troupe.rpc.errors import (
    Aborted,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    TroupeError,
    Unavailable,
)
from troupe.v1 import orchestrator_pb2 as pb

# People perceive a second as live; the picture costs the orchestrator a few milliseconds.
CLUSTER_PERIOD_SECONDS = 1.0
RECONNECT_SECONDS = 1.0
# After these the same call may succeed; after others it never will.
_PASSING = (Unavailable, DeadlineExceeded, ResourceExhausted, Aborted, Internal)
# How a route that answers with events is declared.
EVENT_STREAM: dict[str, Any] = {
    "response_class": EventSourceResponse,
    "responses": {
        200: {
            "description": "Server-sent events; the data of each is a JSON object.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
}


async def job_events(source: Upstream, job_id: str, after: str) -> AsyncIterator[ServerSentEvent]:
    """Events of a job after event `after`; reconnects while the orchestrator is away.

    Ends when the job has ended (the last event is `end`) or when it can be watched no more: the
    last event is `problem`.
    """
    while True:
        try:
            async for event in source.stub.WatchJob(
                pb.WatchJobRequest(job_id=job_id, after=after), timeout=None
            ):
                after = event.event_id or after
                yield _job_event(event)
            yield ServerSentEvent(event="end", data="{}")
            return
        except TroupeError as error:
            if not isinstance(error, _PASSING):
                problem = problems.of_error(error).model_dump(exclude_none=True)
                yield ServerSentEvent(event="problem", data=_json(problem))
                return
            yield ServerSentEvent(event="away", data=_json({"message": error.message}))
            await asyncio.sleep(RECONNECT_SECONDS)


def _job_event(event: pb.JobEvent) -> ServerSentEvent:
    kind = event.WhichOneof("event") or "unknown"
    data = views.plain(getattr(event, kind)) if kind != "unknown" else {}
    if kind == "metrics":
        data = {"step": event.metrics.step, "values": dict(event.metrics.values)}
    data["at"] = views.when(event.at)
    # Activity is not in the log: without an id a reconnect resumes after the last logged event.
    return ServerSentEvent(event=kind, data=_json(data), id=event.event_id or None)


async def cluster_events(source: Upstream) -> AsyncIterator[ServerSentEvent]:
    """A picture of the cluster and of all jobs, about every second, for as long as one looks."""
    while True:
        try:
            cluster, jobs = await asyncio.gather(
                source.stub.GetCluster(pb.GetClusterRequest()),
                source.stub.ListJobs(pb.ListJobsRequest()),
            )
            data = {
                "cluster": views.plain(cluster),
                # Newest first: the page shows the first.
                "jobs": [
                    views.job(job).model_dump(exclude={"spec"}) for job in reversed(jobs.jobs)
                ],
            }
            yield ServerSentEvent(event="cluster", data=_json(data))
        except TroupeError as error:
            yield ServerSentEvent(event="away", data=_json({"message": error.message}))
        await asyncio.sleep(CLUSTER_PERIOD_SECONDS)


def _json(data: Any) -> str:
    """`data` as JSON that browsers read: metrics may be NaN or infinite, which JSON cannot say."""
    return json.dumps(_finite(data), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
