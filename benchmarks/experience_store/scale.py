"""Claims of a store with few and with many rows; memory per row."""

from __future__ import annotations

import asyncio
import statistics
import time

import redis

from benchmarks.experience_store.served import (
    CALL_SECONDS,
    Ending,
    Timings,
    append_all,
    create,
    drop,
)
from benchmarks.experience_store.servers import Stub
from benchmarks.experience_store.workload import (
    GROUP_SIZE,
    Shape,
    claim_request,
    make_appends,
    open_request,
    payload_bytes,
)
from troupe.v1 import experience_store_pb2 as store_pb

CLAIM = 8
# Tokens of a row; the measurement is about the number of rows.
_TOKENS = 8
_TURNS = 125


async def fill(stub: Stub, job: str, first: int, steps: int, rows: int) -> None:
    """Put about `rows` ready rows into `steps` steps from `first` on, like rollout."""
    shape = Shape(_TOKENS, max(1, round(rows / steps / GROUP_SIZE / _TURNS)), _TURNS)
    for step in range(first, first + steps):
        await stub.OpenStep(open_request(job, step, shape))
        # A few queries at a time, so that a step of 100,000 rows is never in this process at once.
        for query in range(shape.queries):
            appends = make_appends(job, step, shape, queries=[query], rewarded=True)
            async with asyncio.TaskGroup() as group:
                for append in appends:
                    group.create_task(_append(stub, append))


async def _append(stub: Stub, append: store_pb.AppendTrajectoryRequest) -> None:
    await stub.writer.append(append, CALL_SECONDS)


async def claim_seconds(stub: Stub, job: str, step: int, claims: int) -> list[float]:
    """Return the seconds of each of `claims` claims of CLAIM rows."""
    found = []
    for _ in range(claims):
        request = claim_request(job, step, CLAIM)
        started = time.perf_counter()
        response = await stub.ClaimMicroBatch(request)
        found.append(time.perf_counter() - started)
        if len(response.samples) != CLAIM:
            raise RuntimeError(f"a claim has {len(response.samples)} rows, not {CLAIM}")
    return found


async def latency_by_rows(
    stub: Stub, few: int, many: int, steps: int, claims: int
) -> tuple[float, float]:
    """Return the median seconds of a claim with `few` rows in the store, and with `many`.

    Measured one after the other, since the store has to be filled in between: first steps 0 .. 2 in
    a store that holds nothing else, then the first, middle and last of `steps` further steps that
    hold `many` rows.
    """
    job = await create(stub)
    small: list[float] = []
    for step in range(3):
        await fill(stub, job, step, 1, few)
        await claim_seconds(stub, job, step, 5)
        small += await claim_seconds(stub, job, step, claims // 3)
    await fill(stub, job, 3, steps, many)
    large: list[float] = []
    for step in (3, 3 + steps // 2, 2 + steps):
        await claim_seconds(stub, job, step, 5)
        large += await claim_seconds(stub, job, step, claims // 3)
    await drop(stub, job)
    return statistics.median(small), statistics.median(large)


async def memory_ratio(stub: Stub, client: redis.Redis, shape: Shape) -> float:
    """Return bytes of Redis per byte of row data, with all rows of a step appended and ready."""
    job = await create(stub)
    await stub.OpenStep(open_request(job, 0, shape))
    appends = make_appends(job, 0, shape)
    before = await used_bytes(client)
    await append_all(stub, map(Ending.of, appends), 8, Timings())
    held = await used_bytes(client) - before
    await drop(stub, job)
    return held / payload_bytes(appends)


async def used_bytes(client: redis.Redis) -> int:
    """Return the bytes in use for data, without buffers of connections and of the append-only
    file."""
    while int(client.info("memory")["lazyfree_pending_objects"]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    info = client.info("memory")
    buffers = int(info["mem_aof_buffer"]) + int(info["mem_clients_normal"])
    return int(info["used_memory"]) - buffers
