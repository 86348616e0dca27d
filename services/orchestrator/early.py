"""Begins the trajectories of the next step while the last one is still trained."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import structlog

from services.orchestrator.context import JobContext
from services.orchestrator.engines import Engines
from services.orchestrator.workers import Worker
from troupe.rpc import TroupeError, new_id
from troupe.scheduling import placement
from troupe.v1 import rollout_pb2 as ro

_log = structlog.get_logger(__name__)


class EarlyStart:
    """Has rollout workers begin trajectories whose step is not open (`pipeline.early_start`).

    They wait there, without a turn and without an end, until the dispatch asks for the same ones
    as its step's. Nothing relies on it: what was not begun, or is lost, begins with its step, and
    what nobody comes to ask for ends without a trace when `close` gives it up.
    """

    def __init__(self, job: JobContext, engines: Engines) -> None:
        self._job = job
        self._engines = engines
        # By query: who has begun it.
        self._begun: dict[str, Worker] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, step: int, groups: Sequence[list[ro.Ticket]]) -> None:
        """Begin these, each group on one worker; what was begun before is given up."""
        self.close()
        workers = {worker.worker_id: worker for worker in self._engines.ready()}
        if not workers:
            return
        loads = [placement.RolloutWorker(worker_id) for worker_id in workers]
        chosen = placement.spread_queries([len(group) for group in groups], loads, turn=step)
        together: dict[str, list[ro.Ticket]] = {}
        for worker_id, group in zip(chosen, groups, strict=True):
            together.setdefault(worker_id, []).extend(group)
        for worker_id, tickets in together.items():
            worker = workers[worker_id]
            self._begun.update((ticket.query_id, worker) for ticket in tickets)
            call = asyncio.create_task(self._hold(worker, step, tickets))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def worker_of(self, query_id: str, among: Collection[Worker]) -> Worker | None:
        """Who has begun a query, if that is one of `among`."""
        worker = self._begun.get(query_id)
        return worker if worker in among else None

    def close(self) -> None:
        """Give up what nobody has asked for. Repeatable."""
        self._begun.clear()
        for call in self._calls:
            call.cancel()

    async def closed(self) -> None:
        """Close, and wait for it."""
        self.close()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _hold(self, worker: Worker, step: int, tickets: list[ro.Ticket]) -> None:
        """Whoever began them keeps them for as long as this call lasts: to their end, if they are
        asked for; to the end of both steps at the latest."""
        request = ro.RunQueriesRequest(
            request_id=new_id("ahead"),
            job_id=self._job.job_id,
            step=step,
            tickets=tickets,
            endings_only=True,
            together=True,
            ahead=True,
        )
        try:
            async with worker.while_alive():
                limit = 2 * self._job.spec.limits.step_seconds
                async for _ in worker.rollout.RunQueries(request, timeout=limit):
                    pass
        except TroupeError as error:
            _log.info("not begun ahead", worker=str(worker), step=step, error=str(error))
        finally:
            for ticket in tickets:
                if self._begun.get(ticket.query_id) is worker:
                    del self._begun[ticket.query_id]
