"""Takes back what ended jobs still hold on workers, so that the next job has room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from services.orchestrator.context import Shared
from services.orchestrator.records import TERMINAL
from troupe.rpc import NotFound, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import rollout_pb2 as ro
from troupe.v1 import trainer_pb2 as tr


async def make_room(shared: Shared, job_id: str, *, self_too: bool = False) -> None:
    """Release the engines and bindings of jobs that have ended, as workers report them.

    With `self_too` those of `job_id` itself as well. A worker that does not answer is left: it
    is asked again before the next job.
    """
    calls: list[Awaitable[object]] = []
    seconds = shared.settings.cleanup_seconds
    over: dict[str, bool] = {job_id: self_too}
    for worker in shared.workers.usable(orch.WORKER_KIND_ROLLOUT):
        for held in sorted({engine.job_id for engine in worker.beat.engines}):
            if await _over(shared, over, held):
                release = ro.ReleaseJobRequest(request_id=new_id("release"), job_id=held)
                calls.append(worker.rollout.ReleaseJob(release, timeout=seconds))
    for worker in shared.workers.usable(orch.WORKER_KIND_TRAINER):
        for binding in worker.beat.bindings:
            if binding.state == pb.BINDING_STATE_RELEASED:
                continue
            if await _over(shared, over, binding.job_id):
                give_back = tr.ReleaseRequest(
                    request_id=new_id("release"), job_id=binding.job_id, policy=binding.policy
                )
                calls.append(worker.trainer.Release(give_back, timeout=seconds))
    await asyncio.gather(*calls, return_exceptions=True)


async def _over(shared: Shared, known: dict[str, bool], job_id: str) -> bool:
    if not job_id:
        return False
    if job_id not in known:
        try:
            known[job_id] = (await shared.store.get(job_id)).state in TERMINAL
        except NotFound:
            known[job_id] = True
    return known[job_id]
