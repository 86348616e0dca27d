"""Reads what the store knows of a job, log and live steps, for the audit and for whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Final

from services.experience_store.database import Database
from services.experience_store.keys import PolicyKeys
from services.experience_store.ledger import Ledger
from services.experience_store.log import Log
from services.experience_store.steps import Steps
from services.experience_store.tables import Table, Tables
from troupe.rpc import NotFound, TroupeError
from troupe.v1 import experience_store_pb2 as store_pb

# A job that goes on moves while it is read: what looks wrong is looked at again.
_LOOKS: Final = 3
_PAUSE_SECONDS: Final = 0.5
# Samples of one message of ReadLog: well under the message limit, however long their ids.
PART: Final = 20_000


class Audit:
    """Audits and reads logs, of jobs whose tables exist or were dropped."""

    def __init__(self, database: Database, tables: Tables, steps: Steps, log: Log) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._log = log

    async def tables(self, job: str) -> Table:
        """The job's tables, also when they were dropped. Raises `NotFound` without a log."""
        try:
            return await self._tables.get(job)
        except NotFound:
            stored = await self._log.tables(job)
            if stored is None:
                raise
            return Table.parse(job, stored)

    async def check(self, job: str) -> store_pb.AuditTablesResponse:
        """Whether every sample was trained once or dropped with a reason, in figures and words.

        Raises `NotFound` for a job that has neither tables nor a log.
        """
        table = await self.tables(job)
        for look in range(_LOOKS):
            ledger = await self._add_up(table)
            report = ledger.report(await self._heads(table))
            if not report.violations or not ledger.live or look == _LOOKS - 1:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        return report

    async def read(
        self, job: str, policy: str, from_step: int
    ) -> AsyncIterator[store_pb.LoggedStep]:
        """What became of every sample of a policy, step by step, beginning with `from_step`.

        A step of many samples comes in parts, of which each says what the step says. Raises
        `NotFound` for an unknown job or policy.
        """
        table = await self.tables(job)
        table.check(policy)
        for step in await self._log.steps(job):
            if step >= from_step:
                for part in parts(await self._log.policy_step(job, policy, step)):
                    yield part

    async def _add_up(self, table: Table) -> Ledger:
        job = table.job
        ledger = Ledger(table.policies, table.max_uses)
        for step in await self._log.steps(job):
            # Endings first: whatever ended before this is in the tables after `settle`.
            roster = await self._log.roster(job, step)
            if roster is not None and not await self._log.has(job, step):
                try:
                    await self._steps.settle(job, step)
                except TroupeError as error:
                    # Forgotten in between: then it is in the log.
                    if error.kind not in ("step_not_open", "tables_not_found"):
                        raise
            logged = {
                policy: await self._log.policy_step(job, policy, step) for policy in table.policies
            }
            # Long steps take their time; others are answered meanwhile.
            await asyncio.to_thread(ledger.add, step, roster, logged)
        return ledger

    async def _heads(self, table: Table) -> dict[str, int]:
        replies = await self._database.execute_each(
            [("HGET", PolicyKeys(table.job, policy).head, "version") for policy in table.policies]
        )
        return {
            policy: int(version)
            for policy, version in zip(table.policies, replies, strict=True)
            if version is not None
        }


def parts(logged: store_pb.LoggedStep) -> Iterator[store_pb.LoggedStep]:
    """`logged`, or several steps like it with `PART` of its samples each."""
    if len(logged.samples) <= PART:
        yield logged
        return
    samples = list(logged.samples)
    del logged.samples[:]
    for start in range(0, len(samples), PART):
        part = store_pb.LoggedStep(samples=samples[start : start + PART])
        part.MergeFrom(logged)
        yield part
