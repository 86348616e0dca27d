"""The cluster as a whole: location of states, activity of all services, and cleanup after jobs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.orchestrator.context import Shared
from services.orchestrator.placement.nodes import jobs_on
from services.orchestrator.placement.workers import AWAY, WorkerHandle
from services.orchestrator.state.records import TERMINAL
from troupe.rpc import NotFound, TroupeError, new_id
from troupe.rpc.errors import HEALTH_PROBLEM_KEY
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import trainer_pb2 as trainer_pb

# Time for which users' calls wait for other services: shorter than clients wait, so that users hear
# why.
ASKED_SECONDS: Final = 45.0
_log = structlog.get_logger(__name__)
# The transfer layer's key of a state: job, policy, the rest, and the version.
_KEY: Final = re.compile(
    r"(?P<job>[^/]+)/(?P<policy>[^/]+)/[^@]*(@(?P<version>[0-9]{1,19})(?![0-9]))?"
)


def locate(key: str, workers: Iterable[WorkerHandle]) -> orchestrator_pb.LocateStateResponse:
    """Return transfer addresses of living workers' hosts, and addresses of trainers and rollout
    workers; likely holders of the state `key` come first."""
    ranked = sorted(
        (worker for worker in workers if worker.alive),
        key=lambda worker: (-_likelihood(key, worker.beat), worker.worker_id),
    )
    owners = dict.fromkeys(w.beat.transfer_address for w in ranked if w.beat.transfer_address)
    trainers = [w.address for w in ranked if w.kind == orchestrator_pb.WORKER_KIND_TRAINER]
    rollouts = [w.address for w in ranked if w.kind == orchestrator_pb.WORKER_KIND_ROLLOUT]
    return orchestrator_pb.LocateStateResponse(owners=owners, trainers=trainers, rollouts=rollouts)


def _likelihood(key: str, beat: orchestrator_pb.HeartbeatRequest) -> int:
    """Return how much a worker holds of a key: 3 its version, 2 its policy, 1 its job, 0
    nothing."""
    match = _KEY.match(key)
    if match is None:
        return 0
    job, policy = match["job"], match["policy"]
    version = None if match["version"] is None else int(match["version"])
    best = 0
    bindings = (one for one in beat.bindings if one.state != common_pb.BINDING_STATE_RELEASED)
    known: Iterable[rollout_pb.EngineStatus | trainer_pb.BindingStatus] = (*beat.engines, *bindings)
    for one in known:
        if one.job_id != job:
            continue
        if one.policy != policy:
            best = max(best, 1)
        else:
            best = max(best, 3 if one.version == version else 2)
    return best


async def release_ended_jobs(shared: Shared, job_id: str, *, self_too: bool = False) -> None:
    """Free memory for `job_id`: have workers release the engines and bindings of ended jobs.

    With `self_too`, this includes `job_id` itself. A worker that does not answer is skipped until
    the next job starts.
    """
    calls: list[Awaitable[object]] = []
    seconds = shared.settings.cleanup_seconds
    over: dict[str, bool] = {job_id: self_too}
    for worker in shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT):
        for held in sorted({engine.job_id for engine in worker.beat.engines}):
            if await _over(shared, over, held):
                release = rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=held)
                calls.append(worker.rollout.ReleaseJob(release, timeout=seconds))
    for worker in shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER):
        for binding in worker.beat.bindings:
            if binding.state == common_pb.BINDING_STATE_RELEASED and not binding.prefetched:
                continue
            if await _over(shared, over, binding.job_id):
                calls.append(_release(worker, binding, seconds))
    await asyncio.gather(*calls, return_exceptions=True)
    for held in await shared.store.with_states():
        if held != job_id and await _over(shared, over, held):
            await delete_states(shared, held)


async def ended_holders(shared: Shared) -> frozenset[str]:
    """Return the ended jobs whose engines, by the last heartbeats, still have devices: these are
    released when another job starts."""
    over: dict[str, bool] = {}
    workers = shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
    held = set[str]().union(*(jobs_on(one) for worker in workers for one in worker.beat.devices))
    return frozenset([job_id for job_id in sorted(held) if await _over(shared, over, job_id)])


async def delete_states(shared: Shared, job_id: str) -> None:
    """Delete an ended job's data in other services: published weights, values of samples in hosts'
    memory, and functions.

    A resume recreates all of it. If a worker does not answer, `release_ended_jobs` repeats the
    deletion.
    """
    seconds = shared.settings.cleanup_seconds
    calls: list[Awaitable[object]] = []
    for worker in shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT):
        release = rollout_pb.ReleaseJobRequest(
            request_id=new_id("release"), job_id=job_id, delete_states=True
        )
        calls.append(worker.rollout.ReleaseJob(release, timeout=seconds))
    for worker in shared.workers.usable(orchestrator_pb.WORKER_KIND_TRAINER):
        # Some hosts have only trainers.
        give = trainer_pb.ReleaseRequest(
            request_id=new_id("release"), job_id=job_id, delete_states=True
        )
        calls.append(worker.trainer.Release(give, timeout=seconds))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    faults = [one for one in answers if isinstance(one, BaseException)]
    if calls and not faults:
        await shared.store.note_no_states(job_id)
    for fault in faults:
        _log.warning("weights not deleted", job_id=job_id, error=str(fault))
    try:
        await _delete_functions(shared, job_id)
    except TroupeError as error:  # a restart of the reward service also deletes them
        _log.info("functions not deleted", job_id=job_id, error=str(error))


async def _delete_functions(shared: Shared, job_id: str) -> None:
    """Delete the functions that rollout workers registered with the reward service for a job."""
    seconds = shared.settings.cleanup_seconds
    known = await shared.reward.ListFunctions(reward_pb.ListFunctionsRequest(), timeout=seconds)
    for one in known.functions:
        name, version = one.function.name, one.function.version
        if name.startswith(f"{job_id}/"):
            request = reward_pb.DeleteFunctionRequest(
                request_id=new_id("delete"), name=name, version=version
            )
            await shared.reward.DeleteFunction(request, timeout=seconds)


async def _release(worker: WorkerHandle, binding: trainer_pb.BindingStatus, seconds: float) -> None:
    request = trainer_pb.ReleaseRequest(
        request_id=new_id("release"), job_id=binding.job_id, policy=binding.policy
    )
    await worker.trainer.Release(request, timeout=seconds)
    # Until its next heartbeat the worker would count as busy.
    if binding in worker.beat.bindings:
        worker.beat.bindings.remove(binding)


async def free_tables(shared: Shared, job_id: str) -> None:
    """Free the rows of a finished job that were kept for reuse. The log stays."""
    try:
        await drop_tables(shared, job_id, timeout=shared.settings.cleanup_seconds)
    except TroupeError as error:
        _log.warning("tables not freed", job_id=job_id, error=str(error))


async def drop_tables(
    shared: Shared, job_id: str, *, timeout: float | None = None, purge_log: bool = False
) -> None:
    """Free a job's rows in the experience store, and with `purge_log` also their log.

    `timeout` is in seconds (default: the client's timeout). Raises `NotFound` if the job never had
    rows.
    """
    request = store_pb.DropTablesRequest(
        request_id=new_id("drop"), job_id=job_id, purge_log=purge_log
    )
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


class ClusterView:
    """The state of the cluster: workers as of their heartbeats, other services by health checks."""

    def __init__(
        self, shared: Shared, channels: Mapping[str, tuple[str, grpc.aio.Channel]]
    ) -> None:
        """`channels`: by service, its address and a channel to it."""
        self._shared = shared
        self._channels = channels
        self._seconds = shared.settings.probe_seconds

    async def picture(self) -> orchestrator_pb.GetClusterResponse:
        """Workers, engines, bindings, services, and the trajectories in flight per job."""
        services = await asyncio.gather(
            self._redis(), *(self.probe(name) for name in self._channels)
        )
        response = orchestrator_pb.GetClusterResponse(
            services=services,
            in_flight=self._shared.in_flight,
            wanted_trainers=self._shared.trainer_scheduler.wanted,
            nodes=self._shared.nodes.statuses(self._shared.workers.all()),
        )
        for worker in self._shared.workers.all():
            beat = worker.beat
            response.workers.add(
                worker_id=worker.worker_id,
                kind=worker.kind,
                address=worker.address,
                alive=worker.alive,
                seconds_since_heartbeat=self._shared.workers.age(worker),
                doing="draining" if worker.alive and beat.draining else beat.doing,
                rss_bytes=beat.rss_bytes,
                trainer=beat.trainer if beat.HasField("trainer") else None,
                node=beat.node,
                devices=beat.devices,
                jobs=sorted({one.job_id for one in _held(beat)} - {""}),
            )
            if worker.alive:
                response.engines.extend(beat.engines)
                response.loads.extend(beat.loads)
                response.bindings.extend(beat.bindings)
        _remove_moved(response)
        return response

    async def probe(self, name: str) -> orchestrator_pb.ServiceStatus:
        """Return the state of a service according to its health check; an unreachable service is
        not serving."""
        address, channel = self._channels[name]
        status = orchestrator_pb.ServiceStatus(name=name, address=address)
        try:
            call: Any = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=self._seconds
            )
            reply, told = await call, dict(await call.trailing_metadata() or ())
        except TroupeError as error:
            status.message = str(error)
            return status
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        problem = told.get(HEALTH_PROBLEM_KEY, b"").decode(errors="replace")
        status.serving = state == "SERVING" and not problem
        status.message = "" if status.serving else problem or state
        return status

    async def _redis(self) -> orchestrator_pb.ServiceStatus:
        status = orchestrator_pb.ServiceStatus(name="redis", address=self._shared.store.address)
        try:
            async with asyncio.timeout(self._seconds):
                status.message = "; ".join(await self._shared.store.check())
            status.serving = True
        except (TroupeError, TimeoutError) as error:
            status.message = str(error) or f"no answer within {self._seconds:g} s"
        return status


def _held(
    beat: orchestrator_pb.HeartbeatRequest,
) -> Iterable[rollout_pb.EngineStatus | rollout_pb.PolicyLoad | trainer_pb.BindingStatus]:
    """Return what a worker holds for jobs: engines, trajectories, and policies on its devices."""
    yield from beat.engines
    yield from beat.loads
    yield from (one for one in beat.bindings if one.state not in AWAY or one.prefetched)


def _remove_moved(response: orchestrator_pb.GetClusterResponse) -> None:
    """Remove suspended bindings that were resumed elsewhere, which their workers do not know."""
    held = {(b.job_id, b.policy) for b in response.bindings if b.state not in AWAY}
    kept = [b for b in response.bindings if b.state not in AWAY or (b.job_id, b.policy) not in held]
    del response.bindings[:]
    response.bindings.extend(kept)
