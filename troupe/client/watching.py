"""Follows the event log of a job through restarts of the orchestrator."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

from troupe.client.events import Event, event_of
from troupe.client.records import JobState
from troupe.rpc.errors import TroupeError
from troupe.rpc.retry import RetryPolicy
from troupe.v1 import orchestrator_pb2 as pb
from troupe.v1 import orchestrator_pb2_grpc as pb_grpc

# A restarted orchestrator is back in seconds; one that is away for so long is not coming.
AWAY_SECONDS = 120.0


async def watch(
    stub: pb_grpc.OrchestratorAsyncStub,
    job_id: str,
    *,
    after: str = "",
    retry: RetryPolicy | None = None,
    away_seconds: float = AWAY_SECONDS,
) -> AsyncIterator[Event]:
    """Events of the job from the one after id `after` until the job has ended.

    A broken stream is taken up where it broke, so nothing is told twice or left out (but
    `Activity`, which nobody keeps). Raises what the server says, and `Unavailable` when it is
    away for more than `away_seconds`.
    """
    policy = retry or RetryPolicy()
    rng = random.Random(policy.seed)
    failures, last_seen = 0, time.monotonic()
    while True:
        broken: TroupeError | None = None
        try:
            async for message in stub.WatchJob(pb.WatchJobRequest(job_id=job_id, after=after)):
                after = message.event_id or after
                failures, last_seen = 0, time.monotonic()
                if (event := event_of(message)) is not None:
                    yield event
            # A server that shuts down may end the stream before the job ends.
            reply = await stub.GetJob(pb.GetJobRequest(job_id=job_id))
            if JobState.of(reply.job.state).ended:
                return
        except TroupeError as error:
            if not policy.retryable(error) or time.monotonic() - last_seen > away_seconds:
                raise
            broken = error
        failures += 1
        pause = policy.backoff(failures, broken or TroupeError("the stream ended"), rng)
        await asyncio.sleep(pause)
