"""Single samples: columns that come late, payloads, and pages of them to look at."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.experience_store.database import Database
from services.experience_store.keys import PolicyKeys
from services.experience_store.notices import Notices
from services.experience_store.records import STATE_OF, Record
from services.experience_store.steps import Steps
from services.experience_store.tables import Tables
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

# A page stays well under the message limit (64 MiB by default), however long its rows.
PAGE_BYTES: Final = 16 * 2**20
# Samples looked at for one page: a filter that matches little must not hold a call for long.
SCAN_LIMIT: Final = 10_000
_FREED: Final = frozenset("TD")


class PayloadGoneError(Exception):
    """A payload was freed while it was being read."""


@dataclass(frozen=True)
class _Place:
    """Where a page starts: behind this member of this step."""

    step: int
    member: str

    def format(self) -> str:
        return base64.urlsafe_b64encode(f"{self.step}\t{self.member}".encode()).decode()

    @staticmethod
    def parse(token: str) -> _Place:
        try:
            step, _, member = base64.urlsafe_b64decode(token.encode()).decode().partition("\t")
            return _Place(int(step), member)
        except (ValueError, binascii.Error) as error:
            raise InvalidArgument(
                "not a page token of ListSamples",
                field="page_token",
                value=token,
                remedy="Use next_page_token of the page before, or leave it empty.",
            ) from error


class Samples:
    """Rows after their append."""

    def __init__(self, database: Database, tables: Tables, steps: Steps, notices: Notices) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._notices = notices

    async def fill(
        self,
        job: str,
        policy: str,
        step: int,
        sample: str,
        reward: float | None,
        columns: Mapping[str, store_pb.Column],
        drop_reason: str,
    ) -> tuple[pb.SampleState.ValueType, bool]:
        """Fill columns, or drop the sample for `drop_reason`. Returns its state, and whether
        anything was written: the first value of a column stays.

        Raises `NotFound` for a sample that is not in the table (its trajectory has not ended, or
        ended without it), `FailedPrecondition` for a new column of one that is claimed already.
        """
        await self._tables.check_policy(job, policy)
        parts: list[str | bytes] = []
        for name, column in sorted(columns.items()):
            parts += (name, store_pb.Sample(columns={name: column}).SerializeToString())
        outcome, *rest = await self._steps.on_table(
            "fill_columns",
            job,
            policy,
            step,
            sample,
            "" if reward is None else repr(reward),
            drop_reason,
            *parts,
        )
        if outcome == b"unknown":
            raise NotFound(
                f"step {step} of policy {policy} has no such sample",
                kind="sample_not_found",
                field="sample_id",
                value=sample,
                remedy="Fill columns after AppendTrajectory has returned.",
            )
        state = STATE_OF[rest[0].decode()]
        if outcome == b"final":
            raise FailedPrecondition(
                f"sample {sample} is {pb.SampleState.Name(state)}: its columns are final",
                kind="sample_final",
                field="sample_id",
                value=sample,
                remedy="Name the column in required_columns, so that the sample waits for it.",
            )
        if outcome == b"filled":
            self._notices.written(job, policy, step)
        return state, bool(outcome == b"filled")

    async def rows(
        self, job: str, policy: str, step: int, records: Sequence[tuple[str, Record]]
    ) -> list[store_pb.Sample]:
        """The samples with their payloads, in the order of `records` (sample id, record).

        Raises `PayloadGoneError` when one was freed.
        """
        keys = PolicyKeys(job, policy)
        wanted: dict[str, list[str]] = {}
        for sample, record in records:
            fields = wanted.setdefault(record.trajectory, [])
            fields.append(sample)
            fields += [f"{sample}\t{name}" for name in record.late.split(",") if name]
        replies = await self._database.execute_each(
            [
                ("HMGET", keys.rows(step, trajectory), *fields)
                for trajectory, fields in wanted.items()
            ]
        )
        parts: dict[str, bytes] = {}
        for fields, values in zip(wanted.values(), replies, strict=True):
            for name, value in zip(fields, values, strict=True):
                if value is None:
                    raise PayloadGoneError(name)
                # Serialized messages behind one another merge when they are parsed.
                sample = name.partition("\t")[0]
                parts[sample] = parts.get(sample, b"") + value
        found = []
        for sample, record in records:
            row = store_pb.Sample.FromString(parts[sample])
            record.apply_to(row)
            found.append(row)
        return found

    async def page(
        self,
        job: str,
        policy: str,
        step: int | None,
        state: pb.SampleState.ValueType | None,
        size: int,
        token: str,
    ) -> tuple[list[store_pb.Sample], str]:
        """At most `size` samples in order of step, query, group and id, and where the next page
        starts ('' behind the last). Those of committed steps come without their payload.
        """
        await self._tables.check_policy(job, policy)
        place = _Place.parse(token) if token else None
        steps = [step] if step is not None else await self._steps.all(job)
        found: list[store_pb.Sample] = []
        scanned = size_in_bytes = 0
        for number in steps:
            if place is not None and number < place.step:
                continue
            after = place.member if place is not None and number == place.step else ""
            while True:
                members = await self._members(job, policy, number, after, size)
                scanned += len(members)
                kept = [m for m in members if state is None or STATE_OF[m[2].state] == state]
                for member, sample, record in kept:
                    if len(found) >= size or size_in_bytes > PAGE_BYTES:
                        return found, _Place(number, after).format()
                    found.append(await self._row(job, policy, number, sample, record))
                    size_in_bytes += int(record.size)
                    after = member
                if len(members) < size:
                    break
                after = members[-1][0]
                if scanned >= SCAN_LIMIT:
                    return found, _Place(number, after).format()
        return found, ""

    async def _members(
        self, job: str, policy: str, step: int, after: str, number: int
    ) -> list[tuple[str, str, Record]]:
        keys = PolicyKeys(job, policy)
        start = f"({after}" if after else "-"
        members = [
            member.decode()
            for member in await self._database.execute(
                "ZRANGEBYLEX", keys.step(step, "members"), start, "+", "LIMIT", 0, number
            )
        ]
        if not members:
            return []
        ids = [member.rpartition("\t")[2] for member in members]
        records = await self._database.execute("HMGET", keys.step(step, "book"), *ids)
        return [
            (member, sample, Record.parse(text.decode()))
            for member, sample, text in zip(members, ids, records, strict=True)
            if text is not None
        ]

    async def _row(
        self, job: str, policy: str, step: int, sample: str, record: Record
    ) -> store_pb.Sample:
        if record.state not in _FREED:
            try:
                return (await self.rows(job, policy, step, [(sample, record)]))[0]
            except PayloadGoneError:
                pass
        return record.outline(sample, policy)
