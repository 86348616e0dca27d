"""What an orchestrator does when it starts: continue every job that had not ended."""

from __future__ import annotations

import structlog

from services.orchestrator.crash_loops import CrashLoopGuard, is_suspect, limit_of
from services.orchestrator.job_store import JobStore
from services.orchestrator.jobs import Jobs
from troupe.v1 import common_pb2 as pb

_log = structlog.get_logger(__name__)


async def recover(store: JobStore, jobs: Jobs, guard: CrashLoopGuard) -> list[str]:
    """Launch a runner for each unfinished job; returns their ids.

    A paused job waits for its user. One that was pausing or cancelling ends that first. One that
    ended the orchestrators before this one is set aside; those that may have are launched apart.
    """
    continued: list[str] = []
    suspects: list[str] = []
    for job_id in await store.ids():
        record = await store.get(job_id)
        if record.broken:
            assert record.problem is not None, "it says what is broken"
            _log.error("a job cannot be read", job_id=job_id, why=record.problem.message)
            continue
        if record.terminal or record.state == pb.JOB_STATE_PAUSED:
            continue
        deaths, limit = await guard.deaths(job_id), limit_of(record)
        if deaths >= limit and record.state != pb.JOB_STATE_CANCELLING:
            _log.error("a job is set aside", job_id=job_id, deaths=deaths)
            await jobs.set_aside(job_id, deaths)
            continue
        _log.info("job continues", job_id=job_id, state=record.state_name, step=record.step)
        (suspects if is_suspect(deaths, limit) else continued).append(job_id)
    for job_id in continued:
        await guard.begin(job_id)
        jobs.launch(job_id)
    jobs.launch_apart(suspects)
    return continued + suspects
