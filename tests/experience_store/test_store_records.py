"""Records as Redis holds them: cheap to hash in Lua, and read as the release before wrote them."""

from __future__ import annotations

from benchmarks.store.workload import GROUP_SIZE, Shape, make_row
from services.experience_store.keys import PolicyKeys
from services.experience_store.records import Record, Row
from services.experience_store.store import Store
from tests.support.experience import Stage, ids_of, make_stage
from troupe.rpc import new_id


def lua_hash(text: bytes) -> int:
    """What Lua 5.1 files a string under (lstring.c, luaS_newlstr)."""
    found = length = len(text)
    step = (length >> 5) + 1
    while length >= step:
        found ^= ((found << 5) + (found >> 2) + text[length - 1]) & 0xFFFFFFFF
        length -= step
    return found


def test_records_of_a_step_do_not_fall_into_few_buckets_of_lua() -> None:
    shape = Shape(2, 32, 8)
    records = {
        Row.of(make_row(shape, query, trajectory, turn)).record(query, trajectory, ())
        for query, trajectory in shape.trajectories(0)
        for turn in range(shape.turns)
    }
    assert len(records) == 32 * GROUP_SIZE * 8
    assert len({lua_hash(record.encode()) for record in records}) > 0.99 * len(records)


async def test_records_of_the_release_before_are_read(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",), max_uses=2)
    await stage.append_all()
    await as_before(stage)
    claimed = await stage.claim(claim="first")
    assert ids_of(claimed) == sorted(f"{q}_0_{t}" for q, t in stage.trajectories)
    await as_before(stage)
    await stage.commit(["first"])
    await stage.open(1)
    assert await stage.counts() == {"ready": 4}
    await stage.append_all()
    again = await stage.claim()
    used = {item.sample.group_id for item in again.samples if item.sample.uses}
    assert used == {"q0/solver@0", "q1/solver@0"}


async def as_before(stage: Stage) -> None:
    """Write the step's records as they were before they had `spread`."""
    book = PolicyKeys(stage.job, "solver").step(stage.step, "book")
    database = stage.store.database
    for sample, text in (await database.execute("HGETALL", book)).items():
        record = Record.parse(text.decode())
        await database.execute("HSET", book, sample, "\t".join(record[:-1]))
