"""Live updates: the orchestrator's streams as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from sse_starlette import ServerSentEvent

from services.control_panel import views
from services.control_panel.upstream import Upstream
from troupe.rpc.errors import NotFound, TroupeError
from troupe.v1 import orchestrator_pb2 as pb

# People perceive a second as live; the picture costs the orchestrator a few milliseconds.
CLUSTER_PERIOD_SECONDS = 1.0
RECONNECT_SECONDS = 1.0


async def job_events(source: Upstream, job_id: str, after: str) -> AsyncIterator[ServerSentEvent]:
    """Events of a job after event `after`; reconnects while the orchestrator is away.

    Ends when the job has ended: the last event is `end`.
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
        except NotFound:
            raise
        except TroupeError as error:
            yield ServerSentEvent(event="away", data=json.dumps({"message": error.message}))
            await asyncio.sleep(RECONNECT_SECONDS)


def _job_event(event: pb.JobEvent) -> ServerSentEvent:
    kind = event.WhichOneof("event") or "unknown"
    data = views.plain(getattr(event, kind)) if kind != "unknown" else {}
    if kind == "metrics":
        data = {"step": event.metrics.step, "values": dict(event.metrics.values)}
    data["at"] = views.when(event.at)
    # Activity is not in the log: without an id a reconnect resumes after the last logged event.
    return ServerSentEvent(event=kind, data=json.dumps(data), id=event.event_id or None)


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
            yield ServerSentEvent(event="cluster", data=json.dumps(data))
        except TroupeError as error:
            yield ServerSentEvent(event="away", data=json.dumps({"message": error.message}))
        await asyncio.sleep(CLUSTER_PERIOD_SECONDS)
