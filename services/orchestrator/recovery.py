"""What an orchestrator does when it starts: continue every job that had not ended."""

from __future__ import annotations

import structlog

from services.orchestrator.job_store import JobStore
from services.orchestrator.jobs import Jobs
from troupe.v1 import common_pb2 as pb

_log = structlog.get_logger(__name__)


async def recover(store: JobStore, jobs: Jobs) -> list[str]:
    """Launch a runner for each unfinished job; returns their ids.

    A paused job waits for its user. One that was pausing or cancelling ends that first.
    """
    continued = []
    for job_id in await store.ids():
        record = await store.get(job_id)
        if record.broken:
            assert record.problem is not None, "it says what is broken"
            _log.error("a job cannot be read", job_id=job_id, why=record.problem.message)
            continue
        if record.terminal or record.state == pb.JOB_STATE_PAUSED:
            continue
        _log.info("job continues", job_id=job_id, state=record.state_name, step=record.step)
        jobs.launch(job_id)
        continued.append(job_id)
    return continued
