"""What became of every sample, kept when the bookkeeping of its step is forgotten.

A step that is trimmed leaves one compressed record per policy (`LoggedStep`: its commit and the
fate of each sample) and one for the job (`Roster`: its queries, and how each trajectory ended).
In order, each arrow repeatable: log every policy -> log the roster -> forget the bookkeeping. So
a crash between two of them loses nothing: a step is in the log, in the book, or in both alike.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.experience_store.database import Database
from services.experience_store.keys import JobKeys, PolicyKeys
from services.experience_store.records import STATE_OF, Ending, Record, parse_commit
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

# Why rows of a step that nobody committed are DROPPED when the tables are.
JOB_OVER: Final = "job_over"

# Records read at once: a long book must not hold Redis, nor this process, for long.
_PAGE: Final = 1000
# Samples, or bytes of their record: from here on another thread (de)compresses.
_LONG: Final = 10_000
_FINAL: Final = frozenset({pb.SAMPLE_STATE_TRAINED, pb.SAMPLE_STATE_DROPPED})


@dataclass(frozen=True)
class Roster:
    """What a job knows of one of its steps, whatever the policies made of it."""

    step: int
    fields: dict[str, str]
    """The step's hash in Redis (keys.JobKeys.step)."""
    endings: dict[str, Ending]
    """Trajectory -> how it ended."""

    @property
    def queries(self) -> list[str]:
        """The queries that the step consists of."""
        return [str(query) for query in json.loads(self.fields["queries"])]

    @property
    def group_size(self) -> int:
        """Trajectories per query that count."""
        return int(self.fields["group_size"])

    @property
    def redundant(self) -> int:
        """Trajectories per query beyond these, which are ended once so many have completed."""
        return int(self.fields.get("redundant", 0))

    @property
    def versions(self) -> dict[str, int]:
        """Version that each policy rolled out with."""
        return {name: int(version) for name, version in json.loads(self.fields["versions"]).items()}

    def format(self) -> bytes:
        """The compressed text that Redis holds."""
        endings = {trajectory: ending.format() for trajectory, ending in self.endings.items()}
        return zlib.compress(json.dumps({"fields": self.fields, "endings": endings}).encode())

    @staticmethod
    def parse(step: int, stored: bytes) -> Roster:
        """The roster that `format` wrote."""
        value = json.loads(zlib.decompress(stored))
        endings = {name: Ending.parse(text) for name, text in value["endings"].items()}
        return Roster(step, value["fields"], endings)


