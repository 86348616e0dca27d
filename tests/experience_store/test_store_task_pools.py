"""Success rates of a curriculum's tasks: counted once per step, kept with the rosters, freed."""

from __future__ import annotations

import time

import pytest

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.support.crashing import MOMENTS, CrashError, CrashingDatabase
from tests.support.experience import Stage, make_stage
from tests.support.experience_client import Client
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.scheduling.curriculum import TaskPool
from troupe.v1 import experience_store_pb2 as store_pb

LETTERS = [str(pool) for pool in TaskPool]


def asking(number: int, *items: int, pool: str = "n", source: int = 0) -> list[str]:
    """Return queries from `number` on that ask these items."""
    return [f"q{number + at}-{pool}{source}.{item}" for at, item in enumerate(items)]


async def read(
    stage: Stage, before: int, *, wanted: tuple[int, ...] = (100,), memory: float = 0.5
) -> store_pb.ReadTaskPoolsResponse:
    request = store_pb.ReadTaskPoolsRequest(
        request_id=new_id("pools"),
        job_id=stage.job,
        before_step=before,
        low=0.25,
        high=0.75,
        memory=memory,
        wanted=wanted,
    )
    return await stage.store.task_pools.read(request)


async def pools(stage: Stage, before: int, *, memory: float = 0.5) -> dict[str, list[int]]:
    """Return the non-empty pools of the only source."""
    (source,) = (await read(stage, before, memory=memory)).sources
    assert all(source.pools[name].size == len(source.pools[name].items) for name in LETTERS)
    return {name: list(source.pools[name].items) for name in LETTERS if source.pools[name].items}


async def play(stage: Stage, step: int, outcomes: dict[str, str]) -> None:
    """Runs a step, for each query with these outcomes of its trajectories: `1` solved, `0` not, `f`
    failed, `a` aborted."""
    await stage.open(step, queries=list(outcomes))
    for query, text in outcomes.items():
        for number, how in enumerate(text):
            name = f"{query}-s{step}-t{number}"
            if how in "01":
                await stage.append(query, name, solved=how == "1")
            elif how == "f":
                await stage.fail(query, name)
            else:
                await stage.end(query, name, "ABORTED", [], reason="given up")


@pytest.fixture
async def fresh(store: Store) -> Stage:
    """A job of four trajectories per query, with no step open."""
    job = new_id("job")
    await store.tables.create(job, ("solver",), ())
    return Stage(store, job, ("solver",), (), 4)


async def test_tasks_move_between_pools_by_their_success(fresh: Stage) -> None:
    assert await pools(fresh, 0) == {}
    hard, middling, easy, lost = asking(0, 5, 6, 7, 8)
    await play(fresh, 0, {hard: "000f", middling: "0110", easy: "1111", lost: "aaaa"})
    assert await pools(fresh, 0) == {"a": [5, 6, 7, 8]}, "not counted yet"
    counted = {"f": [5], "w": [6], "s": [7], "n": [8]}
    assert await pools(fresh, 1) == counted
    assert await pools(fresh, 1) == counted, "counted once"
    assert (await read(fresh, 1)).sources[0].next_new == 9
    # 5: 0 of 4 weigh half, 4 of 4 are new; 7: aborted trajectories say nothing.
    again = [*asking(4, 5, pool="f"), *asking(5, 7, pool="s")]
    await play(fresh, 1, {again[0]: "1111", again[1]: "aaaa"})
    assert await pools(fresh, 2) == {"w": [6, 5], "s": [7], "n": [8]}


async def test_without_memory_only_the_last_outcomes_count(fresh: Stage) -> None:
    await play(fresh, 0, {asking(0, 3)[0]: "0000"})
    assert await pools(fresh, 1, memory=0.0) == {"f": [3]}
    await play(fresh, 1, {asking(1, 3, pool="f")[0]: "1111"})
    assert await pools(fresh, 2, memory=0.0) == {"s": [3]}


async def test_pools_are_in_the_order_of_their_last_query(fresh: Stage) -> None:
    await play(fresh, 0, dict.fromkeys(asking(0, 3, 2, 10, 1), "0110"))
    await play(fresh, 1, dict.fromkeys(asking(4, 2, pool="w"), "0110"))
    assert await pools(fresh, 2) == {"w": [3, 10, 1, 2]}
    first = (await read(fresh, 2, wanted=(2,))).sources[0].pools["w"]
    assert (list(first.items), first.size) == ([3, 10], 4)


async def test_a_task_that_is_asked_twice_in_a_step_is_counted_together(fresh: Stage) -> None:
    await play(fresh, 0, {asking(0, 1)[0]: "1111", asking(1, 1, pool="a")[0]: "0000"})
    assert await pools(fresh, 1) == {"w": [1]}


async def test_sources_are_kept_apart_and_other_queries_are_none(fresh: Stage) -> None:
    queries = [*asking(0, 1), *asking(1, 1, source=1), "q2", "q3-x"]
    await play(fresh, 0, dict.fromkeys(queries, "1111"))
    one, two = (await read(fresh, 1, wanted=(5, 5))).sources
    assert (list(one.pools["s"].items), list(two.pools["s"].items)) == ([1], [1])


