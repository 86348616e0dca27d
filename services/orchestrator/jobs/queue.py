"""The queue of jobs that wait until fewer run (`TROUPE_MAX_RUNNING_JOBS`).

First is the job whose submission, moved back by its priority in seconds (`waiting_seconds`), is
the earliest. A job that runs keeps its place until it ends or is paused, and over a restart of the
orchestrator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from troupe.scheduling.precedence import waiting_seconds


class JobQueue:
    """The places of running jobs, and the jobs that wait for one."""

    def __init__(self, most: int) -> None:
        """`most`: jobs that run at once; 0: any number."""
        self._most = most
        self._running: set[str] = set()
        # By job id: its rank, the least first, and the event that wakes it.
        self._waiting: dict[str, tuple[float, asyncio.Event]] = {}

    @property
    def full(self) -> bool:
        """Whether another job would wait."""
        return bool(self._most) and self._free <= 0

    @property
    def one_at_a_time(self) -> bool:
        """Whether no two jobs run at the same time."""
        return self._most == 1 and len(self._running) <= 1

    def keep(self, job_id: str) -> None:
        """Give a place to a job that ran under an earlier orchestrator, whatever the limit is."""
        self._running.add(job_id)

    async def enter(
        self, job_id: str, priority: int, submitted_at: float, report: Callable[[int], None]
    ) -> None:
        """Wait for a place, unless the job has one. `report` gets the number of jobs before it
        whenever that changes."""
        if job_id in self._running:
            return
        moved = asyncio.Event()
        self._waiting[job_id] = submitted_at - waiting_seconds(priority), moved
        self._wake()  # it may stand before others
        told: int | None = None
        try:
            while self._most and (before := self._before(job_id)) >= self._free:
                if before != told:
                    told = before
                    report(before)
                await moved.wait()
                moved.clear()
            self._running.add(job_id)
        finally:
            del self._waiting[job_id]
            self._wake()

    def leave(self, job_id: str) -> None:
        """Give up the job's place. Idempotent."""
        self._running.discard(job_id)
        self._wake()

    @property
    def _free(self) -> int:
        return self._most - len(self._running)

    def _before(self, job_id: str) -> int:
        own = self._waiting[job_id][0], job_id
        return sum((rank, other) < own for other, (rank, _) in self._waiting.items())

    def _wake(self) -> None:
        for _, moved in self._waiting.values():
            moved.set()
