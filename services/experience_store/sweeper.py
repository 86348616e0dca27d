"""What must happen though nobody calls: leases run out, endings half carried out are completed.

Calls do both themselves when they come across it; the sweeper only bounds how long it takes when
none comes.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from services.experience_store.background import Background
from services.experience_store.database import Call, Database
from services.experience_store.keys import JOBS, JobKeys, PolicyKeys
from services.experience_store.steps import Steps
from services.experience_store.tables import DAMAGED, Tables
from troupe.rpc import DeadlineExceeded, TroupeError, Unavailable

log = structlog.get_logger(__name__)

# A few commands per live step: cheap enough for every replica, short beside any lease.
PERIOD_SECONDS: Final = 5.0


class Sweeper:
    """Walks over the live steps of all jobs."""

    def __init__(
        self, database: Database, tables: Tables, steps: Steps, period: float = PERIOD_SECONDS
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._period = period
        self._background = Background()
        # Endings decided by the last round: what is decided since may be on its way.
        self._decided: dict[tuple[str, int], int] = {}

    async def start(self) -> None:
        """Begin to sweep."""
        self._background.start(self._sweep_forever(), "sweeper")

    async def stop(self) -> None:
        """End the sweeping."""
        await self._background.stop()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            try:
                await self.sweep()
            except TroupeError as error:
                # The next round finds the same work.
                log.warning("sweep_failed", kind=error.kind, error=str(error))

    async def sweep(self) -> None:
        """One round over all jobs: one that cannot be swept keeps no other waiting.

        Raises Unavailable and DeadlineExceeded, which are of the database.
        """
        before, self._decided = self._decided, {}
        for job in await self._jobs():
            try:
                await self._sweep_job(job, before)
            except (Unavailable, DeadlineExceeded):
                raise
            except (TroupeError, *DAMAGED) as error:
                log.warning("sweep_failed", job=job, error=repr(error))

    async def _jobs(self) -> list[str]:
        """The jobs that have live steps. Most have ended: they are asked for in one round trip."""
        jobs = [name.decode() for name in await self._database.execute("SMEMBERS", JOBS)]
        try:
            live = await self._database.execute_each([("EXISTS", JobKeys(j).live) for j in jobs])
        except (Unavailable, DeadlineExceeded):
            raise
        except TroupeError:  # a Redis that answers only for its own slots
            return jobs
        return [job for job, found in zip(jobs, live, strict=True) if found]

    async def _sweep_job(self, job: str, before: dict[tuple[str, int], int]) -> None:
        try:
            await self._sweep_rosters(job)
        except TroupeError as error:
            if error.kind != "tables_not_found":
                raise
        for step in await self._steps.live(job):
            try:
                await self._sweep_step(job, step, before.get((job, step), 0))
            except TroupeError as error:
                if error.kind not in ("tables_not_found", "step_not_open"):
                    raise

    async def _sweep_rosters(self, job: str) -> None:
        """Tell tables of amendments that a crash kept from them."""
        if steps := await self._steps.live(job):
            await self._steps.follow(job, steps[-1])

    async def _sweep_step(self, job: str, step: int, decided: int) -> None:
        table = await self._tables.get(job)
        calls = [Call("sweep", PolicyKeys(job, policy).base, (step,)) for policy in table.policies]
        replies = await self._steps.on_tables(job, step, calls)
        for policy, (_, returned, _) in zip(table.policies, replies, strict=True):
            if returned:
                log.info("leases_expired", job=job, policy=policy, step=step, samples=returned)
        if all(state == b"committed" for state, _, _ in replies):
            await self._steps.retire(job, step)
            return
        if any(there < decided for _, _, there in replies):
            lagged = await self._steps.settle(job, step)
            log.info("endings_completed", job=job, step=step, trajectories=lagged)
        ended = await self._database.execute("HGET", JobKeys(job).step(step), "ended")
        self._decided[job, step] = int(ended or 0)
