"""Queries that continue in a later step with all their data."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.experience_store.database import Database
from services.experience_store.store import HighWater, Store
from tests.experience_store.rosters import end, refused, rows_left
from tests.support.experience import Stage, ids_of, make_sample, make_stage
from troupe.rpc import NotFound, ResourceExhausted, new_id
from troupe.v1 import experience_store_pb2 as store_pb


async def test_a_query_moves_to_a_later_step_with_all_its_rows(held: Stage) -> None:
    await end(held, "q0")
    rows = [
        make_sample("q1", turn, "q1-s0-t0", policy=policy, agent=policy, reward=None)
        for turn, policy in enumerate(held.policies)
    ]
    await held.append("q1", "q1-s0-t0", rows, attempt="a1")
    await held.fail("q2", "q2-s0-t0", "deadline: 9 s")
    await held.fill("q1_0_q1-s0-t0", policy="checker", drop_reason="reward_timeout: 1 s")
    await held.open(1, queries=["q8"], held_open=True)
    held.step = 0
    carried = {"carry": ["q0", "q1", "q2"], "carry_to": 1, "close": True}
    for _ in range(2):
        assert await held.amend(**carried) == ["q0"]
    status = await held.status()
    assert (status.query_ids, status.expected, status.ended, status.sealed) == (["q0"], 2, 2, True)
    assert status.ended_trajectories == ["q0-s0-t0", "q0-s0-t1"]
    for counts in status.counts:
        assert (counts.ready, counts.pending, counts.dropped) == (2, 0, 0)
        assert not counts.drop_reasons
    # A call that names the old step reaches it there, repeated or not.
    assert await held.append("q1", "q1-s0-t0", rows, attempt="a1")
    assert held.counted == 1
    assert not await held.append("q1", "q1-s0-t0", rows, attempt="a2")
    assert await held.append("q1", "q1-s0-t1")
    assert await held.fail("q2", "q2-s0-t1", "deadline: 10 s")
    assert held.counted == 1
    assert await held.fill("q1_1_q1-s0-t0", reward=0.5) == ("R", True)
    assert await held.fill("q1_0_q1-s0-t1", policy="checker", reward=0.5) == ("R", False)
    with pytest.raises(NotFound):
        await held.fill("q1_7_q1-s0-t0", reward=0.5)
    assert len(await rows_left(held, 0)) == 4
    claim = await held.claim(claim="c0")
    assert ids_of(claim) == ["q0_1_q0-s0-t0", "q0_1_q0-s0-t1"]
    await held.commit(["c0"])
    held.step = 1
    await held.amend(close=True)
    status = await held.status(queries=True)
    assert status.query_ids == ["q8", "q1", "q2"]
    assert (status.expected, status.ended, status.complete) == (6, 4, 2)
    assert [(q.samples, q.kept, q.pending) for q in status.queries] == [
        (0, 0, 0),
        (4, 3, 0),
        (0, 0, 0),
    ]
    assert dict((await held.table("checker")).drop_reasons) == {"reward_timeout": 1, "deadline": 2}
    assert ids_of(await held.claim(samples=2)) == ["q1_1_q1-s0-t0", "q1_1_q1-s0-t1"]
    for number in range(2):
        await held.fail("q8", f"q8-s1-t{number}")
    assert (await held.status()).sealed


async def test_a_query_may_be_carried_repeatedly_and_dropped(held: Stage) -> None:
    await held.append("q1", "q1-s0-t0")
    for step in (1, 2):
        await held.open(step, queries=[f"q{step + 10}"], held_open=True)
    for step in (0, 1):
        held.step = step
        await held.amend(carry=["q1"], carry_to=step + 1)
    held.step = 0
    assert await refused(held.amend(carry=["q1"], carry_to=2)) == (
        "query_left",
        "carry_query_ids",
    )
    assert await refused(held.amend(drop=["q1"], reason="r")) == ("query_left", "drop_query_ids")
    held.step = 2
    assert await held.counts() == {"pending": 1}
    await held.amend(drop=["q1"], reason="stale")
    held.step = 0
    assert not await held.append("q1", "q1-s0-t1")
    assert held.counted == 2
    assert await held.fill("q1_1_q1-s0-t0", reward=0.5) == ("D", False)
    held.step = 2
    assert (await held.status()).query_ids == ["q12"]
    assert dict((await held.table()).drop_reasons) == {"stale": 2}
    assert await rows_left(held, 0) == await rows_left(held, 1) == await rows_left(held, 2) == []


async def test_rows_of_a_carried_query_go_on_when_its_new_step_is_the_oldest(held: Stage) -> None:
    """Above the high-water mark, although they name a step that is over."""
    await held.open(1, queries=["q8"], held_open=True)
    held.step = 0
    await held.amend(carry=["q1"], carry_to=1)
    await held.amend(drop=["q0", "q2"], reason="surplus", close=True)
    empty = store_pb.STEP_OUTCOME_EMPTY
    for policy in held.policies:
        await held.commit([], policy=policy, outcome=empty, version=0)
    full = HighWater(held.store.database, held.store.tables, held.store.notices, mark_bytes=1)
    for step in (0, 1):
        await full.admit(held.job, step, 100)
    with pytest.raises(ResourceExhausted):
        await full.admit(held.job, 2, 100)


@pytest.mark.parametrize("seed", range(4))
async def test_endings_that_race_with_amendments_are_in_one_place(
    store: Store, redis_url: str, seed: int
) -> None:
    rng = random.Random(seed)
    names = tuple(f"q{number}" for number in range(12))
    stage = await make_stage(store, new_id("job"), queries=names, held_open=True)
    await stage.open(1, held_open=True, queries=[])
    other = Store(Database(redis_url))
    accepted: set[str] = set()

    async def end(query: str, number: int) -> None:
        own = Stage(rng.choice((store, other)), stage.job, stage.policies, names, 2)
        trajectory = f"{query}-t{number}"
        await asyncio.sleep(rng.random() * 0.05)
        rows = [
            make_sample(query, turn, trajectory, policy=policy, agent=policy, reward=None)
            for turn, policy in enumerate(stage.policies)
        ]
        if await own.append(query, trajectory, rows):
            accepted.add(trajectory)
            for turn, policy in enumerate(stage.policies):
                await own.fill(f"{query}_{turn}_{trajectory}", policy=policy, reward=float(number))

    async def amend() -> None:
        own = Stage(other, stage.job, stage.policies, names, 2)
        for start in range(0, 12, 3):
            await asyncio.sleep(rng.random() * 0.02)
            stay, drop, carry = names[start : start + 3]
            await own.amend(add=[f"{stay}-more"], drop=[drop], reason="surplus")
            await own.amend(carry=[carry], carry_to=1)
        await own.amend(close=True)

    ends = [end(query, number) for query in names for number in range(2)]
    await asyncio.gather(amend(), *ends)
    for start in range(0, 12, 3):
        await asyncio.gather(*(end(f"{names[start]}-more", number) for number in range(2)))
    await other.database.close()
    trained: dict[str, set[str]] = {policy: set() for policy in stage.policies}
    versions = dict.fromkeys(stage.policies, 0)
    for step in (0, 1):
        stage.step = step
        if step:
            await stage.amend(close=True)
        assert (await stage.status()).sealed
        for policy in stage.policies:
            names_there = ids_of(await stage.claim(claim=f"c{step}{policy}", policy=policy))
            outcome = store_pb.STEP_OUTCOME_APPLIED if names_there else store_pb.STEP_OUTCOME_EMPTY
            claims = [f"c{step}{policy}"] if names_there else []
            versions[policy] += bool(names_there)
            await stage.commit(claims, policy=policy, version=versions[policy], outcome=outcome)
            there = {name.rpartition("_")[2] for name in names_there}
            assert not trained[policy] & there
            trained[policy] |= there
    dropped = {e.query for e in (await stage.status()).endings.values() if e.state == "ABORTED"}
    stage.step = 0
    dropped |= {e.query for e in (await stage.status()).endings.values() if e.state == "ABORTED"}
    kept = {name for name in accepted if name.partition("-t")[0] not in dropped}
    assert trained == dict.fromkeys(stage.policies, kept)
    assert list((await store.audit.check(stage.job)).violations) == []
