"""Admits steps, reports on them, and completes what a crash left half done.

What a step consists of is decided once under the job's tag. Each policy's table learns of it
(`admit`) and of every trajectory that ended (`append_rows`) afterwards; both can be repeated, by
whoever notices that a table lags behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.experience_store.database import Call, Database
from services.experience_store.keys import JobKeys, PolicyKeys
from services.experience_store.log import Log
from services.experience_store.notices import Notices
from services.experience_store.progress import StepStatus
from services.experience_store.records import Ending
from services.experience_store.rosters import Rosters
from services.experience_store.tables import Table, Tables
from troupe.rpc import FailedPrecondition

# Steps whose commits and bookkeeping outlive them: a resumed job and a late duplicate still find
# what became of their step. Payloads are freed with the commit.
KEEP_STEPS: Final = 16


class Steps:
    """The steps of all jobs."""

    def __init__(
        self,
        database: Database,
        tables: Tables,
        notices: Notices,
        log: Log,
        rosters: Rosters,
        keep: int = KEEP_STEPS,
    ) -> None:
        self._database = database
        self._tables = tables
        self._notices = notices
        self._log = log
        self._rosters = rosters
        self._keep = keep

    async def open(
        self,
        job: str,
        step: int,
        versions: Mapping[str, int],
        query_ids: Sequence[str],
        group_size: int,
        *,
        held_open: bool = False,
        cursor: int = 0,
        redundant: int = 0,
    ) -> tuple[bool, list[str]]:
        """Admit a step. Returns whether it was open already, and which trajectories have ended.

        A query begins with `group_size` trajectories and `redundant` more; as soon as `group_size`
        have completed, the others are ended.

        The first call decides; raises `FailedPrecondition` when another one admits other queries
        than the step was opened with, or has now. Versions may have moved since for policies that
        committed: the first ones stay.
        """
        table = await self._tables.get(job)
        outcome, stored_size, opened, stored_queries, stored_redundant = await self._database.run(
            "open_step",
            JobKeys(job).base,
            step,
            group_size,
            json.dumps(dict(versions), sort_keys=True),
            json.dumps(list(query_ids)),
            int(held_open),
            cursor,
            redundant,
            *query_ids,
        )
        existed: bool = outcome == b"existed"
        if existed:
            _check_same(step, "group_size", group_size, int(stored_size))
            _check_same(step, "redundant", redundant, int(stored_redundant))
            if list(query_ids) != json.loads(stored_queries):
                _check_same(step, "query_ids", list(query_ids), json.loads(opened))
        await self._rosters.apply(job, step)
        if not existed:
            await self._trim(table, step)
            return False, []
        # Who resumes skips what has ended: by then it must be in the tables.
        await self.settle(job, step)
        return True, (await self.status(job, step)).ended_trajectories

    async def on_table(
        self, script: str, job: str, policy: str, step: int, *args: str | bytes | int
    ) -> list[Any]:
        """Run a policy's script, admitting the step there when the job has opened it.

        Raises `FailedPrecondition` when the step is not open.
        """
        calls = [Call(script, PolicyKeys(job, policy).base, (step, *args))]
        return (await self.on_tables(job, step, calls))[0]

    async def on_tables(self, job: str, step: int, calls: Sequence[Call]) -> list[list[Any]]:
        """`on_table` for several policies at once."""
        replies = await self._database.run_each(calls)
        if any(reply[0] == b"missing" for reply in replies):
            if await self._rosters.apply(job, step) is None:
                raise not_open(job, step)
            replies = await self._database.run_each(calls)
            if any(reply[0] == b"missing" for reply in replies):
                raise not_open(job, step)
        return replies

    async def status(
        self, job: str, step: int, *, endings: bool = True, queries: bool = False
    ) -> StepStatus:
        """How far a step is. Tables may lag a moment behind the endings.

        What grows with the step is read only when asked for: its `endings`, its `queries`.
        """
        table = await self._tables.get(job)
        keys = JobKeys(job)
        commands = [("HGETALL", keys.step(step))]
        if endings:
            commands.append(("HGETALL", keys.ended(step)))
        if queries:
            commands.append(("HGETALL", keys.queries(step)))
        stored, *more = await self._database.execute_each(commands)
        status = StepStatus.parse(step, stored)
        if not status.open:
            return status
        if endings:
            status.add_endings(more[0])
        calls = [Call("count", PolicyKeys(job, p).base, (step,)) for p in table.policies]
        for policy, (_, *reply) in zip(
            table.policies, await self.on_tables(job, step, calls), strict=True
        ):
            status.add_table(policy, reply)
        if queries:
            tallies = await self._database.execute_each(
                [("HGETALL", PolicyKeys(job, p).step(step, "tallies")) for p in table.policies]
            )
            status.add_queries(more[-1], tallies)
        return status

    async def live(self, job: str) -> list[int]:
        """Steps that some policy has not committed, oldest first."""
        return [int(s) for s in await self._database.execute("ZRANGE", JobKeys(job).live, 0, -1)]

    async def all(self, job: str) -> list[int]:
        """All steps that are still known, oldest first."""
        return [int(s) for s in await self._database.execute("ZRANGE", JobKeys(job).steps, 0, -1)]

    async def retire(self, job: str, step: int) -> None:
        """Every policy has committed the step: there is nothing more to sweep."""
        await self._database.execute("ZREM", JobKeys(job).live, step)

    async def settle(self, job: str, step: int) -> int:
        """Carry out in all tables what was decided about rosters and trajectories; returns how many
        trajectories lagged.
        """
        await self._rosters.apply(job, step)
        table, keys = await self._tables.get(job), JobKeys(job)
        # In this order: what moved to the step until now, the rosters' number covers.
        endings, rosters = await self._database.execute_each(
            [("HGETALL", keys.ended(step)), ("GET", keys.rosters)]
        )
        missing: set[bytes] = set()
        for policy in table.policies:
            there = await self._database.execute(
                "HKEYS", PolicyKeys(job, policy).step(step, "ended")
            )
            # Those of dropped queries came with the roster.
            missing |= {name for name in endings if b"\t" not in name} - set(there)
        for trajectory in sorted(missing):
            ending = Ending.parse(endings[trajectory].decode())
            await self.carry_out(table, step, trajectory.decode(), ending, int(rosters or 0))
        return len(missing)

    async def carry_out(
        self, table: Table, step: int, trajectory: str, ending: Ending, rosters: int
    ) -> dict[str, str]:
        """Bring one decided ending into all tables, each of which learns of the rosters up to this
        number first. Repeatable. Returns `Record.since` of its rows, for every policy in whose
        table this call put some.
        """
        entered: dict[str, str] = {}
        while True:
            replies = await self.on_tables(
                table.job,
                step,
                [
                    Call(
                        "append_rows",
                        PolicyKeys(table.job, policy).base,
                        (
                            step,
                            trajectory,
                            ending.query,
                            ending.attempt,
                            ending.state,
                            ending.reason,
                            rosters,
                            ending.spare or 0,
                        ),
                    )
                    for policy in table.policies
                ],
            )
            for policy in table.policies:
                self._notices.written(table.job, policy, step)
            for policy, reply in zip(table.policies, replies, strict=True):
                if reply[0] == b"appended" and reply[1]:
                    entered[policy] = reply[1].decode()
            carried = [int(reply[1]) for reply in replies if reply[0] == b"carried"]
            if not carried:
                return entered
            # Its query, and so the ending, moved meanwhile: queries are carried forward only.
            rosters = await self.follow(table.job, carried[0])
            step = carried[0]

    async def follow(self, job: str, to: int) -> int:
        """Every table learns that queries were carried to step `to`; the number of the rosters."""
        rosters = await self._rosters.apply(job, to)
        if rosters is None:
            raise not_open(job, to)
        return rosters

    async def _trim(self, table: Table, newest: int) -> None:
        """Forget committed steps that are more than `keep` steps old."""
        keys = JobKeys(table.job)
        old = await self._database.execute("ZRANGEBYSCORE", keys.steps, "-inf", newest - self._keep)
        for step in (int(s) for s in old):
            if not await self._log.has(table.job, step):
                if not await self._committed(table, step):
                    continue
                await self._log.keep(table.job, table.policies, step)
            # Under the job's tag first: nobody admits it in a policy's table again.
            await self._database.execute_each([("UNLINK", key) for key in keys.all_of(step)])
            await self._database.run_each(
                [
                    Call("forget_step", PolicyKeys(table.job, p).base, (step, 1))
                    for p in table.policies
                ]
            )
            await self._database.execute_each(
                [("ZREM", key, str(step)) for key in (keys.live, keys.steps)]
            )

    async def _committed(self, table: Table, step: int) -> bool:
        """Whether every policy has committed the step."""
        return all(
            await self._database.execute_each(
                [
                    ("HEXISTS", PolicyKeys(table.job, policy).commits, step)
                    for policy in table.policies
                ]
            )
        )


def not_open(job: str, step: int) -> FailedPrecondition:
    """The error of a call on a step that was never opened, or was forgotten."""
    return FailedPrecondition(
        f"step {step} of job {job} is not open",
        kind="step_not_open",
        field="step",
        value=step,
        remedy=f"Call OpenStep first; steps are forgotten {KEEP_STEPS} steps after their commit.",
    )


def _check_same(step: int, name: str, ours: object, stored: object) -> None:
    if ours != stored:
        raise FailedPrecondition(
            f"step {step} is open with other contents ({name}: {str(stored)[:200]})",
            kind="step_differs",
            field=name,
            value=str(ours)[:200],
            remedy="Two orchestrators may be running one job; only one of them can go on.",
        )
