"""Samples after their append: late columns, raw rows, listing; rows kept in memory for claims."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.experience_store.database import Database, ScriptCall
from services.experience_store.notices import Notices
from services.experience_store.records import STATE_OF, PolicyKeys, RawRow, SampleRecord
from services.experience_store.requests import Fill
from services.experience_store.steps import StepStore
from services.experience_store.tables import TableRegistry
from troupe.prefixes import restored
from troupe.rpc import FailedPrecondition, InvalidArgument, NotFound, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

MIB: Final = 2**20
# Enough for the rows that wait until a step's groups are complete, and little compared with a
# model.
DEFAULT_BYTES: Final = 128 * MIB
# A row takes some 450 uncounted bytes in addition to its raw row. The number of rows is bounded as
# if none were shorter than this.
_SHORT: Final = 1024
_LEAST_ROWS: Final = 64

# Job, policy, sample, and `SampleRecord.since`.
_Key: TypeAlias = tuple[str, str, str, str]


class RecentRows:
    """Raw rows in memory from their append to their claim; the oldest are removed first.

    Holds at most `limit` bytes; a message counts whole while any row is a view of it. 0 keeps none.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._limit = limit
        self._most = max(_LEAST_ROWS, limit // _SHORT)
        self._rows: OrderedDict[_Key, RawRow] = OrderedDict()
        # Number of rows that are views of a message, by its identity: the last row frees it.
        self._sharing: dict[int, int] = {}
        self.bytes = 0
        """Bytes kept."""
        self.found = 0
        """Rows taken by claims since the start."""

    def add(self, job: str, policy: str, since: str, rows: Iterable[tuple[str, RawRow]]) -> None:
        """Keep these (sample id, raw row), which entered the table at `since`."""
        for sample, raw_row in rows:
            key = (job, policy, sample, since)
            self._pop(key)
            self._rows[key] = raw_row
            if isinstance(raw_row, memoryview):
                message = id(raw_row.obj)
                number = self._sharing.get(message, 0)
                self._sharing[message] = number + 1
                self.bytes += 0 if number else _size(raw_row)
            else:
                self.bytes += len(raw_row)
        while self.bytes > self._limit or len(self._rows) > self._most:
            self._pop(next(iter(self._rows)))

    def take(
        self, job: str, policy: str, records: Sequence[tuple[str, SampleRecord]]
    ) -> dict[str, RawRow]:
        """Return the kept raw rows of these samples, without late columns.

        Removes them here: hardly any row is claimed twice.
        """
        taken: dict[str, RawRow] = {}
        for sample, record in records:
            raw_row = self._pop((job, policy, sample, record.since))
            # Late columns are in Redis only.
            if raw_row is not None and not record.late:
                taken[sample] = raw_row
        self.found += len(taken)
        return taken

    def peek(
        self, job: str, policy: str, rows: Iterable[tuple[str, SampleRecord]]
    ) -> dict[str, RawRow]:
        """Return the kept raw rows of these samples, each with the record of a sample that refers
        to it. They stay here."""
        keys = ((sample, (job, policy, sample, record.since)) for sample, record in rows)
        return {sample: self._rows[key] for sample, key in keys if key in self._rows}

    def forget(self, job: str) -> None:
        """Remove the rows of a job whose tables are dropped."""
        for key in [key for key in self._rows if key[0] == job]:
            self._pop(key)

    def _pop(self, key: _Key) -> RawRow | None:
        raw_row = self._rows.pop(key, None)
        if isinstance(raw_row, memoryview):
            message = id(raw_row.obj)
            self._sharing[message] -= 1
            if not self._sharing[message]:
                del self._sharing[message]
                self.bytes -= _size(raw_row)
        elif raw_row is not None:
            self.bytes -= len(raw_row)
        return raw_row


def _size(row: memoryview) -> int:
    """Return the bytes of the message that `row` is a view of."""
    message = row.obj
    assert isinstance(message, bytes)
    return len(message)


# Keeps a page well under the message limit (64 MiB by default), however long its rows.
PAGE_BYTES: Final = 16 * 2**20
# Samples read for one page: a filter with few matches must not make a call long.
SCAN_LIMIT: Final = 10_000
# Samples filled by one script, which blocks Redis meanwhile.
FILL_BATCH: Final = 256
_FREED: Final = frozenset("TD")
# An outcome of fill_columns.lua, and its detail.
_Reply: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class SampleFills:
    """Columns of some samples of one table and step."""

    job: str
    policy: str
    step: int
    fills: Sequence[Fill]


class PayloadGoneError(Exception):
    """A raw row was freed while it was being read."""


@dataclass(frozen=True)
class _PageStart:
    """The start of a page: after this member of this step."""

    step: int
    member: str

    def format(self) -> str:
        return base64.urlsafe_b64encode(f"{self.step}\t{self.member}".encode()).decode()

    @staticmethod
    def parse(token: str) -> _PageStart:
        try:
            step, _, member = base64.urlsafe_b64decode(token.encode()).decode().partition("\t")
            return _PageStart(int(step), member)
        except (ValueError, binascii.Error) as error:
            raise InvalidArgument(
                "not a page token of ListSamples",
                field="page_token",
                value=token,
                remedy="Use next_page_token of the page before, or leave it empty.",
            ) from error


class Samples:
    """The samples of all tables."""

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

    async def fill_each(
        self, calls: Sequence[SampleFills]
    ) -> list[list[tuple[common_pb.SampleState.ValueType, bool]] | TroupeError]:
        """Fill columns of samples, or drop the samples, each call by itself. Returns for each
        sample its state and whether a value was written (the first value of a column stays), or the
        error.

        Errors: `NotFound` for a sample that is not in the table (its trajectory has not ended, or
        ended without it), `FailedPrecondition` for a new column of one that is claimed already.
        The other samples are filled nevertheless.
        """
        together: dict[tuple[str, str, int], list[SampleFills]] = {}
        for call in calls:
            together.setdefault((call.job, call.policy, call.step), []).append(call)
        found: dict[int, list[tuple[common_pb.SampleState.ValueType, bool]] | TroupeError] = {}

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
        """Return the reply of fill_columns.lua for each of `fills`."""
        await self._tables.check_policy(job, policy)
        base = PolicyKeys(job, policy).base
        # One script for many: each script, each reply and each notice costs CPU.
        calls = [
            ScriptCall("fill_columns", base, (step, *_values(fills[start : start + FILL_BATCH])))
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
        """Return the reply of fill_columns.lua in the step that the sample's query was carried to,
        if any."""
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

    async def take(
        self,
        job: str,
        policy: str,
        step: int,
        records: Sequence[tuple[str, SampleRecord]],
        known_claims: Sequence[str] = (),
    ) -> tuple[list[RawRow], list[RawRow]]:
        """Return `raw_rows` of claimed samples, from memory if this replica appended them, and the
        raw rows that they refer to, without samples that the claimant has from this claim or
        `known_claims`."""
        before = _referred(records)
        if before and known_claims:
            key = PolicyKeys(job, policy).step(step, "claims")
            for text in await self._database.call("HMGET", key, *known_claims):
                # The text of a lost claim does not name samples.
                for sample in text.decode().split("\n") if text else ():
                    before.pop(sample, None)
        recent = self._recent.take(job, policy, records)
        stems = self._recent.peek(job, policy, before.items())
        rest = [one for one in records if one[0] not in recent]
        absent = {sample: record for sample, record in before.items() if sample not in stems}
        if rest or absent:
            read = await self._read(job, policy, step, rest, absent)
            recent.update((sample, read[sample]) for sample, _ in rest)
            stems.update((sample, read[sample]) for sample in absent)
        return [recent[sample] for sample, _ in records], [stems[sample] for sample in before]

    async def raw_rows(
        self, job: str, policy: str, step: int, records: Sequence[tuple[str, SampleRecord]]
    ) -> list[bytes]:
        """Return the raw rows with their late columns, for `SampleRecord.read`. Raises
        `PayloadGoneError` when one was freed."""
        read = await self._read(job, policy, step, records, {})
        return [read[sample] for sample, _ in records]

    async def _read(
        self,
        job: str,
        policy: str,
        step: int,
        records: Sequence[tuple[str, SampleRecord]],
        before: Mapping[str, SampleRecord],
    ) -> dict[str, bytes]:
        """Return `raw_rows` by sample, including the samples in `before`, each with the record of a
        sample that refers to it."""
        keys = PolicyKeys(job, policy)
        # Key -> (sample, field) of each value to read there.
        wanted: dict[str, list[tuple[str, str | int]]] = {}
        for sample, record in records:
            fields = wanted.setdefault(record.rows, [])
            fields.append((sample, record.turn))
            if record.late:
                fields += [(sample, f"{record.turn}\t{name}") for name in record.late.split(",")]
        for sample, record in before.items():
            wanted.setdefault(record.rows, []).append((sample, record.turn_of(sample)))
        replies = await self._database.call_each(
            [
                ("HMGET", keys.rows(step, trajectory), *(field for _, field in fields))
                for trajectory, fields in wanted.items()
            ]
        )
        # Concatenated serialized messages merge when they are parsed.
        parts = {
            sample: record.named_ancestor(sample, policy).SerializeToString()
            for sample, record in before.items()
        }
        parts |= {
            sample: record.named(sample, policy).SerializeToString() for sample, record in records
        }
        for fields, values in zip(wanted.values(), replies, strict=True):
            for (sample, _), value in zip(fields, values, strict=True):
                if value is None:
                    raise PayloadGoneError(sample)
                parts[sample] += value
        return parts

    async def page(
        self,
        job: str,
        policy: str,
        step: int | None,
        state: common_pb.SampleState.ValueType | None,
        size: int,
        token: str,
    ) -> tuple[list[store_pb.Sample], str]:
        """Return at most `size` samples in order of step, query, group and id, and where the next
        page starts ('' after the last). Samples of committed steps lack their raw row.
        """
        await self._tables.check_policy(job, policy)
        place = _PageStart.parse(token) if token else None
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
                        return found, _PageStart(number, after).format()
                    found.append(await self._row(job, policy, number, sample, record))
                    size_in_bytes += found[-1].ByteSize()
                    after = member
                if len(members) < size:
                    break
                after = members[-1][0]
                if scanned >= SCAN_LIMIT:
                    return found, _PageStart(number, after).format()
        return found, ""

    async def _members(
        self, job: str, policy: str, step: int, after: str, number: int
    ) -> list[tuple[str, str, SampleRecord]]:
        keys = PolicyKeys(job, policy)
        start = f"({after}" if after else "-"
        members = [
            member.decode()
            for member in await self._database.call(
                "ZRANGEBYLEX", keys.step(step, "members"), start, "+", "LIMIT", 0, number
            )
        ]
        if not members:
            return []
        ids = [member.rpartition("\t")[2] for member in members]
        # In this order, so that a commit in between does not count records twice.
        committed, records = await self._database.call_each(
            [("HEXISTS", keys.commits, step), ("HMGET", keys.step(step, "book"), *ids)]
        )
        return [
            (member, sample, SampleRecord.parse(text.decode()).settled(bool(committed)))
            for member, sample, text in zip(members, ids, records, strict=True)
            if text is not None
        ]

    async def _row(
        self, job: str, policy: str, step: int, sample: str, record: SampleRecord
    ) -> store_pb.Sample:
        if record.state not in _FREED:
            try:
                before = dict.fromkeys(record.ancestors(), record)
                read = await self._read(job, policy, step, [(sample, record)], before)
                stems = [store_pb.Sample.FromString(read[name]) for name in before]
                return restored(record.read(read[sample]), stems)
            except PayloadGoneError:
                pass
        return record.outline(sample, policy)


def _referred(records: Sequence[tuple[str, SampleRecord]]) -> dict[str, SampleRecord]:
    """Return the further samples whose raw rows these refer to, each with the record of a sample
    that refers to it, since their own may be gone."""
    found: dict[str, SampleRecord] = {}
    own: set[str] = set()
    for _, record in records:
        if record.stem:
            own = own or {sample for sample, _ in records}
            for sample in record.ancestors():
                if sample not in own:
                    found[sample] = record
    return found


def _values(fills: Sequence[Fill]) -> list[str | bytes | int]:
    """Return the arguments of fill_columns.lua after the step."""
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
    """Return the replies of fill_columns.lua, one for each sample."""
    return [_reply(line) for line in replies.decode().split("\n")]


@functools.lru_cache(maxsize=1024)
def _reply(line: str) -> _Reply:
    """Return the outcome and rest of a reply line of fill_columns.lua; cached, because most are
    alike."""
    outcome, _, rest = line.partition("\t")
    return outcome, rest


def _filled(
    policy: str, step: int, sample: str, reply: _Reply
) -> tuple[common_pb.SampleState.ValueType, bool]:
    """Return the state and whether a value was written, from a reply of fill_columns.lua; raise its
    refusal."""
    outcome = reply[0]
    if outcome == "unknown":
        raise NotFound(
            f"no such sample in step {step} of policy {policy}",
            kind="sample_not_found",
            field="sample_id",
            value=sample,
            remedy="Fill columns after AppendTrajectory has returned.",
        )
    state = STATE_OF[reply[1]]
    if outcome == "final":
        raise FailedPrecondition(
            f"sample {sample} is {common_pb.SampleState.Name(state)}: its columns are final",
            kind="sample_final",
            field="sample_id",
            value=sample,
            remedy="Name the column in required_columns, so that the sample waits for it.",
        )
    return state, outcome == "filled"
