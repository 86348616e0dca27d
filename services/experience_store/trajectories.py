"""Endings of trajectories: each happens once, and puts its rows into all tables or none.

A trajectory's rows belong to several policies, whose tables may live in different slots, so no
single script can write them. The steps, in order and each repeatable:

    stage rows in every table, invisible -> decide under the job's tag which ending wins
    -> apply the winner to every table (its staged rows are renamed, not copied)

A crash before the decision leaves only staged rows, which are freed with the step. After the
decision, the first call that notices the ending applies it: a repeated append, `StepStore.status`,
or the sweeper.

If one server holds all keys (no cluster), one round trip does all of this for many endings: rows
are staged, then one script per table decides and applies (end_trajectories.lua). Endings in an
unusual state are processed one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.chassis.redis import Command
from services.experience_store.database import Database, ScriptCall
from services.experience_store.notices import Notices
from services.experience_store.records import (
    NEEDED,
    RECORDS,
    Ending,
    JobTableKeys,
    PolicyKeys,
    RawRow,
    StagedRow,
    StemTree,
)
from services.experience_store.samples import RecentRows
from services.experience_store.steps import StepStore, not_open
from services.experience_store.tables import TableRegistry, TableSchema
from troupe.contracts import kinds
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError


@dataclass(frozen=True)
class Appended:
    """The result of an append."""

    accepted: bool
    step: int
    """The step that it counts for, to which its query may have been carried."""
    drop_reason: str = ""
    """Why its trajectory was dropped before the append, if it was."""
    group_complete: bool = False
    """Whether the group is complete and its query's redundant trajectories were ended."""


@dataclass(frozen=True)
class Append:
    """The ending of a trajectory, with its rows."""

    job: str
    step: int
    trajectory: str
    ending: Ending
    """The ending; `attempt` identifies this append, `rows` are set from the rows here."""
    rows: Sequence[StagedRow] = ()
    by_policy: Mapping[str, Sequence[StagedRow]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, list[StagedRow]] = {}
        for row in self.rows:
            found.setdefault(row.policy, []).append(row)
        numbers = ",".join(f"{policy}={len(rows)}" for policy, rows in sorted(found.items()))
        object.__setattr__(self, "by_policy", found)
        object.__setattr__(self, "ending", self.ending._replace(rows=numbers))

    def check(self, table: TableSchema) -> None:
        """Raise `InvalidArgument` for a row of a policy that has no table."""
        if self.by_policy.keys() <= set(table.policies):
            return
        index, row = next(
            (index, row) for index, row in enumerate(self.rows) if row.policy not in table.policies
        )
        raise InvalidArgument(
            f"job {table.job} trains no policy of this name",
            kind=kinds.UNKNOWN_POLICY,
            field=f"samples[{index}].policy",
            value=row.policy,
            remedy=f"Send samples of {', '.join(table.policies)} only.",
        )

    @property
    def stage_name(self) -> str:
        """The name of its staged rows in the step."""
        return f"{self.trajectory}:{self.ending.attempt}"

    def stage(self, table: TableSchema, policy: str, step: int) -> Command:
        """Return the command that puts the rows of `policy` where only this append finds them, in
        `step`; `note_stages` comes first."""
        keys, query = PolicyKeys(self.job, policy), self.ending.query
        fields: list[str | RawRow | int] = []
        records = [query]
        tree = StemTree(self.by_policy[policy])
        for row in self.by_policy[policy]:
            records.append(row.record(table.required, tree.text(row.turn)))
            fields += (row.turn, row.stored)
        if tree.needed:
            fields += (NEEDED, tree.needed)
        staged = keys.staged(step, self.trajectory, self.ending.attempt)
        return ("HSET", staged, *fields, RECORDS, "\n".join(records))


