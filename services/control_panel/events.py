"""Server-sent events: the events of a job, and the state of the cluster once a second."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from services.control_panel import calls, views
from services.control_panel.calls import Upstream
from troupe.client.conversion import to_json
from troupe.rpc.errors import (
    Aborted,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    TroupeError,
    Unavailable,
)
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# Each poll of the cluster costs the orchestrator a few milliseconds.
CLUSTER_PERIOD_SECONDS = 1.0
RECONNECT_SECONDS = 1.0
# Jobs in each cluster event; the page fetches older ones on demand.
NEWEST_JOBS = 50
# Errors after which the same call may succeed.
_PASSING = (Unavailable, DeadlineExceeded, ResourceExhausted, Aborted, Internal)
# FastAPI options of a route that answers with events.
EVENT_STREAM: dict[str, Any] = {
    "response_class": EventSourceResponse,
    "responses": {
        200: {
            "description": "Server-sent events; the data of each is a JSON object.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
}


async def job_events(
    source: Upstream, job_id: str, after: str, recent_metrics: int | None = None
) -> AsyncIterator[ServerSentEvent]:
    """Yield events of a job after event `after`; reconnect while the orchestrator is unreachable.
    Without `after`, yield metrics only of the newest `recent_metrics` events.

    The last event is `end` when the job has ended, or `problem` when it cannot be watched.
    """
    while True:
        try:
            wanted = orchestrator_pb.WatchJobRequest(
                job_id=job_id, after=after, recent_metrics=recent_metrics
            )
            async for event in source.stub.WatchJob(wanted, timeout=None):
                after = event.event_id or after
                yield _job_event(event)
            yield ServerSentEvent(event="end", data="{}")
            return
        except TroupeError as error:
            if not isinstance(error, _PASSING):
                problem = calls.of_error(error).model_dump(exclude_none=True)
                yield ServerSentEvent(event="problem", data=_json(problem))
                return
            yield ServerSentEvent(event="away", data=_json({"message": error.message}))
            await asyncio.sleep(RECONNECT_SECONDS)


def _job_event(event: orchestrator_pb.JobEvent) -> ServerSentEvent:
    fields = to_json(event)
    kind = event.WhichOneof("event") or "unknown"
    data = {**fields.get(kind, {}), "at": fields["at"]}
    # Activities are not logged and have no id: a reconnect resumes after the last logged event.
    return ServerSentEvent(event=kind, data=_json(data), id=event.event_id or None)


class ClusterFeed:
    """The cluster's state and newest jobs, polled once a second for all connected browsers."""

    def __init__(self, source: Upstream) -> None:
        self._source = source
        self._polling = asyncio.Lock()
        self._event: ServerSentEvent | None = None
        self._due = 0.0

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        """Yield a `cluster` event about every second, until the caller stops."""
        while True:
            yield await self._newest()
            await asyncio.sleep(CLUSTER_PERIOD_SECONDS)

    async def _newest(self) -> ServerSentEvent:
        async with self._polling:
            if self._event is None or time.monotonic() >= self._due:
                self._event = await self._poll()
                self._due = time.monotonic() + 0.9 * CLUSTER_PERIOD_SECONDS
            return self._event

    async def _poll(self) -> ServerSentEvent:
        stub = self._source.stub
        try:
            cluster, listed = await asyncio.gather(
                stub.GetCluster(orchestrator_pb.GetClusterRequest()),
                stub.ListJobs(orchestrator_pb.ListJobsRequest(page_size=NEWEST_JOBS)),
            )
        except TroupeError as error:
            return ServerSentEvent(event="away", data=_json({"message": error.message}))
        data = {
            "cluster": to_json(cluster),
            "jobs": [views.job(job).model_dump(exclude={"spec"}) for job in listed.jobs],
            "next_page": listed.next_page_token,
        }
        return ServerSentEvent(event="cluster", data=_json(data))


def _json(data: Any) -> str:
    """Return `data` as JSON; NaN and infinite metrics, which JSON does not have, become null."""
    return json.dumps(_finite(data), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
