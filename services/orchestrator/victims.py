"""Counts the worker processes that died at one and the same thing, and finds the job to blame.

A worker that is lost costs a repetition. But what kills its worker kills the next one as well - a
workflow that ends its process, a batch larger than the memory - and would end the whole cluster,
one process after another, before the step's deadline ends the job.

A dead worker takes the work of every job on it along, so its death alone blames nobody. Jobs that
share such deaths begin work on workers in turn (`SharedDeaths.turn`): the one at fault dies alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from services.orchestrator.workers import NAMES, Worker, WorkerRegistry
from troupe.rpc import FailedPrecondition

# Longer than a worker takes to come back, so that it meets one job alone.
_TURN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5


class Victims:
    """Workers that broke off while a job did `doing` ("ran q0-s0-t1"); `limit` of them are too many
    (the job's `limits.worker_deaths`)."""

    def __init__(
        self,
        registry: WorkerRegistry,
        deaths: SharedDeaths,
        job_id: str,
        limit: int,
        doing: str,
        field: str,
        remedy: str,
    ) -> None:
        self._registry = registry
        self._deaths = deaths
        self.job_id = job_id
        self._limit = limit
        self._doing = doing
        self._field = field
        self._remedy = remedy
        self._ids: set[str] = set()
        self._kind = ""

    @property
    def suspicious(self) -> bool:
        """Whether one more death would be too many."""
        return len(self._ids) >= max(1, self._limit - 1)

    def note(self, worker: Worker) -> None:
        """`worker` broke off; what it is, dead or out of reach, time will tell. See `check`.

        One that drains ends on purpose.
        """
        if not worker.beat.draining:
            self._ids.add(worker.worker_id)
            self._kind = NAMES[worker.kind]
            self._deaths.note(self, worker.worker_id)

    def check(self) -> None:
        """Raise `FailedPrecondition` when too many of those that broke off are dead by now, and at
        least one of them took no other job's work along.

        To be asked again when a worker was lost. One that was only out of reach is back under its
        own id.
        """
        if len(self._ids) < self._limit:
            return
        dead = self._ids - {one.worker_id for one in self._registry.all() if one.alive}
        if len(dead) >= self._limit and not all(self._deaths.shared(one) for one in dead):
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
        """The work was done: the next death is another matter."""
        self._deaths.withdraw(self, self._ids)
        self._ids.clear()

    def excuse(self, worker_id: str) -> None:
        """This death was another job's fault."""
        self._ids.discard(worker_id)


class SharedDeaths:
    """Which jobs had work on the workers that died, over all jobs of an orchestrator.

    A worker's death is noted once for each thing that it took along, thousands of trajectories
    maybe: what is asked often is kept by job.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By dead worker and job.
        self._noted: dict[str, dict[str, set[Victims]]] = {}
        # By job: what one more death would be too many for.
        self._suspicious: dict[str, set[Victims]] = {}
        # When the jobs that share deaths began to take turns.
        self._began: float | None = None

    def note(self, victims: Victims, worker_id: str) -> None:
        """Note that the worker took work of this job along."""
        self._noted.setdefault(worker_id, {}).setdefault(victims.job_id, set()).add(victims)
        if victims.suspicious:
            self._suspicious.setdefault(victims.job_id, set()).add(victims)

    def withdraw(self, victims: Victims, worker_ids: set[str]) -> None:
        """Take back that these deaths took this work along: it was done since."""
        for worker_id in worker_ids:
            if (jobs := self._noted.get(worker_id)) is not None:
                _discard(jobs, victims)
                if not jobs:
                    del self._noted[worker_id]
        _discard(self._suspicious, victims)

    def shared(self, worker_id: str) -> bool:
        """Whether the death took work of several jobs along."""
        return len(self._noted.get(worker_id, ())) > 1

    def end(self, job_id: str, *, blamed: bool) -> None:
        """The job has left the workers. `blamed`: its deaths were its fault, and no other job's."""
        for worker_id, jobs in list(self._noted.items()):
            if jobs.pop(job_id, None) is not None and blamed:
                for victims in [one for others in jobs.values() for one in others]:
                    victims.excuse(worker_id)
                    if not victims.suspicious:
                        _discard(self._suspicious, victims)
                jobs.clear()
            if not jobs:
                del self._noted[worker_id]
        self._suspicious.pop(job_id, None)

    def may_begin(self, job_id: str) -> bool:
        """Whether the job may begin work on a worker now. Jobs take turns of a minute while one
        more death would be too many for several that share deaths."""
        sharing: set[str] = set()
        for jobs in self._noted.values():
            if len(jobs) > 1:
                sharing |= jobs.keys() & self._suspicious.keys()
        if len(sharing) < 2:
            self._began = None
            return True
        if self._began is None:
            self._began = self._clock()
        turn = int((self._clock() - self._began) / _TURN_SECONDS)
        suspects = sorted(sharing)
        return job_id not in sharing or suspects[turn % len(suspects)] == job_id

    async def turn(self, job_id: str) -> None:
        """Return when the job may begin work on a worker."""
        while not self.may_begin(job_id):  # noqa: ASYNC110 - turns pass with time
            await asyncio.sleep(_POLL_SECONDS)


def _discard(by_job: dict[str, set[Victims]], victims: Victims) -> None:
    if (noted := by_job.get(victims.job_id)) is not None:
        noted.discard(victims)
        if not noted:
            del by_job[victims.job_id]