def note_stages(job: str, policy: str, step: int, names: Sequence[str]) -> Command:
    """Return the command that notes staged rows (`Append.stage_name`) before they are written, so
    that they are freed with the step whatever happens to this process."""
    return ("SADD", PolicyKeys(job, policy).step(step, "stages"), *names)


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

    async def append_each(self, appends: Sequence[Append]) -> list[Appended | TroupeError]:
        """End each trajectory by itself, in any order, unless another ending won earlier, its query
        was dropped, or its group is complete without it. Returns each result, or its error.

        `ending.attempt` identifies an append: repeating it returns what the first call returned.
        Errors: `FailedPrecondition` for a step that is not open, a query that is not in it, or one
        whose trajectories have all ended; `InvalidArgument` for a policy that has no table.
        """
        found: dict[int, Appended | TroupeError] = {}
        # Endings that one script can process, by job and step.
        together: dict[tuple[str, int], dict[int, Append]] = {}
        for number, append in enumerate(appends):
            try:
                append.check(await self._tables.get(append.job))
            except TroupeError as error:
                found[number] = error
            else:
                together.setdefault((append.job, append.step), {})[number] = append

        async def end_each(group: dict[int, Append]) -> None:
            own, ended = [*group.values()], {}
            if not self._database.clustered:
                try:
                    ended = await self._end_each(own)
                except TroupeError as error:
                    found.update(dict.fromkeys(group, error))
                    return
            for place, (number, append) in enumerate(group.items()):
                try:
                    found[number] = ended.get(place) or await self._end_alone(append)
                except TroupeError as error:
                    found[number] = error

        if len(together) == 1:
            await end_each(*together.values())
        else:
            async with asyncio.TaskGroup() as tasks:
                for group in together.values():
                    tasks.create_task(end_each(group))
        return [found[number] for number in range(len(appends))]

    async def _end_each(self, appends: Sequence[Append]) -> dict[int, Appended]:
        """End trajectories of one step in one round trip. Returns the result, by index, of each
        append that won now or earlier; the others are unchanged."""
        job, step = appends[0].job, appends[0].step
        table = await self._tables.get(job)
        names: dict[str, list[str]] = {}
        rows: list[Command] = []
        args: list[str | bytes | int] = [step, JobTableKeys(job).base]
        for append in appends:
            trajectory, ending = append.trajectory, append.ending
            staged: list[str] = []
            for policy in append.by_policy:
                names.setdefault(policy, []).append(append.stage_name)
                rows.append(append.stage(table, policy, step))
                staged.append(PolicyKeys(job, policy).staged(step, trajectory, ending.attempt))
            args += (trajectory, ending.query, ending.format(), ending.attempt)
            args += (ending.state, ending.reason, "\n".join(staged))
            # A call brings hundreds of rows, so let other calls be answered in between.
            await asyncio.sleep(0)
        # One note for all of a table's: each command costs as much as a few rows.
        notes = [note_stages(job, policy, step, own) for policy, own in names.items()]
        replies = await self._database.run_all(
            [*notes, *rows],
            [
                ScriptCall("end_trajectories", PolicyKeys(job, policy).base, args)
                for policy in table.policies
            ],
        )
        for policy in table.policies:
            self._notices.written(job, policy, step)
        texts = [reply[1].decode().split("\n") for reply in replies]
        found: dict[int, Appended] = {}
        for place, (append, *outcomes) in enumerate(zip(appends, *texts, strict=True)):
            spare = ""
            for policy, text in zip(table.policies, outcomes, strict=True):
                outcome, _, rest = text.partition("\t")
                since, _, spare = rest.partition("\t")
                if outcome == "other":
                    break
                self._keep(append, policy, since)
            else:
                found[place] = Appended(True, step, group_complete=spare != "0")
        return found

    def _keep(self, append: Append, policy: str, since: str) -> None:
        """Keep its rows of this policy in memory. They entered the table at `since` ('': not at
        all)."""
        own = append.by_policy.get(policy)
        if since and own:
            rows = [(row.sample, row.raw_row) for row in own]
            self._recent.add(append.job, policy, since, rows)

    async def _end_alone(self, append: Append) -> Appended:
        """End one trajectory, one round trip per arrow."""
        table, step = await self._tables.get(append.job), append.step
        while True:
            end, to, entered = await self._end(table, step, append)
            for policy, since in entered.items():
                self._keep(append, policy, since)
            if to is None:
                return end
            # Every table first moves its staged rows: the same attempt may have won before its
            # query was carried, and then these rows count.
            await self._steps.follow(append.job, to)
            await self._unstage(append, step)
            step = to

    async def _end(
        self, table: TableSchema, step: int, append: Append
    ) -> tuple[Appended, int | None, Mapping[str, str]]:
        """Return the result of the append in `step`; the later step that its query was carried to,
        if any; and for each policy whose table its rows entered just now, when they did."""
        job, trajectory, ending = append.job, append.trajectory, append.ending
        if append.rows:
            calls = [
                ScriptCall(
                    "stage",
                    PolicyKeys(job, policy).base,
                    (step, trajectory, ending.attempt),
                    before=[
                        note_stages(job, policy, step, [append.stage_name]),
                        append.stage(table, policy, step),
                    ],
                )
                for policy in append.by_policy
            ]
            await self._steps.on_tables(job, step, calls)
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
        await self._unstage(append, step)
        if outcome == b"missing":
            raise not_open(job, step)
        if outcome == b"unknown_query":
            raise FailedPrecondition(
                f"step {step} does not have this query",
                kind="unknown_query",
                field="query_id",
                value=ending.query,
                remedy="Run only the queries of the step.",
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
        return Appended(False, step, reason, reason == kinds.REDUNDANT), None, {}

    async def _unstage(self, append: Append, step: int) -> None:
        """Free the rows that `append` staged in `step`."""
        args = (step, append.trajectory, append.ending.attempt)
        await self._database.run_each(
            [
                ScriptCall("unstage", PolicyKeys(append.job, policy).base, args)
                for policy in append.by_policy
            ]
        )
