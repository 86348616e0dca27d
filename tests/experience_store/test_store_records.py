"""Records in Redis: cheap to hash in Lua, and not written when no reader is left."""

from __future__ import annotations

import pytest

from benchmarks.experience_store.workload import GROUP_SIZE, Shape, make_row
from services.experience_store.log import Log
from services.experience_store.records import PolicyKeys
from services.experience_store.store import Store
from tests.support.experience import Stage, make_stage, staged_row
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

TRAINED, CLAIMED = common_pb.SAMPLE_STATE_TRAINED, common_pb.SAMPLE_STATE_CLAIMED


def lua_hash(text: bytes) -> int:
    """Return the hash of a string in Lua 5.1 (lstring.c, luaS_newlstr)."""
    found = length = len(text)
    step = (length >> 5) + 1
    while length >= step:
        found ^= ((found << 5) + (found >> 2) + text[length - 1]) & 0xFFFFFFFF
        length -= step
    return found


def test_records_of_a_step_do_not_fall_into_few_buckets_of_lua() -> None:
    shape = Shape(2, 32, 8)
    records = {
        staged_row(make_row(shape, query, trajectory, turn)).record(())
        for query, trajectory in shape.trajectories(0)
        for turn in range(shape.turns)
    }
    assert len(records) == 32 * GROUP_SIZE * 8
    assert len({lua_hash(record.encode()) for record in records}) > 0.99 * len(records)


async def test_a_commit_makes_samples_trained_without_writing_their_records(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",))
    await stage.append_all()
    await stage.claim(claim="first")
    before = await book_of(stage)
    await stage.commit(["first"])
    assert await book_of(stage) == before
    assert await stage.counts() == {"trained": 4}
    assert set((await store.high_water.of_job(stage.job)).values()) == {0}
    found, _ = await store.samples.page(stage.job, "solver", None, TRAINED, 10, "")
    assert [(sample.state, sample.uses) for sample in found] == [(TRAINED, 1)] * 4
    assert (await store.samples.page(stage.job, "solver", None, CLAIMED, 10, ""))[0] == []
    logged = await Log(store.database).policy_step(stage.job, "solver", 0)
    assert [(sample.state, sample.uses) for sample in logged.samples] == [(TRAINED, 1)] * 4
    sample = found[0].sample_id
    assert await stage.fill(sample, reward=9.0) == ("T", False)
    with pytest.raises(FailedPrecondition, match="SAMPLE_STATE_TRAINED"):
        await stage.fill(sample, columns={"late": store_pb.Column()})
    assert list((await store.audit.check(stage.job)).violations) == []


async def book_of(stage: Stage) -> dict[bytes, bytes]:
    """Return the records of a step as Redis holds them."""
    book = PolicyKeys(stage.job, "solver").step(stage.step, "book")
    found: dict[bytes, bytes] = await stage.store.database.call("HGETALL", book)
    return found
