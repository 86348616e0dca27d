"""Ends a trajectory once: its rows are in all tables, or in none.

A trajectory's rows belong to several policies, whose tables may live in different slots, so no
single script can write them. In order, each arrow repeatable:

    stage rows in every table, invisible -> decide under the job's tag which ending wins
    -> carry the winner out in every table (its staged rows are renamed, not copied)

A crash before the decision leaves only staged rows, freed with the step. After it, whoever notices
first carries the ending out: a repeated append, `StepStore.status`, the sweeper.

Where one server holds all keys (no cluster) the arrows travel together, and those of many endings
at once: rows are staged, then one script per table decides and carries out (end_trajectories.lua).
What it does not find as it mostly is takes the long way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from services.experience_store.database import Database, ScriptCall
from services.experience_store.notices import Notices
from services.experience_store.records import (
    RECORDS,
    REDUNDANT,
    Ending,
    JobTableKeys,
    Payload,
    PolicyKeys,
    StagedRow,
)
from services.experience_store.samples import RecentRows
from services.experience_store.steps import StepStore, not_open
from services.experience_store.tables import TableRegistry, TableSchema
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError
from troupe.v1 import experience_store_pb2 as store_pb

# Policy, then what is staged in its table: id and payload of each row, and their records.
_StagedRows: TypeAlias = list[tuple[str, list[str | Payload]]]
_ByPolicy: TypeAlias = dict[str, list[StagedRow]]


@dataclass(frozen=True)
class Appended:
    """What became of an ending."""

    accepted: bool
    step: int
    """That it counts for: its query may have been carried there."""
    drop_reason: str = ""
    """Why its trajectory was dropped before it came."""
    group_complete: bool = False
    """Its group has all its members, and the redundant trajectories of its query were ended."""


@dataclass(frozen=True)
class Append:
    """One ending, with its rows."""

    job: str
    step: int
    trajectory: str
    ending: Ending
    """Its `attempt` identifies this append."""
    rows: Sequence[StagedRow] = ()


@dataclass(frozen=True)
class _Staging:
    """An ending whose rows are ready to be staged."""

    append: Append
    table: TableSchema
    ending: Ending
    by_policy: _ByPolicy
    rows: _StagedRows


class Trajectories:
    """Endings of trajectories."""

    def __init__(
        self,
        database: Database,
        tables: TableRegistry,
        steps: StepStore,
        notices: Notices,
        recent: RecentRows,
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._notices = notices
        self._recent = recent

    async def append(
        self,
        job: str,
        step: int,
        trajectory: str,
        ending: Ending,
        samples: Sequence[store_pb.Sample],
    ) -> Appended:
        """End `trajectory` with `samples`, unless another ending had won before, its query was
        dropped, or its group is complete without it.

        `ending.attempt` identifies this append: repeating it returns what the first call returned.
        Raises `FailedPrecondition` for a step that is not open, a query that is not in it, or one
        whose trajectories have all ended; `InvalidArgument` for a policy that has no table.
        """
        rows = [StagedRow.of(sample) for sample in samples]
        (result,) = await self.append_each([Append(job, step, trajectory, ending, rows)])
        if isinstance(result, TroupeError):
            raise result
        return result

    async def append_each(self, appends: Sequence[Append]) -> list[Appended | TroupeError]:
        """`append` of each by itself, in any order: what became of it, or the error."""
        found: dict[int, Appended | TroupeError] = {}
        # By job and step: what one script can end.
        together: dict[tuple[str, int], dict[int, _Staging]] = {}
        for number, append in enumerate(appends):
            try:
                staging = _staging(await self._tables.get(append.job), append)
            except TroupeError as error:
                found[number] = error
            else:
                together.setdefault((append.job, append.step), {})[number] = staging
            # As in Writes.end_each: others are answered in between.
            await asyncio.sleep(0)

        async def end_each(group: dict[int, _Staging]) -> None:
            stagings, ended = [*group.values()], {}
            if not self._database.clustered:
                try:
                    ended = await self._end_each(stagings)
                except TroupeError as error:
                    found.update(dict.fromkeys(group, error))
                    return
            for place, (number, staging) in enumerate(group.items()):
                try:
                    found[number] = ended.get(place) or await self._end_alone(staging)
                except TroupeError as error:
                    found[number] = error

        if len(together) == 1:
            await end_each(*together.values())
        else:
            async with asyncio.TaskGroup() as tasks:
                for group in together.values():
                    tasks.create_task(end_each(group))
        return [found[number] for number in range(len(appends))]

    async def _end_each(self, stagings: Sequence[_Staging]) -> dict[int, Appended]:
        """End trajectories of one step in one round trip; what became of each of those that won,
        or had won before, by its place. The others are as they were."""
        table, (job, step) = stagings[0].table, (stagings[0].append.job, stagings[0].append.step)
        before: dict[str, list[Sequence[str | Payload]]] = {policy: [] for policy in table.policies}
        args: list[str | bytes | int] = [step, JobTableKeys(job).base]
        for one in stagings:
            trajectory, ending = one.append.trajectory, one.ending
            staged: list[str] = []
            for policy, rows in one.rows:
                keys = PolicyKeys(job, policy)
                before[policy] += _stage(keys, step, trajectory, ending, rows)
                staged.append(keys.staged(step, trajectory, ending.attempt))
            args += (trajectory, ending.query, ending.format(), ending.attempt)
            args += (ending.state, ending.reason, "\n".join(staged))
        replies = await self._database.run_all(
            [command for commands in before.values() for command in commands],
            [
                ScriptCall("end_trajectories", PolicyKeys(job, policy).base, args)
                for policy in table.policies
            ],
        )
        for policy in table.policies:
            self._notices.written(job, policy, step)
        texts = [reply[1].decode().split("\n") for reply in replies]
        found: dict[int, Appended] = {}
        for place, (one, *outcomes) in enumerate(zip(stagings, *texts, strict=True)):
            spare = ""
            for policy, text in zip(table.policies, outcomes, strict=True):
                outcome, _, rest = text.partition("\t")
                since, _, spare = rest.partition("\t")
                if outcome == "other":
                    break
                self._keep(one, policy, since)
            else:
                found[place] = Appended(True, step, group_complete=spare != "0")
        return found

    def _keep(self, one: _Staging, policy: str, since: str) -> None:
        """Its rows of this policy entered the table just now, at `since` ('': they did not)."""
        own = one.by_policy.get(policy)
        if since and own:
            rows = [(row.sample, row.payload) for row in own]
            self._recent.add(one.append.job, policy, since, rows)

    async def _end_alone(self, staging: _Staging) -> Appended:
        """End one trajectory, arrow by arrow."""
        append, table, ending = staging.append, staging.table, staging.ending
        job, step, trajectory = append.job, append.step, append.trajectory
        while True:
            end, to, entered = await self._end(table, step, trajectory, ending, staging.rows)
            for policy, since in entered.items():
                self._keep(staging, policy, since)
            if to is None:
                return end
            # First every table moves what is staged there: the same attempt may have won before its
            # query was carried, and then these rows are the ones that count.
            await self._steps.follow(job, to)
            await self._unstage(job, step, trajectory, ending, list(staging.by_policy))
            step = to

    async def _end(
        self, table: TableSchema, step: int, trajectory: str, ending: Ending, rows: _StagedRows
    ) -> tuple[Appended, int | None, Mapping[str, str]]:
        """What became of the ending in `step`; the later step that its query was carried to; and
        for each policy whose table our rows entered just now, when they did."""
        job = table.job
        if rows:
            await self._steps.on_tables(
                job,
                step,
                [
                    ScriptCall(
                        "stage",
                        keys.base,
                        (step, trajectory, ending.attempt),
                        before=_stage(keys, step, trajectory, ending, staged),
                    )
                    for keys, staged in (
                        (PolicyKeys(job, policy), staged) for policy, staged in rows
                    )
                ],
            )
        outcome, *rest = await self._database.run(
            "end_trajectory",
            JobTableKeys(job).base,
            step,
            trajectory,
            ending.query,
            ending.format(),
        )
        if outcome == b"carried":
            return Appended(False, step), int(rest[0]), {}
        if outcome == b"decided":
            winner = Ending.parse(rest[0].decode())
            entered = await self._steps.carry_out(table, step, trajectory, winner, int(rest[1]))
            if winner.attempt == ending.attempt:
                return Appended(True, step, group_complete=bool(winner.spare)), None, entered
        await self._unstage(job, step, trajectory, ending, [policy for policy, *_ in rows])
        if outcome == b"missing":
            raise not_open(job, step)
        if outcome == b"unknown_query":
            raise FailedPrecondition(
                f"step {step} does not consist of this query",
                kind="unknown_query",
                field="query_id",
                value=ending.query,
                remedy="Run the queries that the step was opened with.",
            )
        if outcome == b"full":
            raise FailedPrecondition(
                f"all {int(rest[0])} trajectories of query {ending.query} have ended",
                kind="group_closed",
                field="trajectory_id",
                value=trajectory,
                remedy="Run as many trajectories per query as the step was opened with.",
            )
        reason = rest[0].decode() if outcome == b"dropped" and rest else ""
        return Appended(False, step, reason, reason == REDUNDANT), None, {}

    async def _unstage(
        self, job: str, step: int, trajectory: str, ending: Ending, policies: Sequence[str]
    ) -> None:
        await self._database.run_each(
            [
                ScriptCall(
                    "unstage", PolicyKeys(job, policy).base, (step, trajectory, ending.attempt)
                )
                for policy in policies
            ]
        )


def _by_policy(table: TableSchema, rows: Sequence[StagedRow]) -> _ByPolicy:
    found: _ByPolicy = {}
    for index, row in enumerate(rows):
        if row.policy not in table.policies:
            raise InvalidArgument(
                f"job {table.job} trains no policy of this name",
                kind="unknown_policy",
                field=f"samples[{index}].policy",
                value=row.policy,
                remedy=f"Send samples of {', '.join(table.policies)} only.",
            )
        found.setdefault(row.policy, []).append(row)
    return found


def _numbers(staged: _ByPolicy) -> str:
    """`Ending.rows` of these rows."""
    return ",".join(f"{policy}={len(rows)}" for policy, rows in sorted(staged.items()))


def _staging(table: TableSchema, append: Append) -> _Staging:
    by_policy = _by_policy(table, append.rows)
    ending = replace(append.ending, rows=_numbers(by_policy))
    rows = [(policy, _staged(table, append, own)) for policy, own in by_policy.items()]
    return _Staging(append, table, ending, by_policy, rows)


def _staged(table: TableSchema, append: Append, rows: Sequence[StagedRow]) -> list[str | Payload]:
    query, trajectory = append.ending.query, append.trajectory
    records: list[str] = []
    found: list[str | Payload] = []
    for row in rows:
        # What the record holds too, because it moves, is written over it when it is read.
        record = row.record(query, trajectory, table.required)
        records.append(f"{row.sample}\t{record}")
        found += (row.sample, row.payload)
    return [*found, RECORDS, "\n".join(records)]


def _stage(
    keys: PolicyKeys, step: int, trajectory: str, ending: Ending, rows: Sequence[str | Payload]
) -> Sequence[Sequence[str | Payload]]:
    """Commands that put rows where only their ending finds them. They are noted first: whatever
    becomes of us, they are freed with the step."""
    staged = keys.staged(step, trajectory, ending.attempt)
    return ("SADD", keys.step(step, "stages"), staged), ("HSET", staged, *rows)
