"""Admits steps, reports on them, and completes what a crash left half done.

What a step consists of is decided once under the job's tag. Each policy's table learns of it
(`admit`) and of every trajectory that ended (`append_rows`) afterwards; both can be repeated, by
whoever notices that a table lags behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.experience_store.database import Call, Database
from services.experience_store.keys import JobKeys, PolicyKeys
from services.experience_store.notices import Notices
from services.experience_store.records import Ending, parse_commit
from services.experience_store.tables import Table, Tables
from troupe.rpc import FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb

# Steps whose commits and bookkeeping outlive them: a resumed job and a late duplicate still find
# what became of their step. Payloads are freed with the commit.
KEEP_STEPS: Final = 16


@dataclass
class StepStatus:
    """What is known of one step of a job."""

    step: int
    open: bool
    query_ids: list[str] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    expected: int = 0
    endings: dict[str, Ending] = field(default_factory=dict)
    counts: list[store_pb.PolicyCounts] = field(default_factory=list)
    commits: list[store_pb.StepCommit] = field(default_factory=list)

    @property
    def sealed(self) -> bool:
        """Whether all trajectories of the step have ended."""
        return self.open and len(self.endings) >= self.expected


class Steps:
    """The steps of all jobs."""

    def __init__(
        self, database: Database, tables: Tables, notices: Notices, keep: int = KEEP_STEPS
    ) -> None:
        self._database = database
        self._tables = tables
        self._notices = notices
        self._keep = keep

    async def open(
        self,
        job: str,
        step: int,
        versions: Mapping[str, int],
        query_ids: Sequence[str],
        group_size: int,
    ) -> tuple[bool, list[str]]:
        """Admit a step. Returns whether it was open already, and which trajectories have ended.

        The first call decides; raises `FailedPrecondition` when another one admits other queries.
        Versions may have moved since for policies that committed: the first ones stay.
        """
        table = await self._tables.get(job)
        outcome, stored_size, stored_queries = await self._database.run(
            "open_step",
            JobKeys(job).base,
            step,
            group_size,
            json.dumps(dict(versions), sort_keys=True),
            json.dumps(list(query_ids)),
            *query_ids,
        )
        existed: bool = outcome == b"existed"
        if existed:
            _check_same(step, "group_size", group_size, int(stored_size))
            _check_same(step, "query_ids", list(query_ids), json.loads(stored_queries))
        await self._admit(table, step, group_size, len(query_ids) * group_size)
        if not existed:
            await self._trim(table, step)
            return False, []
        # Who resumes skips what has ended: by then it must be in the tables.
        await self.settle(job, step)
        status = await self.status(job, step)
        return True, sorted(status.endings)

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
            await self._readmit(job, step)
            replies = await self._database.run_each(calls)
            if any(reply[0] == b"missing" for reply in replies):
                raise not_open(job, step)
        return replies

    async def status(self, job: str, step: int) -> StepStatus:
        """Everything about one step. Tables may lag a moment behind the endings."""
        table = await self._tables.get(job)
        keys = JobKeys(job)
        stored, endings = await self._database.execute_each(
            [("HGETALL", keys.step(step)), ("HGETALL", keys.ended(step))]
        )
        if not stored:
            return StepStatus(step, open=False)
        status = StepStatus(
            step,
            open=True,
            query_ids=json.loads(stored[b"queries"]),
            versions=json.loads(stored[b"versions"]),
            expected=int(stored[b"expected"]),
            endings={name.decode(): Ending.parse(e.decode()) for name, e in endings.items()},
        )
        replies = await self._count(table, step)
        for policy, (counts, dropped, commit) in zip(table.policies, replies, strict=True):
            status.counts.append(_policy_counts(policy, step, counts, dropped))
            if commit:
                status.commits.append(parse_commit(commit))
        return status

    async def live(self, job: str) -> list[int]:
        """Steps that some policy has not committed, oldest first."""
        return [int(s) for s in await self._database.execute("ZRANGE", JobKeys(job).live, 0, -1)]

    async def all(self, job: str) -> list[int]:
        """All steps that are still known, oldest first."""
        return [int(s) for s in await self._database.execute("ZRANGE", JobKeys(job).steps, 0, -1)]

    async def closed(self, job: str, step: int) -> None:
        """Every policy has committed the step: there is nothing more to sweep."""
        await self._database.execute("ZREM", JobKeys(job).live, step)

    async def settle(self, job: str, step: int) -> int:
        """Carry out in all tables what was decided about trajectories; returns how many lagged."""
        table = await self._tables.get(job)
        endings = await self._database.execute("HGETALL", JobKeys(job).ended(step))
        missing: set[bytes] = set()
        for policy in table.policies:
            there = await self._database.execute(
                "HKEYS", PolicyKeys(job, policy).step(step, "ended")
            )
            missing |= set(endings) - set(there)
        for trajectory in sorted(missing):
            ending = Ending.parse(endings[trajectory].decode())
            await self.carry_out(table, step, trajectory.decode(), ending)
        return len(missing)

    async def carry_out(self, table: Table, step: int, trajectory: str, ending: Ending) -> None:
        """Bring one decided ending into all tables. Repeatable."""
        await self.on_tables(
            table.job,
            step,
            [
                Call(
                    "append_rows",
                    PolicyKeys(table.job, policy).base,
                    (step, trajectory, ending.query, ending.attempt, ending.state, ending.reason),
                )
                for policy in table.policies
            ],
        )
        for policy in table.policies:
            self._notices.written(table.job, policy, step)

    async def _count(self, table: Table, step: int) -> list[tuple[Any, Any, bytes]]:
        calls = [Call("count", PolicyKeys(table.job, p).base, (step,)) for p in table.policies]
        replies = await self.on_tables(table.job, step, calls)
        return [(_pairs(counts), _pairs(dropped), c) for _, counts, dropped, c in replies]

    async def _admit(self, table: Table, step: int, group_size: int, expected: int) -> None:
        await self._database.run_each(
            [
                Call("admit", PolicyKeys(table.job, policy).base, (step, group_size, expected))
                for policy in table.policies
            ]
        )

    async def _readmit(self, job: str, step: int) -> None:
        table = await self._tables.get(job)
        group_size, expected = await self._database.execute(
            "HMGET", JobKeys(job).step(step), "group_size", "expected"
        )
        if group_size is None:
            raise not_open(job, step)
        await self._admit(table, step, int(group_size), int(expected))

    async def _trim(self, table: Table, newest: int) -> None:
        """Forget committed steps that are more than `keep` steps old."""
        keys = JobKeys(table.job)
        old = await self._database.execute("ZRANGEBYSCORE", keys.steps, "-inf", newest - self._keep)
        for step in (int(s) for s in old):
            replies = await self._database.run_each(
                [
                    Call("forget_step", PolicyKeys(table.job, policy).base, (step, "committed"))
                    for policy in table.policies
                ]
            )
            if any(reply[0] == b"live" for reply in replies):
                continue
            await self._database.execute_each(
                [("UNLINK", key) for key in (keys.step(step), keys.ended(step), keys.queries(step))]
                + [("ZREM", key, str(step)) for key in (keys.live, keys.steps)]
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


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _policy_counts(
    policy: str, step: int, counts: Mapping[bytes, bytes], dropped: Mapping[bytes, bytes]
) -> store_pb.PolicyCounts:
    def of(letter: bytes) -> int:
        return int(counts.get(letter, 0))

    return store_pb.PolicyCounts(
        policy=policy,
        step=step,
        pending=of(b"P"),
        ready=of(b"R"),
        claimed=of(b"C"),
        trained=of(b"T"),
        dropped=of(b"D"),
        drop_reasons={reason.decode(): int(number) for reason, number in dropped.items()},
    )
