"""Moves of a job's engines from idle policies to busy ones, as `troupe.scheduling.balancing`
decides.

A trajectory stays on its worker, so each worker's engines are balanced separately. No state is
durable: after a restart, heartbeats show where engines are, and a move in progress ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.errors import cancel_all
from services.orchestrator.placement.workers import WorkerHandle
from troupe.contracts import kinds
from troupe.job.engines.sharing import shared_policies
from troupe.rpc import TroupeError, new_id
from troupe.scheduling import balancing
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

_log = structlog.get_logger(__name__)


@dataclass
class _Pool:
    """The engines of one worker."""

    memory: balancing.Memory = field(default_factory=balancing.Memory)
    # Target policy of each moving engine.
    moving: dict[str, str] = field(default_factory=dict)
    # Target policy and time of each finished move, which older heartbeats do not show.
    moved: dict[str, tuple[str, float]] = field(default_factory=dict)
    seen: float = 0.0


class Balancer:
    """The balancer of the engines of one running job."""

    def __init__(
        self,
        job: JobContext,
        workers: Callable[[], Iterable[WorkerHandle]],
        republish: Callable[[str], Awaitable[None]],
        *,
        start_seconds: float,
    ) -> None:
        """`workers`: those that are prepared for the job. `start_seconds`: how long an engine may
        take to come up with other weights."""
        self._job = job
        self._workers = workers
        self._republish = republish
        section = job.spec.balancing
        self._section, self._rules = section, section.rules
        self._shared = shared_policies(job.spec)
        self._barred = section.barred(job.spec.policies, self._shared)
        # A worker answers when the engine serves its new policy, or its old one after a failure.
        self._seconds = section.drain_seconds + 2 * start_seconds
        self._pools: dict[WorkerHandle, _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Counts since the last call of `values`.
        self._moves = self._failures = self._looks = 0
        self._disparity = self._seconds_moving = 0.0

    async def run(self) -> None:
        """Decide on every heartbeat once, until cancelled. Returns at once if nothing may move.

        Raises errors of recording events and of publishing weights again.
        """
        if not self._job.spec.balances:
            return
        pause = self._job.shared.settings.heartbeat_seconds / 2
        try:
            while True:
                await asyncio.sleep(pause)
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(task)
                    task.result()
                self.look()
        finally:
            await cancel_all(self._tasks)

    def look(self) -> None:
        """Decide for each worker that has sent a heartbeat since the last call."""
        workers = [worker for worker in self._workers() if worker.usable]
        self._pools = {worker: self._pools.get(worker) or _Pool() for worker in workers}
        for worker, pool in self._pools.items():
            if worker.seen > pool.seen:
                pool.seen = worker.seen
                self._decide(worker, pool)

    def values(self) -> dict[str, float]:
        """Return the metrics since the last call; none where nothing may move."""
        if not self._looks:
            return {}
        found = {
            "balancing/moves": float(self._moves),
            "balancing/disparity": self._disparity / self._looks,
        }
        if self._moves:
            found["balancing/move_seconds"] = self._seconds_moving / self._moves
        if self._failures:
            found["balancing/moves_failed"] = float(self._failures)
        self._moves = self._failures = self._looks = 0
        self._disparity = self._seconds_moving = 0.0
        return found

    def _decide(self, worker: WorkerHandle, pool: _Pool) -> None:
        pool.moved = {one: at for one, at in pool.moved.items() if at[1] >= worker.seen}
        demands, engines = self._demands_and_engines(worker, pool)
        if len(demands) < 2:
            return
        self._looks += 1
        disparity = balancing.disparity(demands, engines)
        self._disparity += disparity if disparity < float("inf") else 0.0
        moves, pool.memory = balancing.decide(
            self._rules, pool.memory, demands, engines, time.monotonic(), barred=self._barred
        )
        for move in moves:
            pool.moving[move.engine_id] = move.target
            self._tasks.add(asyncio.create_task(self._move(worker, pool, move)))

    def _demands_and_engines(
        self, worker: WorkerHandle, pool: _Pool
    ) -> tuple[list[balancing.Demand], list[balancing.EngineAssignment]]:
        """Return the worker's policies and engines, as of its newest heartbeat and of newer
        moves; without policies that share engines, among which these have no need to move."""
        tokens = self._section.measure == "tokens"
        demands = [
            balancing.Demand(
                load.policy,
                float(load.outstanding_tokens if tokens else load.waiting + load.in_flight),
                self._section.minimum_of(load.policy),
            )
            for load in worker.beat.loads
            if load.job_id == self._job.job_id and load.policy not in self._shared
        ]
        assignments = []
        for engine in worker.beat.engines:
            if engine.job_id != self._job.job_id:
                continue
            healthy = engine.state == common_pb.ENGINE_STATE_HEALTHY
            target = pool.moving.get(engine.engine_id)
            arrived = pool.moved.get(engine.engine_id)
            assignments.append(
                balancing.EngineAssignment(
                    engine.engine_id,
                    target or (arrived[0] if arrived else engine.policy),
                    serving=arrived is not None or (healthy and target is None),
                    moving=target is not None,
                    work=float(engine.running + engine.waiting),
                )
            )
        return demands, assignments

    async def _move(self, worker: WorkerHandle, pool: _Pool, move: balancing.Move) -> None:
        what = f"engine {move.engine_id}"
        request = rollout_pb.MoveEngineRequest(
            request_id=new_id("move"),
            job_id=self._job.job_id,
            engine_id=move.engine_id,
            policy=move.target,
        )
        try:
            async with worker.while_alive():
                reply = await worker.rollout.MoveEngine(request, timeout=self._seconds)
        except TroupeError as error:
            self._failures += 1
            pool.memory = balancing.failed(pool.memory, move.source, move.target, time.monotonic())
            if not worker.alive:
                return  # the loss of the worker is logged elsewhere
            count, _ = pool.memory.failures[move.source, move.target]
            text = f"{what} did not move from {move.source} to {move.target}: {error}"
            _log.warning("an engine did not move", engine=move.engine_id, error=str(error))
            if count & (count - 1) == 0:  # a lasting problem must not flood the log
                await self._job.warn(text)
            if error.kind == kinds.WEIGHTS_NOT_FOUND and error.field:
                await self._republish(error.field)
        else:
            self._moves += 1
            self._seconds_moving += reply.seconds
            pool.moved[move.engine_id] = (move.target, time.monotonic())
            pool.memory = balancing.succeeded(pool.memory, move.source, move.target)
            await self._job.info(_moved_text(what, move, reply))
        finally:
            pool.moving.pop(move.engine_id, None)


def _moved_text(what: str, move: balancing.Move, reply: rollout_pb.MoveEngineResponse) -> str:
    text = f"{what} moved from {move.source} to {move.target} in {reply.seconds:.1f} s"
    if reply.rebuilt:
        text += ", rebuilt"
    if reply.handed_back:
        text += f"; {reply.handed_back} turns continued elsewhere"
    return f"{text} (backlogs per engine differed by {_number(move.before)})"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < float("inf") else "infinitely much: it had no engine"
