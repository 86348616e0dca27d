"""Live updates: the orchestrator's streams as server-sent events."""

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
# Jobs in each picture; the page fetches older ones when somebody wants them.
NEWEST_JOBS = 50
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
                problem = calls.of_error(error).model_dump(exclude_none=True)
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


class ClusterPicture:
    """The cluster and its newest jobs, asked for once a second however many look at it."""

    def __init__(self, source: Upstream) -> None:
        self._source = source
        self._asking = asyncio.Lock()
        self._event: ServerSentEvent | None = None
        self._due = 0.0

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        """A picture about every second, for as long as one looks."""
        while True:
            yield await self._newest()
            await asyncio.sleep(CLUSTER_PERIOD_SECONDS)

    async def _newest(self) -> ServerSentEvent:
        async with self._asking:
            if self._event is None or time.monotonic() >= self._due:
                self._event = await self._ask()
                self._due = time.monotonic() + 0.9 * CLUSTER_PERIOD_SECONDS
            return self._event

    async def _ask(self) -> ServerSentEvent:
        stub = self._source.stub
        try:
            cluster, listed = await asyncio.gather(
                stub.GetCluster(pb.GetClusterRequest()),
                stub.ListJobs(pb.ListJobsRequest(page_size=NEWEST_JOBS)),
            )
        except TroupeError as error:
            return ServerSentEvent(event="away", data=_json({"message": error.message}))
        data = {
            "cluster": views.plain(cluster),
            "jobs": [views.job(job).model_dump(exclude={"spec"}) for job in listed.jobs],
            "next_page": listed.next_page_token,
        }
        return ServerSentEvent(event="cluster", data=_json(data))


def _json(data: Any) -> str:
    """`data` as JSON that browsers read: metrics may be NaN or infinite, which JSON cannot say."""
    return json.dumps(_finite(data), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
