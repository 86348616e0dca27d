"""Payloads that were appended here a short while ago: a claim need not read them back from Redis.

Redis stays the one truth. A payload never changes once its row is in a table, and is kept here only
by whoever put it there, under the millisecond at which Redis did: what another process appended,
what a Redis that lost its last second forgot, or what was evicted is simply not found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from services.experience_store.records import Payload, Record

MIB: Final = 2**20
# Enough for what waits until the groups of a step are complete, and little beside a model.
DEFAULT_BYTES: Final = 128 * MIB
# Beside its payload a row takes some 450 bytes here, which are not counted: of rows shorter than
# this there are no more than of rows as long.
_SHORT: Final = 1024
_LEAST_ROWS: Final = 64

# Job, policy, sample, and `Record.since`.
_Key: TypeAlias = tuple[str, str, str, str]


class RecentRows:
    """At most `limit` bytes, messages that rows lie in counted whole; the oldest go first. 0 keeps
    none.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._limit = limit
        self._most = max(_LEAST_ROWS, limit // _SHORT)
        self._rows: OrderedDict[_Key, Payload] = OrderedDict()
        # Rows that lie in a message, by its identity: it is freed with the last of them.
        self._sharing: dict[int, int] = {}
        self.bytes = 0
        """Held."""
        self.found = 0
        """Rows that claims took from here, since the start."""
        self.missed = 0
        """Rows that claims had to read from Redis."""

    def add(self, job: str, policy: str, since: str, rows: Iterable[tuple[str, Payload]]) -> None:
        """Keep these (sample id, payload), which entered the table at `since`."""
        for sample, payload in rows:
            key = (job, policy, sample, since)
            self._pop(key)
            self._rows[key] = payload
            if isinstance(payload, memoryview):
                message = id(payload.obj)
                number = self._sharing.get(message, 0)
                self._sharing[message] = number + 1
                self.bytes += 0 if number else _size(payload)
            else:
                self.bytes += len(payload)
        while self.bytes > self._limit or len(self._rows) > self._most:
            self._pop(next(iter(self._rows)))

    def take(
        self, job: str, policy: str, records: Sequence[tuple[str, Record]]
    ) -> dict[str, Payload]:
        """Those of these samples that are here, and are complete as they were appended.

        They are not kept any longer: hardly any row is claimed twice.
        """
        taken: dict[str, Payload] = {}
        for sample, record in records:
            payload = self._pop((job, policy, sample, record.since))
            # Late columns are in Redis only.
            if payload is not None and not record.late:
                taken[sample] = payload
        self.found += len(taken)
        self.missed += len(records) - len(taken)
        return taken

    def forget(self, job: str) -> None:
        """The job's tables are dropped."""
        for key in [key for key in self._rows if key[0] == job]:
            self._pop(key)

    def _pop(self, key: _Key) -> Payload | None:
        payload = self._rows.pop(key, None)
        if isinstance(payload, memoryview):
            message = id(payload.obj)
            self._sharing[message] -= 1
            if not self._sharing[message]:
                del self._sharing[message]
                self.bytes -= _size(payload)
        elif payload is not None:
            self.bytes -= len(payload)
        return payload


def _size(row: memoryview) -> int:
    """Bytes of the message that it lies in."""
    message = row.obj
    assert isinstance(message, bytes)
    return len(message)
