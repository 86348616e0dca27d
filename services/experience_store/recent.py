"""Payloads that were appended here a short while ago: a claim need not read them back from Redis.

Redis stays the one truth. A payload never changes once its row is in a table, and is kept here only
by whoever put it there, under the millisecond at which Redis did: what another process appended,
what a Redis that lost its last second forgot, or what was evicted is simply not found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from services.experience_store.records import Record

MIB: Final = 2**20
# Enough for what waits until the groups of a step are complete, and little beside a model.
DEFAULT_BYTES: Final = 128 * MIB

# Job, policy, sample, and `Record.since`.
_Key: TypeAlias = tuple[str, str, str, str]


class RecentRows:
    """At most `limit` bytes of payload; the oldest go first. 0 keeps none."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._limit = limit
        self._rows: OrderedDict[_Key, bytes] = OrderedDict()
        self.bytes = 0
        """Payload held."""
        self.found = 0
        """Rows that claims took from here, since the start."""
        self.missed = 0
        """Rows that claims had to read from Redis."""

    def add(self, job: str, policy: str, since: str, rows: Iterable[tuple[str, bytes]]) -> None:
        """Keep these (sample id, payload), which entered the table at `since`."""
        for sample, payload in rows:
            key = (job, policy, sample, since)
            self.bytes += len(payload) - len(self._rows.pop(key, b""))
            self._rows[key] = payload
        while self.bytes > self._limit:
            _, payload = self._rows.popitem(last=False)
            self.bytes -= len(payload)

    def take(
        self, job: str, policy: str, records: Sequence[tuple[str, Record]]
    ) -> dict[str, bytes]:
        """Those of these samples that are here, and are complete as they were appended.

        They are not kept any longer: hardly any row is claimed twice.
        """
        taken: dict[str, bytes] = {}
        for sample, record in records:
            payload = self._rows.pop((job, policy, sample, record.since), None)
            if payload is None:
                continue
            self.bytes -= len(payload)
            # Late columns are in Redis only.
            if not record.late:
                taken[sample] = payload
        self.found += len(taken)
        self.missed += len(records) - len(taken)
        return taken

    def forget(self, job: str) -> None:
        """The job's tables are dropped."""
        for key in [key for key in self._rows if key[0] == job]:
            self.bytes -= len(self._rows.pop(key))
