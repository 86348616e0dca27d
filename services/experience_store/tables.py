"""Which policies of a job have a table, and which columns a sample needs before it is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.experience_store import notices
from services.experience_store.database import Database
from services.experience_store.log import Log
from services.experience_store.records import JOBS, Ending, JobTableKeys, PolicyKeys
from troupe.contracts import kinds
from troupe.rpc import AlreadyExists, NotFound

# Errors caused by damaged rows or tables of a job: loops over all jobs continue with the others.
DAMAGED: Final = (ValueError, LookupError, TypeError)
# Above every version, and exact in Lua.
_EVERY_VERSION: Final = 2**53 - 1


@dataclass(frozen=True)
class TableSchema:
    """The tables of a job as declared; they never change while they exist."""

    job: str
    policies: tuple[str, ...]
    """Sorted."""
    required: frozenset[str]
    """Columns that a sample needs in addition to `reward`."""
    max_uses: int = 1
    """Maximum optimizer steps that one sample may contribute to."""
    drop_without_signal: bool = False
    """Whether groups whose rewards are all equal are dropped."""

    def format(self) -> str:
        """Return the JSON in Redis."""
        return json.dumps(
            {
                "policies": self.policies,
                "required": sorted(self.required),
                "max_uses": self.max_uses,
                "drop_without_signal": self.drop_without_signal,
            }
        )

    def check(self, policy: str) -> None:
        """Raise `NotFound` unless `policy` has a table."""
        if policy not in self.policies:
            raise NotFound(
                f"job {self.job} trains no policy of this name",
                kind=kinds.UNKNOWN_POLICY,
                field="policy",
                value=policy,
                remedy=f"Known: {', '.join(self.policies)}.",
            )

    @staticmethod
    def parse(job: str, text: str | bytes) -> TableSchema:
        """Return the table that `format` wrote."""
        stored = json.loads(text)
        return TableSchema(
            job,
            tuple(stored["policies"]),
            frozenset(stored["required"]),
            stored["max_uses"],
            stored["drop_without_signal"],
        )


class TableRegistry:
    """The tables of all jobs: declaring, finding and freeing them."""

    def __init__(self, database: Database, log: Log) -> None:
        self._database = database
        self._log = log
        self._cache: dict[str, TableSchema] = {}

    async def create(
        self,
        job: str,
        policies: Sequence[str],
        required: Sequence[str],
        *,
        max_uses: int = 1,
        drop_without_signal: bool = False,
    ) -> None:
        """Declare the tables. Raises `AlreadyExists` when they exist with different contents."""
        table = TableSchema(
            job, tuple(sorted(policies)), frozenset(required), max_uses, drop_without_signal
        )
        if await self._log.tables(job) is not None:
            raise AlreadyExists(
                f"job {job} is over: its tables were dropped, its log is kept",
                kind="job_over",
                field="job_id",
                value=job,
                remedy="Take another job id, or drop the tables with purge_log.",
            )
        # First of all, so that the sweeper and `drop` find everything written after it.
        await self._database.call("SADD", JOBS, job)
        await self._database.call("SETNX", JobTableKeys(job).tables, table.format())
        self._cache.pop(job, None)
        stored = await self.get(job)
        for field, ours, theirs in (
            ("policies", table.policies, stored.policies),
            ("required_columns", tuple(sorted(table.required)), tuple(sorted(stored.required))),
            ("max_uses", (str(max_uses),), (str(stored.max_uses),)),
            (
                "drop_without_signal",
                (str(drop_without_signal).lower(),),
                (str(stored.drop_without_signal).lower(),),
            ),
        ):
            if ours != theirs:
                raise AlreadyExists(
                    f"job {job} has tables with {field} {', '.join(theirs) or '(none)'}",
                    kind="tables_differ",
                    field=field,
                    value=", ".join(ours),
                    remedy="Submit the changed specification as a new job.",
                )

    async def get(self, job: str) -> TableSchema:
        """Return the job's tables. Raises `NotFound` if there are none."""
        table = self._cache.get(job)
        if table is None:
            stored = await self._database.call("GET", JobTableKeys(job).tables)
            if stored is None:
                raise NotFound(
                    f"job {job} has no tables",
                    kind=kinds.TABLES_NOT_FOUND,
                    field="job_id",
                    value=job,
                    remedy="Call CreateTables first.",
                )
            table = self._cache[job] = TableSchema.parse(job, stored)
        return table

    async def check_policy(self, job: str, policy: str) -> None:
        """Raise `NotFound` unless `policy` has a table."""
        (await self.get(job)).check(policy)

    def forget(self, job: str) -> None:
        """Drop the job's cached declaration."""
        self._cache.pop(job, None)

    async def drop(self, job: str, *, purge_log: bool = False) -> None:
        """Delete the tables of a job, and its log with `purge_log`. Repeatable."""
        self.forget(job)
        keys = JobTableKeys(job)
        try:
            table = await self.get(job)
        except NotFound:
            await self._database.call("SREM", JOBS, job)
            if purge_log and (stored := await self._log.tables(job)) is not None:
                await self._log.purge(job, TableSchema.parse(job, stored).policies)
            return
        if not purge_log:
            await self._log.keep_tables(job, table.format())
        for step in [int(s) for s in await self._database.call("ZRANGE", keys.steps, 0, -1)]:
            await self._drop_step(table, step, log=not purge_log)
        for policy in [PolicyKeys(job, policy) for policy in table.policies]:
            await self._database.run("free_rows", policy.base, 0, _EVERY_VERSION, "")
            await self._database.call("UNLINK", policy.commits)
            await self._database.call("UNLINK", policy.head)
            await self._database.call("PUBLISH", policy.channel, f"0 {notices.DROPPED}")
        for key in (keys.steps, keys.live, keys.rosters):
            await self._database.call("UNLINK", key)
        if purge_log:
            await self._log.purge(job, table.policies)
        await self._database.call("UNLINK", keys.tables)
        await self._database.call("SREM", JOBS, job)
        self.forget(job)

    async def _drop_step(self, table: TableSchema, step: int, *, log: bool) -> None:
        """Delete a step; with `log`, log it first. Without `log` this writes nothing, since a full
        Redis would refuse writes."""
        job, keys = table.job, JobTableKeys(table.job)
        roster = await self._log.roster(job, step) if log else None
        if roster is not None and not await self._log.has(job, step):
            await self._log.keep_roster(job, roster)
        # From here on no trajectory can end in the step; earlier endings are in the roster.
        for key in set(keys.all_of(step)) - {keys.ended(step)}:
            await self._database.call("UNLINK", key)
        ended = await self._database.call("HGETALL", keys.ended(step))
        if roster is not None and ended:
            endings = {name.decode(): Ending.parse(text.decode()) for name, text in ended.items()}
            await self._log.keep_roster(job, replace(roster, endings=endings))
        for policy in table.policies:
            base = PolicyKeys(job, policy).base
            while True:
                committed = await self._log.keep_unfinished(job, policy, step, keep=log)
                outcome, *_ = await self._database.run("forget_step", base, step, int(committed))
                if outcome == b"forgotten":
                    break
        await self._database.call("UNLINK", keys.ended(step))