class Log:
    """Writes the log, and reads it and the live books as one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def keep(self, job: str, policies: Iterable[str], step: int) -> None:
        """Log a step that every policy has committed. The first record of a step stays."""
        for policy in policies:
            keys = PolicyKeys(job, policy)
            if not await self._database.execute("HEXISTS", keys.log, step):
                logged = await self._live(keys, step)
                await self._database.execute("HSETNX", keys.log, step, await packed(logged))
        roster = await self._live_roster(job, step)
        if roster is not None:
            await self._database.execute("HSETNX", JobKeys(job).log, step, roster.format())

    async def keep_unfinished(self, job: str, policy: str, step: int) -> bool:
        """Log a policy's step whose job is over: rows that were not final are DROPPED.

        Returns whether the policy had committed it.
        """
        keys = PolicyKeys(job, policy)
        stored, there = await self._database.execute_each(
            [("HGET", keys.log, step), ("EXISTS", keys.step(step, "step"))]
        )
        if stored is not None:
            committed = unpack(stored).HasField("commit")
            if committed or not there:
                return committed
        logged = await self._live(keys, step)
        committed = logged.HasField("commit")
        if not committed:
            logged.job_over = True
            for sample in logged.samples:
                if sample.state not in _FINAL:
                    sample.state, sample.reason = pb.SAMPLE_STATE_DROPPED, JOB_OVER
        await self._database.execute("HSET", keys.log, step, await packed(logged))
        return committed

    async def keep_roster(self, job: str, roster: Roster) -> None:
        """Log a roster, instead of the one that is there."""
        await self._database.execute("HSET", JobKeys(job).log, roster.step, roster.format())

    async def keep_tables(self, job: str, declaration: str) -> None:
        """Remember what tables the job had (tables.Table): they are about to be dropped."""
        await self._database.execute("SET", JobKeys(job).logged_tables, declaration)

    async def tables(self, job: str) -> bytes | None:
        """What tables the job had, when they are dropped."""
        stored: bytes | None = await self._database.execute("GET", JobKeys(job).logged_tables)
        return stored

    async def purge(self, job: str, policies: Iterable[str]) -> None:
        """Free the log."""
        keys = JobKeys(job)
        for policy in policies:
            own = PolicyKeys(job, policy)
            for key in (own.log, own.totals):
                await self._database.execute("UNLINK", key)
        for key in (keys.log, keys.logged_tables):
            await self._database.execute("UNLINK", key)

    async def has(self, job: str, step: int) -> bool:
        """Whether all of a step is in the log."""
        return bool(await self._database.execute("HEXISTS", JobKeys(job).log, step))

    async def steps(self, job: str) -> list[int]:
        """All steps that the job has opened, oldest first."""
        keys = JobKeys(job)
        logged, known = await self._database.execute_each(
            [("HKEYS", keys.log), ("ZRANGE", keys.steps, 0, -1)]
        )
        return sorted({int(step) for step in (*logged, *known)})

    async def roster(self, job: str, step: int) -> Roster | None:
        """A step's roster, from the log or from the live job; None for a step never opened."""
        # It may be logged and forgotten while we look.
        for _ in range(2):
            stored = await self._database.execute("HGET", JobKeys(job).log, step)
            if stored is not None:
                return await asyncio.to_thread(Roster.parse, step, stored)
            if (live := await self._live_roster(job, step)) is not None:
                return live
        return None

    async def policy_step(self, job: str, policy: str, step: int) -> store_pb.LoggedStep:
        """What became of every sample of a policy's step, or has so far."""
        keys = PolicyKeys(job, policy)
        logged = store_pb.LoggedStep(step=step)
        for _ in range(2):
            stored = await self._database.execute("HGET", keys.log, step)
            if stored is not None:
                return await unpacked(stored)
            logged = await self._live(keys, step)
            if logged.samples or logged.HasField("commit"):
                break
        return logged

    async def _live(self, keys: PolicyKeys, step: int) -> store_pb.LoggedStep:
        """The book of a policy's step. A commit while it is read makes it be read again."""
        while True:
            before = await self._database.execute("HGET", keys.commits, step)
            samples = await self._book(keys, step, before is not None)
            after, dropped = await self._database.execute_each(
                [("HGET", keys.commits, step), ("HGETALL", keys.step(step, "dropped"))]
            )
            if (before is None) == (after is None):
                break
        logged = store_pb.LoggedStep(step=step, samples=[samples[name] for name in sorted(samples)])
        if after is not None:
            logged.commit.CopyFrom(parse_commit(after))
        for reason, number in dropped.items():
            logged.drop_reasons[reason.decode()] = int(number)
        return logged

    async def _book(
        self, keys: PolicyKeys, step: int, committed: bool
    ) -> dict[str, store_pb.LoggedSample]:
        found: dict[str, store_pb.LoggedSample] = {}
        cursor = 0
        while True:
            cursor, page = await self._database.execute(
                "HSCAN", keys.step(step, "book"), cursor, "COUNT", _PAGE
            )
            for name, text in page.items():
                record = Record.parse(text.decode()).settled(committed)
                sample = name.decode()
                found[sample] = store_pb.LoggedSample(
                    sample_id=sample,
                    state=STATE_OF[record.state],
                    reason=record.reason,
                    uses=int(record.uses),
                    trajectory_id=record.trajectory,
                    origin_step=int(record.origin) if record.origin else None,
                )
            cursor = int(cursor)
            if cursor == 0:
                return found

    async def _live_roster(self, job: str, step: int) -> Roster | None:
        keys = JobKeys(job)
        stored, ended = await self._database.execute_each(
            [("HGETALL", keys.step(step)), ("HGETALL", keys.ended(step))]
        )
        if not stored:
            return None
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        endings = {name.decode(): Ending.parse(text.decode()) for name, text in ended.items()}
        return Roster(step, fields, endings)


def pack(logged: store_pb.LoggedStep) -> bytes:
    """What Redis holds of a policy's step."""
    return zlib.compress(logged.SerializeToString(deterministic=True))


async def packed(logged: store_pb.LoggedStep) -> bytes:
    """`pack`, without holding up this process for a long step."""
    if len(logged.samples) < _LONG:
        return pack(logged)
    return await asyncio.to_thread(pack, logged)


async def unpacked(stored: bytes) -> store_pb.LoggedStep:
    """`unpack`, without holding up this process for a long step."""
    if len(stored) < _LONG:
        return unpack(stored)
    return await asyncio.to_thread(unpack, stored)


def unpack(stored: bytes) -> store_pb.LoggedStep:
    """The step that `pack` wrote."""
    return store_pb.LoggedStep.FromString(zlib.decompress(stored))
