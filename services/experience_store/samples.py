"""Single samples: columns that come late, payloads, and pages of them to look at."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.experience_store.database import Call, Database
from services.experience_store.keys import PolicyKeys
from services.experience_store.notices import Notices
from services.experience_store.recent import RecentRows
from services.experience_store.records import STATE_OF, Payload, Record
from services.experience_store.requests import Fill
from services.experience_store.steps import Steps
from services.experience_store.tables import Tables
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

# A page stays well under the message limit (64 MiB by default), however long its rows.
PAGE_BYTES: Final = 16 * 2**20
# Samples looked at for one page: a filter that matches little must not hold a call for long.
SCAN_LIMIT: Final = 10_000
# Samples that one script fills: it is done before Redis does anything else.
FILL_BATCH: Final = 256
_FREED: Final = frozenset("TD")
# An outcome, and what belongs to it.
_Reply: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class SampleFills:
    """Columns of some samples of one table and step."""

    job: str
    policy: str
    step: int
    fills: Sequence[Fill]


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

    def __init__(
        self,
        database: Database,
        tables: Tables,
        steps: Steps,
        notices: Notices,
        recent: RecentRows,
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._notices = notices
        self._recent = recent

    async def fill(
        self, job: str, policy: str, step: int, fills: Sequence[Fill]
    ) -> list[tuple[pb.SampleState.ValueType, bool]]:
        """Fill columns of samples, or drop them. Returns for each its state, and whether anything
        was written: the first value of a column stays.

        Raises `NotFound` for a sample that is not in the table (its trajectory has not ended, or
        ended without it), `FailedPrecondition` for a new column of one that is claimed already.
        The other samples are filled nevertheless.
        """
        (result,) = await self.fill_each([SampleFills(job, policy, step, fills)])
        if isinstance(result, TroupeError):
            raise result
        return result

    async def fill_each(
        self, calls: Sequence[SampleFills]
    ) -> list[list[tuple[pb.SampleState.ValueType, bool]] | TroupeError]:
        """`fill` of each by itself: what it returns, or its error."""
        together: dict[tuple[str, str, int], list[SampleFills]] = {}
        for call in calls:
            together.setdefault((call.job, call.policy, call.step), []).append(call)
        found: dict[int, list[tuple[pb.SampleState.ValueType, bool]] | TroupeError] = {}

        async def fill_all(job: str, policy: str, step: int, group: Sequence[SampleFills]) -> None:
            try:
                fills = [fill for call in group for fill in call.fills]
                replies = iter(await self._fill(job, policy, step, fills))
            except TroupeError as error:
                found.update((id(call), error) for call in group)
                return
            for call in group:
                own = [(fill.sample, next(replies)) for fill in call.fills]
                try:
                    found[id(call)] = [_filled(policy, step, *one) for one in own]
                except TroupeError as error:
                    found[id(call)] = error

        if len(together) == 1:
            ((table, group),) = together.items()
            await fill_all(*table, group)
        else:
            async with asyncio.TaskGroup() as tasks:
                for table, group in together.items():
                    tasks.create_task(fill_all(*table, group))
        return [found[id(call)] for call in calls]

    async def _fill(self, job: str, policy: str, step: int, fills: Sequence[Fill]) -> list[_Reply]:
        """A reply of fill_columns.lua for each."""
        await self._tables.check_policy(job, policy)
        base = PolicyKeys(job, policy).base
        # One script for many: what calls cost is each script, each reply and each notice.
        calls = [
            Call("fill_columns", base, (step, *_values(fills[start : start + FILL_BATCH])))
            for start in range(0, len(fills), FILL_BATCH)
        ]
        done = await self._steps.on_tables(job, step, calls)
        replies = [reply for _, batch in done for reply in _lines(batch)]
        for index, reply in enumerate(replies):
            if reply[0] == "unknown":
                replies[index] = await self._fill_carried(job, policy, step, fills[index])
        if any(reply[0] == "filled" for reply in replies):
            self._notices.written(job, policy, step)
        return replies

    async def _fill_carried(self, job: str, policy: str, step: int, fill: Fill) -> _Reply:
        """The reply of fill_columns.lua where the sample's query was carried to, if it was."""
        # The table may not know yet that queries were carried.
        await self._steps.follow(job, step)
        places = [step]
        while True:
            _, text = await self._steps.on_table(
                "fill_columns", job, policy, places.pop(), *_values([fill])
            )
            (reply,) = _lines(text)
            if reply[0] != "unknown":
                return reply
            # Queries are carried forward only: this ends.
            places += [int(to) for to in reply[1].split(",") if to]
            if not places:
                return reply

    async def rows(
        self, job: str, policy: str, step: int, records: Sequence[tuple[str, Record]]
    ) -> list[store_pb.Sample]:
        """The samples with their payloads, in the order of `records` (sample id, record).

        Raises `PayloadGoneError` when one was freed.
        """
        payloads = await self.payloads(job, policy, step, records)
        return [
            record.read(payload) for payload, (_, record) in zip(payloads, records, strict=True)
        ]

    async def take(
        self, job: str, policy: str, step: int, records: Sequence[tuple[str, Record]]
    ) -> list[Payload]:
        """`payloads` of samples that are claimed, without Redis where they were appended here."""
        recent = self._recent.take(job, policy, records)
        rest = [one for one in records if one[0] not in recent]
        read = await self.payloads(job, policy, step, rest)
        recent.update(zip((sample for sample, _ in rest), read, strict=True))
        return [recent[sample] for sample, _ in records]

    async def payloads(
        self, job: str, policy: str, step: int, records: Sequence[tuple[str, Record]]
    ) -> list[bytes]:
        """What `Record.read` makes samples of. Raises `PayloadGoneError` when one was freed."""
        keys = PolicyKeys(job, policy)
        wanted: dict[str, list[str]] = {}
        for sample, record in records:
            fields = wanted.setdefault(record.rows, [])
            fields.append(sample)
            if record.late:
                fields += [f"{sample}\t{name}" for name in record.late.split(",")]
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
                sample, _, column = name.partition("\t")
                # Serialized messages behind one another merge when they are parsed.
                parts[sample] = parts[sample] + value if column else value
        return [parts[sample] for sample, _ in records]

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
        # In this order: a commit in between must not be taken for what the records say already.
        committed, records = await self._database.execute_each(
            [("HEXISTS", keys.commits, step), ("HMGET", keys.step(step, "book"), *ids)]
        )
        return [
            (member, sample, Record.parse(text.decode()).settled(bool(committed)))
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


def _values(fills: Sequence[Fill]) -> list[str | bytes | int]:
    """Arguments of fill_columns.lua behind the step."""
    if all(fill.reward is not None and not (fill.columns or fill.drop_reason) for fill in fills):
        return ["\n".join([f"{fill.sample}\t{fill.reward!r}" for fill in fills])]
    values: list[str | bytes | int] = [""]
    for fill in fills:
        reward = "" if fill.reward is None else repr(fill.reward)
        values += (fill.sample, reward, fill.drop_reason, len(fill.columns))
        for name, column in sorted(fill.columns.items()):
            values += (name, store_pb.Sample(columns={name: column}).SerializeToString())
    return values


def _lines(replies: bytes) -> list[_Reply]:
    """The replies of fill_columns.lua: an outcome and what belongs to it, one for each sample."""
    return [_reply(line) for line in replies.decode().split("\n")]


@functools.lru_cache(maxsize=1024)
def _reply(line: str) -> _Reply:
    """Most are alike."""
    outcome, _, rest = line.partition("\t")
    return outcome, rest


def _filled(
    policy: str, step: int, sample: str, reply: _Reply
) -> tuple[pb.SampleState.ValueType, bool]:
    """What a reply of fill_columns.lua says; raises what it refuses."""
    outcome = reply[0]
    if outcome == "unknown":
        raise NotFound(
            f"step {step} of policy {policy} has no such sample",
            kind="sample_not_found",
            field="sample_id",
            value=sample,
            remedy="Fill columns after AppendTrajectory has returned.",
        )
    state = STATE_OF[reply[1]]
    if outcome == "final":
        raise FailedPrecondition(
            f"sample {sample} is {pb.SampleState.Name(state)}: its columns are final",
            kind="sample_final",
            field="sample_id",
            value=sample,
            remedy="Name the column in required_columns, so that the sample waits for it.",
        )
    return state, outcome == "filled"
