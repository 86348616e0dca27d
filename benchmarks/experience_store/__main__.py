"""The experience store against the Redis that keeps its rows.

    python -m benchmarks.experience_store [--quick] [--json]

A real store process and a real Redis on this machine, started as by the embedded cluster (AOF,
every second); the client is this process, set up like a rollout worker (event loop, garbage
collector, malloc). `raw` is the same bytes written and read by pipelined redis-py, in the same
rounds of the same run. Samples are serialized before either side's clock starts, and return
serialized on both. The order changes from round to round, since the first side finds memory that
Redis has released. Ratios are medians over the rounds. The last line is one JSON object:

- `raw_ratio_4k`: bytes/s of append + reward + claim + commit over raw bytes/s, rows of 4096 tokens;
  with the best number of concurrent writers. Rewards arrive late, trajectory by trajectory. Both
  pass through `troupe.experience.ExperienceWriter`, like rollout's endings, which batches writes
  while calls are in flight.
- `rows_per_second_4k`, `raw_rows_per_second_4k`: both sides of that ratio, in rows. Raw Redis is
  redis-py with hiredis, as in the store.
- `grpc_echo_ratio_4k`: bytes/s of bare gRPC (no protobuf, store or Redis), a call per trajectory,
  over raw bytes/s, in the cell of `raw_ratio_4k`: the bound for a store behind gRPC.
- `cpu_us_per_row_4k`: CPU of each process in that cell, in microseconds per row; `echo` and
  `echo_client` are bare gRPC, `protobuf` is the serialization and parsing of samples, which counts
  for neither side, since direct users of Redis need it too.
- `ready_p99_ms`: from sending the last reward of a group to receiving the claim that waited for it.
- `million_rows_latency_ratio`: median time of a claim with 1,000,000 rows in the store over the one
  with 1,000.
- `memory_ratio`: bytes held by Redis per byte of row data, the worst of all lengths.
- `bytes_over_unique`: bytes of conversations of ten cumulative turns over the bytes of their unique
  tokens, by tokens of a conversation: on both links, in Redis and in its append-only file.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.command import finish, options_of, quantile, run_program
from benchmarks.experience_store import conversations, echo, scale, served
from benchmarks.experience_store.servers import Servers, Stub, started
from benchmarks.experience_store.workload import GROUP_SIZE, Shape, make_appends
from services.chassis.process import keep_freed_memory
from troupe.v1 import experience_store_pb2 as store_pb

TURNS = 8
WRITERS = (1, 8, 64)
# Rows per pipeline of raw Redis, enough to make round trips negligible.
_RAW_BATCH = 64
# Keys of `Cell.cpu_us`: the side and the process.
_CPU = {
    "client": "store client",
    "store": "store store",
    "redis": "store redis",
    "echo": "echo echo",
    "echo_client": "echo client",
}


@dataclass(frozen=True)
class Plan:
    """The extent of the measurement."""

    lengths: tuple[int, ...]
    step_bytes: int
    """Approximate bytes of row data per step."""
    repeats: int
    groups: int
    """Groups whose last reward is timed."""
    many: int
    many_steps: int
    claims: int
    talks: tuple[conversations.Talk, ...]


_TALKS = (
    conversations.Talk(4000, 32),
    conversations.Talk(40_000, 8),
    conversations.Talk(4000, 2, routes=48 * 8),
)
FULL = Plan((512, 4096, 32_768), 96 * 2**20, 5, 500, 1_000_000, 10, 90, _TALKS)
QUICK = Plan((4096,), 2**20, 1, 10, 4000, 2, 30, (conversations.Talk(4000, 4),))


@dataclass(frozen=True)
class Cell:
    """One length and number of writers."""

    tokens: int
    writers: int
    ratio: float
    lowest: float
    """The ratio of the store's worst round."""
    echo_ratio: float
    cpu_us: dict[str, int]
    """CPU microseconds per row of a step, by process."""
    store_mbs: float
    raw_mbs: float
    rows_per_second: float
    raw_rows_per_second: float
    p50_ms: dict[str, float]
    p99_ms: dict[str, float]


