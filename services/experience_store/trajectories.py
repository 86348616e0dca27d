"""Ends a trajectory once: its rows are in all tables, or in none.

A trajectory's rows belong to several policies, whose tables may live in different slots, so no
single script can write them. In order, each arrow repeatable:

    stage rows in every table, invisible -> decide under the job's tag which ending wins
    -> carry the winner out in every table (its staged rows are renamed, not copied)

A crash before the decision leaves only staged rows, freed with the step. After it, whoever notices
first carries the ending out: a repeated append, `Steps.status`, the sweeper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from services.experience_store.database import Call, Database
from services.experience_store.keys import JobKeys, PolicyKeys
from services.experience_store.recent import RecentRows
from services.experience_store.records import LETTER_OF, REDUNDANT, REWARD, Ending, Record
from services.experience_store.steps import Steps, not_open
from services.experience_store.tables import Table, Tables
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

# Policy, records (a line each), then id and payload of each row.
_StagedRows: TypeAlias = list[tuple[str, str, list[str | bytes]]]
# Samples of each policy, with their payloads.
_ByPolicy: TypeAlias = dict[str, list[tuple[store_pb.Sample, bytes]]]


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


class Trajectories:
    """Endings of trajectories."""

    def __init__(
        self, database: Database, tables: Tables, steps: Steps, recent: RecentRows
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._recent = recent

    async def append(
        self,
        job: str,
        step: int,
        trajectory: str,
        ending: Ending,
        samples: Sequence[store_pb.Sample],
        payloads: Sequence[bytes] = (),
    ) -> Appended:
        """End `trajectory` with `samples`, unless another ending had won before, its query was
        dropped, or its group is complete without it.

        `payloads` are the samples as bytes, where the caller has them already.

        `ending.attempt` identifies this append: repeating it returns what the first call returned.
        Raises `FailedPrecondition` for a step that is not open, a query that is not in it, or one
        whose trajectories have all ended; `InvalidArgument` for a policy that has no table.
        """
        table = await self._tables.get(job)
        if not payloads:
            payloads = [sample.SerializeToString() for sample in samples]
        staged = _by_policy(table, samples, payloads)
        ending = replace(ending, rows=_numbers(staged))
        rows = _staged_rows(table, staged)
        while True:
            end, to, entered = await self._end(table, step, trajectory, ending, rows)
            for policy, since in entered.items():
                own = [(sample.sample_id, row) for sample, row in staged.get(policy, ())]
                self._recent.add(job, policy, since, own)
            if to is None:
                return end
            # First every table moves what is staged there: the same attempt may have won before its
            # query was carried, and then these rows are the ones that count.
            await self._steps.follow(job, to)
            await self._unstage(job, step, trajectory, ending, list(staged))
            step = to

    async def _end(
        self, table: Table, step: int, trajectory: str, ending: Ending, rows: _StagedRows
    ) -> tuple[Appended, int | None, Mapping[str, str]]:
        """What became of the ending in `step`; the later step that its query was carried to; and
        for each policy whose table our rows entered just now, when they did."""
        job = table.job
        if rows:
            await self._steps.on_tables(
                job,
                step,
                [
                    _stage(PolicyKeys(job, policy), step, trajectory, ending, records, staged)
                    for policy, records, staged in rows
                ],
            )
        outcome, *rest = await self._database.run(
            "end_trajectory", JobKeys(job).base, step, trajectory, ending.query, ending.format()
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
                Call("unstage", PolicyKeys(job, policy).base, (step, trajectory, ending.attempt))
                for policy in policies
            ]
        )


def _by_policy(
    table: Table, samples: Sequence[store_pb.Sample], payloads: Sequence[bytes]
) -> _ByPolicy:
    found: _ByPolicy = {}
    for index, (sample, payload) in enumerate(zip(samples, payloads, strict=True)):
        if sample.policy not in table.policies:
            raise InvalidArgument(
                f"job {table.job} trains no policy of this name",
                kind="unknown_policy",
                field=f"samples[{index}].policy",
                value=sample.policy,
                remedy=f"Send samples of {', '.join(table.policies)} only.",
            )
        found.setdefault(sample.policy, []).append((sample, payload))
    return found


def _numbers(staged: _ByPolicy) -> str:
    """`Ending.rows` of these samples."""
    return ",".join(f"{policy}={len(samples)}" for policy, samples in sorted(staged.items()))


def _stage(
    keys: PolicyKeys,
    step: int,
    trajectory: str,
    ending: Ending,
    records: str,
    rows: Sequence[str | bytes],
) -> Call:
    """Puts rows where only their ending finds them. They are noted first: whatever becomes of us,
    they are freed with the step."""
    staged = keys.staged(step, trajectory, ending.attempt)
    return Call(
        "stage",
        keys.base,
        (step, trajectory, ending.attempt, records),
        before=(("SADD", keys.step(step, "stages"), staged), ("HSET", staged, *rows)),
    )


def _staged_rows(table: Table, staged: _ByPolicy) -> _StagedRows:
    found: _StagedRows = []
    for policy, samples in staged.items():
        records: list[str] = []
        rows: list[str | bytes] = []
        for sample, payload in samples:
            # What the record holds too, because it moves, is written over it when it is read.
            record = _record(table, sample, len(payload))
            records.append(f"{sample.sample_id}\t{record.format()}")
            rows += (sample.sample_id, payload)
        found.append((policy, "\n".join(records), rows))
    return found


def _record(table: Table, sample: store_pb.Sample, size: int) -> Record:
    missing = set(table.required) - set(sample.columns)
    if not sample.HasField("reward"):
        missing.add(REWARD)
    return Record(
        state=LETTER_OF[pb.SAMPLE_STATE_PENDING],
        tokens=str(sum(sample.prompt_ids.shape) + sum(sample.response_ids.shape)),
        size=str(size),
        turn=str(sample.turn),
        reward=repr(sample.reward) if sample.HasField("reward") else "",
        missing=",".join(sorted(missing)),
        early=",".join(sorted(sample.columns)),
        late="",
        query=sample.query_id,
        trajectory=sample.trajectory_id,
        agent=sample.agent,
        group=sample.group_id,
        reason="",
        version=str(min(span.version for span in sample.versions)) if sample.versions else "",
        uses="0",
        since="",
        origin="",
    )
