"""Records as Redis holds them: cheap to hash in Lua, and read as the release before wrote them."""

from __future__ import annotations

import pytest

from benchmarks.store.workload import GROUP_SIZE, Shape, make_row
from services.experience_store.log import Log
from services.experience_store.records import PolicyKeys, SampleRecord, StagedRow
from services.experience_store.store import Store
from tests.support.experience import Stage, ids_of, make_sample, make_stage
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

TRAINED, CLAIMED = pb.SAMPLE_STATE_TRAINED, pb.SAMPLE_STATE_CLAIMED


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
        StagedRow.of(make_row(shape, query, trajectory, turn)).record(query, trajectory, ())
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


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_step_that_the_release_before_began_goes_on(store: Store, claimed: bool) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",))
    keys, database = PolicyKeys(stage.job, "solver"), store.database

    async def forget_counts() -> None:
        """What this release counts, and the one before did not."""
        await database.execute("HDEL", keys.step(0, "step"), "layout", "claimed_bytes")
        tallies = keys.step(0, "tallies")
        for name in await database.execute("HKEYS", tallies):
            if name.endswith(b"\tL"):
                await database.execute("HDEL", tallies, name)

    samples = [make_sample(query, 0, name, reward=None) for query, name in stage.trajectories]
    for (query, name), sample in zip(stage.trajectories, samples, strict=True):
        await stage.append(query, name, [sample])
    await stage.fill(samples[0].sample_id, reward=1.0)
    if not claimed:
        await forget_counts()
    for sample in samples[1:]:
        await stage.fill(sample.sample_id, reward=0.0)
    assert await stage.counts() == {"ready": 4}
    await stage.claim(claim="first")
    await forget_counts()
    await stage.commit(["first"])
    assert await stage.counts() == {"trained": 4}
    assert set((await store.high_water.of_job(stage.job)).values()) == {0}
    assert {
        SampleRecord.parse(text.decode()).state for text in (await book_of(stage)).values()
    } == {"T"}


async def book_of(stage: Stage) -> dict[bytes, bytes]:
    """Records as Redis holds them."""
    book = PolicyKeys(stage.job, "solver").step(stage.step, "book")
    found: dict[bytes, bytes] = await stage.store.database.execute("HGETALL", book)
    return found


async def as_before(stage: Stage) -> None:
    """Write the step's records as they were before they had `spread`."""
    book = PolicyKeys(stage.job, "solver").step(stage.step, "book")
    database = stage.store.database
    for sample, text in (await database.execute("HGETALL", book)).items():
        record = SampleRecord.parse(text.decode())
        await database.execute("HSET", book, sample, "\t".join(record[:-1]))