async def test_queries_that_join_leave_or_are_carried_update_the_pools(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), queries=tuple(asking(0, 0, 1)), held_open=True)
    zero, one = stage.queries
    (two,) = asking(2, 2)
    await stage.amend(add=[two], cursor=3)
    assert await pools(stage, 0) == {"a": [0, 1, 2]}
    for number in range(2):
        await stage.append(zero, f"{zero}-s0-t{number}", solved=True)
    await stage.append(one, f"{one}-s0-t0", solved=True)
    await stage.open(1, queries=asking(3, 3), held_open=True)
    stage.step = 0
    with pytest.raises(FailedPrecondition, match="step 0 is not over") as caught:
        await pools(stage, 1)
    assert caught.value.kind == "step_not_sealed"
    await stage.amend(carry=[one], carry_to=1, drop=[two], reason="surplus", close=True)
    # The carried query counts in its new step; the dropped one counts as new.
    assert await pools(stage, 1) == {"n": [2], "s": [0], "a": [1, 3]}
    stage.step = 1
    await stage.append(one, f"{one}-s0-t1")
    await stage.amend(drop=asking(3, 3), reason="surplus", close=True)
    assert await pools(stage, 2) == {"n": [2, 3], "s": [0], "w": [1]}


async def test_redundant_trajectories_count_as_far_as_they_completed(store: Store) -> None:
    (query,) = asking(0, 4)
    stage = await make_stage(store, new_id("job"), queries=(query,), redundant=2)
    await stage.append(query, f"{query}-s0-t3", solved=True)
    await stage.append(query, f"{query}-s0-t1")
    assert await pools(stage, 1) == {"w": [4]}


async def test_a_step_that_is_not_there_yet_cannot_be_counted(fresh: Stage) -> None:
    await play(fresh, 0, {asking(0, 0)[0]: "1111"})
    with pytest.raises(FailedPrecondition, match="is not open"):
        await pools(fresh, 2)
    # Earlier results are counted once.
    assert await pools(fresh, 1) == {"s": [0]}


@pytest.mark.parametrize("when", MOMENTS)
async def test_a_store_that_dies_counts_once(redis_url: str, when: str) -> None:
    """Every call is repeated until it gets through; the rates equal an undisturbed job's."""
    database = CrashingDatabase(redis_url)
    store = Store(database)
    stage = Stage(store, new_id("job"), ("solver",), (), 4)
    await store.tables.create(stage.job, stage.policies, ())
    for step in range(3):
        await play(
            stage, step, dict.fromkeys(asking(3 * step, *range(3 * step, 3 * step + 3)), "0110")
        )
        database.die(1, when)
        with pytest.raises(CrashError):
            await pools(stage, step + 1)
        database.live()
        assert await pools(stage, step + 1) == {"w": list(range(3 * step + 3))}
    rates = await database.call("HGETALL", f"troupe:{{{stage.job}}}:rates:0:0")
    assert set(rates.values()) == {b"2 4"}
    await database.close()


async def test_a_dropped_job_leaves_no_keys(client: Client, redis_url: str) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request(query_ids=asking(0, *range(0, 1000, 99))))
    request = store_pb.ReadTaskPoolsRequest(
        request_id=new_id(), job_id=client.job, low=0, high=1, memory=1, wanted=[3]
    )
    assert len((await client.stub.ReadTaskPools(request)).sources[0].pools["a"].items) == 3
    for field, value in (("low", 1.5), ("memory", float("nan")), ("wanted", [])):
        wrong = store_pb.ReadTaskPoolsRequest()
        wrong.CopyFrom(request)
        wrong.request_id = new_id()
        wrong.ClearField(field)  # type: ignore[arg-type]
        if value:
            setattr(wrong, field, value)
        with pytest.raises(InvalidArgument) as caught:
            await client.stub.ReadTaskPools(wrong)
        assert caught.value.field == field
    await client.stub.DropTables(
        store_pb.DropTablesRequest(request_id=new_id(), job_id=client.job, purge_log=True)
    )
    database = Database(redis_url)
    assert await database.call("KEYS", f"*{client.job}*") == []
    await database.close()


@pytest.mark.slow
async def test_half_a_million_tasks_cost_no_scan(fresh: Stage, redis_url: str) -> None:
    """Steps of 1,000 queries over 500,000 known tasks: time and memory, printed."""
    database = Database(redis_url)
    keys = f"troupe:{{{fresh.job}}}"
    pipe: list[tuple[str | int, ...]] = []
    before = (await database.call("INFO", "memory"))["used_memory"]
    for first in range(0, 500_000, 1000):
        fields = [text for n in range(first, first + 1000) for text in (n, n)]
        pipe.append(("ZADD", f"{keys}:tasks:0:{'wfs'[first // 1000 % 3]}", *fields))
        for block in range(first // 100, first // 100 + 10):
            rates = [t for n in range(block * 100, block * 100 + 100) for t in (n, "3.5 14.25")]
            pipe.append(("HSET", f"{keys}:rates:0:{block}", *rates))
    pipe.append(("HSET", f"{keys}:curriculum", "sources", 1, "next:0", 500_000))
    for at in range(0, len(pipe), 500):
        await database.call_each(pipe[at : at + 500])
    size = (await database.call("INFO", "memory"))["used_memory"] - before
    began = time.monotonic()
    await fresh.open(0, queries=asking(500_000, *range(0, 500_000, 500), pool="w"))
    opened = time.monotonic()
    found = await read(fresh, 0, wanted=(1000,))
    listed = time.monotonic() - opened
    print(f"{size / 2**20:.0f} MiB, opened {opened - began:.3f} s, listed {listed:.3f} s")
    assert sum(found.sources[0].pools[name].size for name in LETTERS) == 500_000
    assert listed < 1
    assert size < 120 * 2**20
    await database.close()
