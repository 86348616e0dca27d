"""Counts the worker processes that died at one and the same thing.

A worker that is lost costs a repetition. But what kills its worker kills the next one as well - a
workflow that ends its process, a batch larger than the memory - and would end the whole cluster,
one process after another, before the step's deadline ends the job.
"""

from __future__ import annotations

from services.orchestrator.workers import NAMES, Worker, WorkerRegistry
from troupe.rpc import FailedPrecondition


class Victims:
    """Workers that broke off while they did `doing` ("ran q0-s0-t1"); `limit` of them are too many
    (the job's `limits.worker_deaths`)."""

    def __init__(
        self, registry: WorkerRegistry, limit: int, doing: str, field: str, remedy: str
    ) -> None:
        self._registry = registry
        self._limit = limit
        self._doing = doing
        self._field = field
        self._remedy = remedy
        self._ids: set[str] = set()
        self._kind = ""

    def note(self, worker: Worker) -> None:
        """`worker` broke off; what it is, dead or out of reach, time will tell. See `check`.

        One that drains ends on purpose.
        """
        if not worker.beat.draining:
            self._ids.add(worker.worker_id)
            self._kind = NAMES[worker.kind]

    def check(self) -> None:
        """Raise `FailedPrecondition` when too many of those that broke off are dead by now.

        To be asked again when a worker was lost. One that was only out of reach is back under its
        own id.
        """
        if len(self._ids) < self._limit:
            return
        dead = self._ids - {one.worker_id for one in self._registry.all() if one.alive}
        if len(dead) >= self._limit:
            who = f"{len(dead)} {self._kind} workers died one after another while each"
            if len(dead) == 1:
                who = f"a {self._kind} worker died while it"
            raise FailedPrecondition(
                f"{who} {self._doing}: {', '.join(sorted(dead))}",
                kind="workers_keep_dying",
                field=self._field,
                remedy=self._remedy,
            )

    def clear(self) -> None:
        """It was done: the next death is another matter."""
        self._ids.clear()
