"""Tells every policy's table what the job's steps consist of.

Rosters are decided under the job's tag (amendments.py). A table is told all of them at once, with
their number: it never goes back to older ones, and a crash between two tables is completed by
whoever comes next. What is sent grows with the queries that left or moved, not with the steps.
"""

from __future__ import annotations

from services.experience_store.database import Call, Database
from services.experience_store.keys import JobKeys, PolicyKeys
from services.experience_store.notices import Notices
from services.experience_store.tables import Tables


class Rosters:
    """The rosters of all jobs."""

    def __init__(self, database: Database, tables: Tables, notices: Notices) -> None:
        self._database = database
        self._tables = tables
        self._notices = notices

    async def apply(self, job: str, step: int) -> int | None:
        """Bring the rosters of `step` and of all live steps into every table. Repeatable.

        Returns their number; None when the job has no such step.
        """
        table = await self._tables.get(job)
        number, exists, rosters = await self._database.run("rosters", JobKeys(job).base, step)
        signal = int(table.drop_without_signal)
        await self._database.run_each(
            [
                Call("admit", PolicyKeys(job, policy).base, (step, number, signal, rosters))
                for policy in table.policies
            ]
        )
        for policy in table.policies:
            self._notices.written(job, policy, step)
        return int(number) if exists else None
