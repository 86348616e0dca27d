"""Attached servers of a job: one rollout worker keeps each server, and all use it.

The keeper of a server updates its weights, verifies them and monitors it. The other workers follow:
they send it turns, and serve a version as soon as its keeper has verified it. Workers are told the
present state, so repetition is harmless. A restarted orchestrator recovers by itself: assignments
are pure (`troupe.scheduling.sharing`), and heartbeats report verified versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.placement.workers import WorkerHandle
from troupe.job.engines.sharing import engine_groups
from troupe.rpc import TroupeError, new_id
from troupe.scheduling.sharing import keepers
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

_log = structlog.get_logger(__name__)
# A policy's name, and the number of one of its servers in `engine.urls`.
ServerKey = tuple[str, int]
# Interval of checks of heartbeats for servers restored by their keepers.
_LOOK_SECONDS: Final = 1.0
# Following a version takes a request to each server.
_SHARE_SECONDS: Final = 60.0


class SharedServers:
    """The keepers of a job's attached servers, and the versions that were verified in these.

    A policy that trains an adapter is not followed, since its versions are loaded under the
    keeper's names. Only the keeper uses such a server. Policies that share a server have one
    keeper.
    """

    def __init__(self, job: JobContext, prepared: Callable[[], Iterable[WorkerHandle]]) -> None:
        """`prepared`: the workers that are prepared for the job."""
        self._job = job
        self._prepared = prepared
        policies = job.spec.policies.items()
        self._servers: list[ServerKey] = [
            (name, number)
            for name, policy in policies
            if policy.simulated is None
            for number in range(len(policy.engine.urls))
        ]
        adapted = {name for name, policy in policies if policy.lora is not None}
        groups = [group.policies for group in engine_groups(job.spec)]
        self._alone = adapted.union(*(group for group in groups if not adapted.isdisjoint(group)))
        self._first = {name: group[0] for group in groups for name in group}
        # By id; also those that are being prepared.
        self._workers: dict[str, WorkerHandle] = {}
        # Of servers that policies share, under the first of these.
        self._keepers: dict[ServerKey, str] = {}
        self._verified: dict[ServerKey, tuple[int, str]] = {}
        # Latest message to each worker.
        self._told: dict[str, list[rollout_pb.SharedServer]] = {}

    def join(self, workers: Iterable[WorkerHandle]) -> None:
        """Give servers without a keeper to these workers, which are prepared or about to be.
        Idempotent."""
        self._workers |= {worker.worker_id: worker for worker in workers if worker.alive}
        self._assign()

    def leave(self, worker: WorkerHandle) -> bool:
        """Forget a worker; return whether it kept a server, which another one keeps now."""
        if self._workers.get(worker.worker_id) is not worker:
            return False
        del self._workers[worker.worker_id]
        self._told.pop(worker.worker_id, None)
        kept = [key for key in self._servers if self._keeper(key) == worker.worker_id]
        for key in kept:
            self._verified.pop(key, None)
        self._assign()
        return bool(kept)

    def serves(self, worker: WorkerHandle) -> bool:
        """Return whether the worker has a server of every policy: those that cannot be followed may
        be fewer than workers."""
        return all(
            any(self._keeper(key) == worker.worker_id for key in self._servers if key[0] == name)
            for name in self._alone
            if any(key[0] == name for key in self._servers)
        )

    def plan(self, worker: WorkerHandle) -> list[rollout_pb.SharedServer]:
        """Return the role of a joined worker at each server: keeper or follower."""
        order = sorted(self._workers)
        found = []
        for key in self._servers:
            name, replica = key
            alone = name in self._alone
            kept = self._keeper(key) == worker.worker_id
            server = rollout_pb.SharedServer(
                policy=name,
                replica=replica,
                kept=kept,
                workers=1 if alone else len(order),
                place=0 if alone else order.index(worker.worker_id),
            )
            if not (kept or alone) and (verified := self._verified.get(key)) is not None:
                server.version, server.checksum = verified
            found.append(server)
        return found

    def note(self, worker: WorkerHandle, engines: Iterable[rollout_pb.EngineStatus]) -> None:
        """Accept a worker's report of the servers that it keeps."""
        for engine in engines:
            name = engine.engine_id.removesuffix(f"@{worker.worker_id}")
            prefix = f"{self._job.job_id}.{engine.policy}."
            if engine.job_id != self._job.job_id or not name.startswith(prefix):
                continue
            key = (engine.policy, int(name.removeprefix(prefix)))
            if self._keeper(key) != worker.worker_id:
                continue
            if engine.state == common_pb.ENGINE_STATE_HEALTHY and engine.HasField("version"):
                self._verified[key] = (engine.version, engine.checksum)
            elif engine.state != common_pb.ENGINE_STATE_UPDATING:
                self._verified.pop(key, None)

    def told(self, worker: WorkerHandle, plan: Sequence[rollout_pb.SharedServer]) -> None:
        """Note the state that a worker knows since it was prepared."""
        self._told[worker.worker_id] = list(plan)

    async def tell(self) -> None:
        """Tell every prepared worker its changes. A worker that does not answer is told again at
        the next check."""
        await asyncio.gather(*(self._tell(worker) for worker in list(self._prepared())))

    async def run(self) -> None:
        """Keep the workers informed, until cancelled."""
        while self._servers:
            await asyncio.sleep(_LOOK_SECONDS)
            for worker in list(self._prepared()):
                self.note(worker, worker.beat.engines)
            await self.tell()

    def _keeper(self, key: ServerKey) -> str | None:
        name, number = key
        return self._keepers.get((self._first.get(name, name), number))

    def _assign(self) -> None:
        servers = [key for key in self._servers if self._first.get(key[0], key[0]) == key[0]]
        former, self._keepers = (
            self._keepers,
            keepers(servers, list(self._workers), self._keepers),
        )
        for key, keeper in self._keepers.items():
            if former.get(key, keeper) != keeper:
                _log.info("an attached server has another keeper", server=key, keeper=keeper)

    async def _tell(self, worker: WorkerHandle) -> None:
        if worker.worker_id not in self._workers:
            return  # it was lost
        plan = self.plan(worker)
        if not plan or plan == self._told.get(worker.worker_id):
            return
        request = rollout_pb.ShareServersRequest(
            request_id=new_id("share"), job_id=self._job.job_id, servers=plan
        )
        try:
            async with worker.while_alive():
                answer = await worker.rollout.ShareServers(request, timeout=_SHARE_SECONDS)
        except TroupeError as error:
            _log.warning("servers not shared", worker=str(worker), error=str(error))
            return
        self._told[worker.worker_id] = plan
        self.note(worker, answer.engines)
