"""Takes back what ended jobs still hold on workers, so that the next job has room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import structlog

from services.orchestrator.context import Shared
from services.orchestrator.records import TERMINAL
from services.orchestrator.workers import Worker
from troupe.rpc import NotFound, TroupeError, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as orch
from troupe.v1 import reward_pb2 as rw
from troupe.v1 import rollout_pb2 as ro
from troupe.v1 import trainer_pb2 as tr

_log = structlog.get_logger(__name__)


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
            if binding.state == pb.BINDING_STATE_RELEASED and not binding.prefetched:
                continue
            if await _over(shared, over, binding.job_id):
                calls.append(_release(worker, binding, seconds))
    await asyncio.gather(*calls, return_exceptions=True)
    for held in await shared.store.with_states():
        if held != job_id and await _over(shared, over, held):
            await delete_states(shared, held)


async def delete_states(shared: Shared, job_id: str) -> None:
    """Delete what processes hold of a job that nobody trains or serves any more: published weights
    and values of samples in hosts' memory, its functions. A resume brings all of it back. Where a
    worker does not answer, `make_room` tries again."""
    seconds = shared.settings.cleanup_seconds
    calls: list[Awaitable[object]] = []
    for worker in shared.workers.usable(orch.WORKER_KIND_ROLLOUT):
        release = ro.ReleaseJobRequest(
            request_id=new_id("release"), job_id=job_id, delete_states=True
        )
        calls.append(worker.rollout.ReleaseJob(release, timeout=seconds))
    for worker in shared.workers.usable(orch.WORKER_KIND_TRAINER):
        # Hosts may have trainers only.
        give = tr.ReleaseRequest(request_id=new_id("release"), job_id=job_id, delete_states=True)
        calls.append(worker.trainer.Release(give, timeout=seconds))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    faults = [one for one in answers if isinstance(one, BaseException)]
    if calls and not faults:
        await shared.store.note_no_states(job_id)
    for fault in faults:
        _log.warning("weights not deleted", job_id=job_id, error=str(fault))
    try:
        await _delete_functions(shared, job_id)
    except TroupeError as error:  # in a restart it forgets them by itself
        _log.info("functions not deleted", job_id=job_id, error=str(error))


async def _delete_functions(shared: Shared, job_id: str) -> None:
    """Have the reward service forget what rollout workers registered for the job."""
    seconds = shared.settings.cleanup_seconds
    known = await shared.reward.ListFunctions(rw.ListFunctionsRequest(), timeout=seconds)
    for one in known.functions:
        name, version = one.function.name, one.function.version
        if name.startswith(f"{job_id}/"):
            request = rw.DeleteFunctionRequest(
                request_id=new_id("delete"), name=name, version=version
            )
            await shared.reward.DeleteFunction(request, timeout=seconds)


async def _release(worker: Worker, binding: tr.BindingStatus, seconds: float) -> None:
    request = tr.ReleaseRequest(
        request_id=new_id("release"), job_id=binding.job_id, policy=binding.policy
    )
    await worker.trainer.Release(request, timeout=seconds)
    # Until its next beat the worker would count as busy, and be passed over.
    if binding in worker.beat.bindings:
        worker.beat.bindings.remove(binding)


async def free_tables(shared: Shared, job_id: str) -> None:
    """Free what the last commits of a job left to be used again; nobody will. The log stays."""
    try:
        await drop_tables(shared, job_id, timeout=shared.settings.cleanup_seconds)
    except TroupeError as error:
        _log.warning("tables not freed", job_id=job_id, error=str(error))


async def drop_tables(
    shared: Shared, job_id: str, *, timeout: float | None = None, purge_log: bool = False
) -> None:
    """Free the rows of a job within `timeout` seconds (default: the client's), and with `purge_log`
    its log of what became of them. Raises `NotFound` when it never had any.
    """
    request = es.DropTablesRequest(request_id=new_id("drop"), job_id=job_id, purge_log=purge_log)
    await shared.experience.DropTables(request, timeout=timeout)


async def _over(shared: Shared, known: dict[str, bool], job_id: str) -> bool:
    if not job_id:
        return False
    if job_id not in known:
        try:
            known[job_id] = (await shared.store.get(job_id)).state in TERMINAL
        except NotFound:
            known[job_id] = True
    return known[job_id]
