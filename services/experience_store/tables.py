"""Which policies of a job have a table, and which columns a sample needs before it is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.experience_store import notices
from services.experience_store.database import Call, Database
from services.experience_store.keys import JOBS, JobKeys, PolicyKeys
from troupe.rpc import AlreadyExists, NotFound


@dataclass(frozen=True)
class Table:
    """What a job declared once; it never changes while the tables exist."""

    job: str
    policies: tuple[str, ...]
    """Sorted."""
    required: frozenset[str]
    """Columns besides `reward` that a sample needs."""

    def format(self) -> str:
        """The JSON that Redis holds."""
        return json.dumps({"policies": self.policies, "required": sorted(self.required)})

    @staticmethod
    def parse(job: str, text: str | bytes) -> Table:
        """The table that `format` wrote."""
        stored = json.loads(text)
        return Table(job, tuple(stored["policies"]), frozenset(stored["required"]))


class Tables:
    """Declares, finds and frees the tables of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[str, Table] = {}

    async def create(self, job: str, policies: Sequence[str], required: Sequence[str]) -> None:
        """Declare the tables; raises `AlreadyExists` when they exist with other contents."""
        table = Table(job, tuple(sorted(policies)), frozenset(required))
        # First of all, so that the sweeper and `drop` find whatever comes after.
        await self._database.execute("SADD", JOBS, job)
        await self._database.execute("SETNX", JobKeys(job).tables, table.format())
        self._cache.pop(job, None)
        stored = await self.get(job)
        for field, ours, theirs in (
            ("policies", table.policies, stored.policies),
            ("required_columns", tuple(sorted(table.required)), tuple(sorted(stored.required))),
        ):
            if ours != theirs:
                raise AlreadyExists(
                    f"job {job} has tables with {field} {', '.join(theirs) or '(none)'}",
                    kind="tables_differ",
                    field=field,
                    value=", ".join(ours),
                    remedy="Submit the changed specification as a new job.",
                )

    async def get(self, job: str) -> Table:
        """The job's tables; raises `NotFound` when there are none."""
        table = self._cache.get(job)
        if table is None:
            stored = await self._database.execute("GET", JobKeys(job).tables)
            if stored is None:
                raise NotFound(
                    f"job {job} has no tables",
                    kind="tables_not_found",
                    field="job_id",
                    value=job,
                    remedy="Call CreateTables first.",
                )
            table = self._cache[job] = Table.parse(job, stored)
        return table

    async def check_policy(self, job: str, policy: str) -> None:
        """Raise `NotFound` unless `policy` has a table."""
        table = await self.get(job)
        if policy not in table.policies:
            raise NotFound(
                f"job {job} trains no policy of this name",
                kind="unknown_policy",
                field="policy",
                value=policy,
                remedy=f"Known: {', '.join(table.policies)}.",
            )

    def forget(self, job: str) -> None:
        """Read the job's declaration again when it is next needed."""
        self._cache.pop(job, None)

    async def drop(self, job: str) -> None:
        """Free everything of a job. Repeatable; nothing happens when there is nothing."""
        self.forget(job)
        keys = JobKeys(job)
        try:
            table = await self.get(job)
        except NotFound:
            await self._database.execute("SREM", JOBS, job)
            return
        policies = [PolicyKeys(job, policy) for policy in table.policies]
        steps = [int(s) for s in await self._database.execute("ZRANGE", keys.steps, 0, -1)]
        for step in steps:
            # Under the job's tag first: from here on nothing more is accepted for the step.
            for key in (keys.step(step), keys.ended(step), keys.queries(step)):
                await self._database.execute("UNLINK", key)
            await self._database.run_each(
                [Call("forget_step", policy.base, (step, "all")) for policy in policies]
            )
        for policy in policies:
            await self._database.execute("UNLINK", policy.commits)
            await self._database.execute("UNLINK", policy.head)
            await self._database.execute("PUBLISH", policy.channel, f"0 {notices.DROPPED}")
        for key in (keys.steps, keys.live, keys.tables):
            await self._database.execute("UNLINK", key)
        await self._database.execute("SREM", JOBS, job)
        self.forget(job)
