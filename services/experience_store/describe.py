"""What every table of a job holds now, over all its steps, and since the job began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from services.experience_store.database import Database
from services.experience_store.high_water import HighWater
from services.experience_store.keys import PolicyKeys
from services.experience_store.records import Record
from services.experience_store.steps import Steps
from services.experience_store.tables import Tables
from troupe.v1 import experience_store_pb2 as store_pb

_PAGE: Final = 1000
# Pages of one book looked at for the oldest pending sample: beyond, it is the oldest of these.
_MOST_PAGES: Final = 100
# Fields of a policy's totals that count a reason.
_REASON: Final = "reason:"


@dataclass(frozen=True)
class _Oldest:
    """The sample that has been PENDING for longest."""

    since: int
    """Milliseconds of the Redis clock."""
    sample: str


class Descriptions:
    """Describes the tables of jobs."""

    def __init__(
        self, database: Database, tables: Tables, steps: Steps, high_water: HighWater
    ) -> None:
        self._database = database
        self._tables = tables
        self._steps = steps
        self._high_water = high_water

    async def describe(self, job: str) -> store_pb.DescribeTablesResponse:
        """All tables of a job. Raises `NotFound` when it has none."""
        table = await self._tables.get(job)
        summaries = {policy: store_pb.TableSummary(policy=policy) for policy in table.policies}
        known = await self._steps.all(job)
        for policy, size in (await self._high_water.of_job(job)).items():
            summaries[policy].payload_bytes = size
        pending: dict[str, list[int]] = {policy: [] for policy in table.policies}
        for step in known:
            status = await self._steps.status(job, step)
            committed = {commit.policy for commit in status.commits}
            for counts in status.counts:
                _add(summaries[counts.policy], counts)
                if counts.pending and counts.policy not in committed:
                    pending[counts.policy].append(step)
        for policy, summary in summaries.items():
            await self._add_history(job, summary)
            summary.newest_step = known[-1] if known else -1
            await self._add_oldest(PolicyKeys(job, policy), summary, pending[policy])
        await self._high_water.look()
        info = await self._database.info()
        return store_pb.DescribeTablesResponse(
            tables=summaries.values(),
            payload_bytes=self._high_water.payload_bytes,
            high_water_bytes=self._high_water.mark_bytes,
            over_high_water=self._high_water.over,
            redis_bytes=int(info["used_memory"]),
        )

    async def _add_history(self, job: str, summary: store_pb.TableSummary) -> None:
        """What the newest commit says, and what steps add that are forgotten."""
        keys = PolicyKeys(job, summary.policy)
        version, commits, totals = await self._database.execute_each(
            [("HGET", keys.head, "version"), ("HKEYS", keys.commits), ("HGETALL", keys.totals)]
        )
        summary.version = -1 if version is None else int(version)
        summary.committed_step = max((int(step) for step in commits), default=-1)
        for name, number in totals.items():
            field = name.decode()
            if field == "T":
                summary.trained += int(number)
            elif field == "D":
                summary.dropped += int(number)
            elif field.startswith(_REASON):
                summary.drop_reasons[field.removeprefix(_REASON)] += int(number)

    async def _add_oldest(
        self, keys: PolicyKeys, summary: store_pb.TableSummary, steps: list[int]
    ) -> None:
        oldest: _Oldest | None = None
        for step in steps:
            found = await self._oldest_pending(keys, step)
            if found is not None and (oldest is None or found.since < oldest.since):
                oldest = found
        if oldest is not None:
            # By the clock that dated it: in a cluster each node has its own.
            clock = "return redis.call('TIME')"
            seconds, micros = await self._database.execute("EVAL", clock, 1, keys.base)
            now = int(seconds) + int(micros) / 1e6
            summary.oldest_pending_seconds = max(0.0, now - oldest.since / 1000)
            summary.oldest_pending_sample = oldest.sample

    async def _oldest_pending(self, keys: PolicyKeys, step: int) -> _Oldest | None:
        oldest: _Oldest | None = None
        cursor = 0
        for _ in range(_MOST_PAGES):
            cursor, page = await self._database.execute(
                "HSCAN", keys.step(step, "book"), cursor, "COUNT", _PAGE
            )
            for sample, text in page.items():
                record = Record.parse(text.decode())
                if record.state != "P" or not record.since:
                    continue
                since = int(record.since)
                if oldest is None or since < oldest.since:
                    oldest = _Oldest(since, sample.decode())
            cursor = int(cursor)
            if cursor == 0:
                break
        return oldest


def _add(summary: store_pb.TableSummary, counts: store_pb.PolicyCounts) -> None:
    summary.pending += counts.pending
    summary.ready += counts.ready
    summary.claimed += counts.claimed
    summary.trained += counts.trained
    summary.dropped += counts.dropped
    reasons = Counter(summary.drop_reasons) + Counter(counts.drop_reasons)
    summary.drop_reasons.update(reasons)
