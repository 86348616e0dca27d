"""The same bytes written and read by pipelined redis-py directly: what Redis itself can do."""

from __future__ import annotations

import time

import redis

# Rows per pipeline: enough that round trips do not count.
BATCH = 64


def round_trip(client: redis.Redis, rows: list[bytes]) -> float:
    """Seconds to write all rows, then to read all of them. They are deleted afterwards."""
    names = [f"raw:{number}" for number in range(len(rows))]
    started = time.perf_counter()
    for start in range(0, len(rows), BATCH):
        with client.pipeline(transaction=False) as pipe:
            for name, row in zip(
                names[start : start + BATCH], rows[start : start + BATCH], strict=True
            ):
                pipe.set(name, row)
            pipe.execute()
    for start in range(0, len(rows), BATCH):
        with client.pipeline(transaction=False) as pipe:
            for name in names[start : start + BATCH]:
                pipe.get(name)
            read = pipe.execute()
        if [len(row) for row in read] != [len(row) for row in rows[start : start + BATCH]]:
            raise RuntimeError("Redis returned other rows than were written")
    seconds = time.perf_counter() - started
    for start in range(0, len(names), 1000):
        client.unlink(*names[start : start + 1000])
    return seconds