async def throughput(servers: Servers, stub: Stub, plan: Plan, tokens: int, writers: int) -> Cell:
    """Measure rounds of raw, echo and store; every other round in reverse order."""
    row_bytes = 6 * tokens + 200
    queries = max(2, plan.step_bytes // row_bytes // TURNS // GROUP_SIZE)
    shape = Shape(tokens, min(queries, 128), TURNS)
    timings = served.Timings()
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    cpu: defaultdict[str, list[float]] = defaultdict(list)
    protobuf: list[float] = []
    size = 0
    for number in range(plan.repeats):
        job = await served.create(stub)
        appends = make_appends(job, 0, shape)
        began = time.process_time()
        endings = [served.Ending.of(append) for append in appends]
        spent = time.process_time() - began
        rows = [row.SerializeToString() for append in appends for row in append.samples]
        began = time.process_time()
        for row in rows:
            store_pb.Sample.FromString(row)
        protobuf.append((spent + time.process_time() - began) / shape.rows * 1e6)
        # Written once and read once on both sides.
        size = 2 * sum(len(row) for row in rows)
        requests = [ending.message for ending in endings]
        answers = echo.batches([len(row) for row in rows], served.MICRO_BATCH)
        sides = {
            "raw": partial(_raw, servers, rows),
            "echo": partial(echo.round_trip, servers.echo_address, requests, answers, writers),
            "store": partial(served.run_step, stub, shape, job, endings, writers, timings),
        }
        await asyncio.to_thread(servers.compact)
        for side in sides if number % 2 == 0 else reversed(sides):
            before = servers.cpu_seconds()
            seconds[side].append(await sides[side]())
            after = servers.cpu_seconds()
            for name, used in after.items():
                cpu[f"{side} {name}"].append((used - before[name]) / shape.rows * 1e6)
        await served.drop(stub, job)
    ratios = [raw / store for raw, store in zip(seconds["raw"], seconds["store"], strict=True)]
    echoes = [raw / bare for raw, bare in zip(seconds["raw"], seconds["echo"], strict=True)]
    taken, ideal = statistics.median(seconds["store"]), statistics.median(seconds["raw"])
    return Cell(
        tokens,
        writers,
        statistics.median(ratios),
        min(ratios),
        statistics.median(echoes),
        {name: round(statistics.median(cpu[of])) for name, of in _CPU.items()}
        | {"protobuf": round(statistics.median(protobuf))},
        size / taken / 1e6,
        size / ideal / 1e6,
        shape.rows / taken,
        shape.rows / ideal,
        {name: quantile(calls, 0.5) * 1e3 for name, calls in timings.calls.items()},
        {name: quantile(calls, 0.99) * 1e3 for name, calls in timings.calls.items()},
    )


async def _raw(servers: Servers, rows: list[bytes]) -> float:
    with servers.client() as client:
        return await asyncio.to_thread(_raw_round_trip, client, rows)


def _raw_round_trip(client: redis.Redis, rows: list[bytes]) -> float:
    """Write all rows by pipelined redis-py, then read all of them, for the rate of Redis itself.

    Return the seconds. The rows are deleted afterwards.
    """
    names = [f"raw:{number}" for number in range(len(rows))]
    started = time.perf_counter()
    for start in range(0, len(rows), _RAW_BATCH):
        with client.pipeline(transaction=False) as pipe:
            for name, row in zip(
                names[start : start + _RAW_BATCH], rows[start : start + _RAW_BATCH], strict=True
            ):
                pipe.set(name, row)
            pipe.execute()
    for start in range(0, len(rows), _RAW_BATCH):
        with client.pipeline(transaction=False) as pipe:
            for name in names[start : start + _RAW_BATCH]:
                pipe.get(name)
            read = pipe.execute()
        if [len(row) for row in read] != [len(row) for row in rows[start : start + _RAW_BATCH]]:
            raise RuntimeError("Redis returned other rows than were written")
    seconds = time.perf_counter() - started
    for start in range(0, len(names), 1000):
        client.unlink(*names[start : start + 1000])
    return seconds


async def measure(servers: Servers, plan: Plan, console: Console) -> dict[str, Any]:
    """Measure everything, and print results as they come."""
    async with servers.stub() as stub:
        cells = [
            await throughput(servers, stub, plan, tokens, writers)
            for tokens in plan.lengths
            for writers in WRITERS
        ]
        console.print(_table(cells))
        ready = await served.ready_seconds(stub, Shape(4096, 1, 1), plan.groups)
        console.print(
            f"last reward -> claim delivered: p50 {quantile(ready, 0.5) * 1e3:.1f} ms, "
            f"p99 {quantile(ready, 0.99) * 1e3:.1f} ms ({len(ready)} groups, 4096 tokens a row)"
        )
        memory = {}
        for tokens in plan.lengths:
            shape = Shape(tokens, max(1, min(64, plan.step_bytes // (200 * tokens))), TURNS)
            with servers.client() as client:
                memory[tokens] = await scale.memory_ratio(stub, client, shape)
            console.print(f"memory per byte of row data, {tokens} tokens: {memory[tokens]:.2f}")
        with servers.client() as client:
            talks = [await conversations.carried(stub, client, talk) for talk in plan.talks]
        console.print(_talk_table(talks))
        # Last, since the heap of a Redis that held a million rows differs from a fresh one.
        low, high = await scale.latency_by_rows(stub, 1000, plan.many, plan.many_steps, plan.claims)
        console.print(
            f"claim of {scale.CLAIM} rows: {low * 1e3:.1f} ms with 1,000 rows in the store, "
            f"{high * 1e3:.1f} ms with {plan.many:,}"
        )
    best = max((cell for cell in cells if cell.tokens == 4096), key=lambda cell: cell.ratio)
    return {
        "raw_ratio_4k": round(best.ratio, 3),
        "rows_per_second_4k": round(best.rows_per_second),
        "raw_rows_per_second_4k": round(best.raw_rows_per_second),
        "grpc_echo_ratio_4k": round(best.echo_ratio, 3),
        "cpu_us_per_row_4k": best.cpu_us,
        "ready_p99_ms": round(quantile(ready, 0.99) * 1e3, 2),
        "million_rows_latency_ratio": round(high / low, 2),
        "memory_ratio": round(max(memory.values()), 3),
        "bytes_over_unique": {
            f"{one.talk.tokens}{' with routes' if one.talk.routes else ''}": {
                link: round(one.once[link], 3) for link in conversations.LINKS
            }
            for one in talks
        },
    }


def _talk_table(talks: Sequence[conversations.Carried]) -> Table:
    table = Table(
        title="bytes of conversations of ten cumulative turns over the bytes of their unique "
        "tokens",
        caption="In brackets: if every turn carries all its tokens.",
    )
    for heading in ("tokens", "routes", *conversations.LINKS):
        table.add_column(heading, justify="right")
    for one in talks:
        ratios = [f"{one.once[at]:.2f} ({one.whole[at]:.2f})" for at in conversations.LINKS]
        table.add_row(f"{one.talk.tokens}", f"{one.talk.routes}", *ratios)
    return table


def _table(cells: Sequence[Cell]) -> Table:
    table = Table(
        title="append + late reward + claim + commit, against raw pipelined redis-py",
        caption="Ratio: the median over the rounds. Lowest: the worst round. gRPC: the ratio of "
        "bare gRPC with the same messages. CPU: client / store / Redis. Calls: median / p99 in "
        "ms. A claim waits for its 64 rows.",
    )
    for heading in (
        "tokens",
        "writers",
        "rows/s",
        "MB/s",
        "raw MB/s",
        "ratio",
        "lowest",
        "gRPC",
        "CPU us/row",
    ):
        table.add_column(heading, justify="right")
    for name in ("append", "reward", "claim", "commit"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(
            f"{cell.tokens}",
            f"{cell.writers}",
            f"{cell.rows_per_second:.0f}",
            f"{cell.store_mbs:.0f}",
            f"{cell.raw_mbs:.0f}",
            f"{cell.ratio:.2f}",
            f"{cell.lowest:.2f}",
            f"{cell.echo_ratio:.2f}",
            " / ".join(f"{cell.cpu_us[name]}" for name in ("client", "store", "redis")),
            *(
                f"{cell.p50_ms[name]:.1f} / {cell.p99_ms[name]:.1f}"
                for name in ("append", "reward", "claim", "commit")
            ),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = options_of(__doc__, arguments)
    console = Console(quiet=options.json, width=160)
    keep_freed_memory()
    gc.freeze()
    with (
        tempfile.TemporaryDirectory(prefix="troupe-bench-") as directory,
        started(Path(directory)) as servers,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        results = runner.run(measure(servers, QUICK if options.quick else FULL, console))
    finish(results, quiet=options.json)


if __name__ == "__main__":
    run_program(main)
