"""Rosters that change: queries join or leave until the step is closed."""

from __future__ import annotations

import asyncio

import pytest

from services.experience_store.store import Store
from tests.experience_store.rosters import end, refused, rows_left
from tests.support.experience import Response, Stage, make_sample, make_stage
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import experience_store_pb2 as store_pb

EXHAUSTED = Response.OUTCOME_EXHAUSTED
WAIT = Response.OUTCOME_WAIT


async def test_a_step_that_is_held_open_is_not_exhausted(held: Stage) -> None:
    await end(held, *held.queries)
    status = await held.status()
    assert (status.closed, status.sealed, status.ended, status.complete) == (False, False, 6, 3)
    # A full micro-batch is claimed as usual; a smaller one might still grow.
    assert len((await held.claim(claim="c1", samples=4)).samples) == 4
    assert (await held.claim(samples=4)).outcome == WAIT
    with pytest.raises(FailedPrecondition, match="held open") as error:
        await held.commit(["c1"])
    assert error.value.kind == "step_unsealed"
    waiting = asyncio.create_task(held.claim(claim="c2", samples=4, wait=PATIENCE))
    await held.until_waiting()
    assert await held.amend(close=True) == []
    async with asyncio.timeout(PATIENCE):
        assert len((await waiting).samples) == 2
    assert (await held.claim()).outcome == EXHAUSTED
    assert (await held.status()).sealed
    assert (await held.commit(["c1", "c2"]))[0].num_samples == 6


async def test_added_queries_come_last_and_the_cursor_only_rises(held: Stage) -> None:
    await held.amend(add=["q7", "q3"], cursor=5)
    await held.amend(add=["q3"], cursor=4)
    status = await held.status()
    assert status.query_ids == ["q0", "q1", "q2", "q7", "q3"]
    assert (status.expected, status.cursor) == (10, 5)
    await end(held, "q3")
    assert await held.counts() == {"ready": 2}
    # The caller that opened the step, and readers of its roster, may open it again.
    assert (await held.open(0, held_open=True))[0]
    assert await held.open(0, queries=["q0", "q1", "q2", "q7", "q3"]) == (
        True,
        ["q3-s0-t0", "q3-s0-t1"],
    )
    assert (await refused(held.open(0, queries=["q0"])))[0] == "step_differs"


async def test_a_dropped_query_leaves_rows_and_trajectories_with_a_reason(held: Stage) -> None:
    await end(held, "q0")
    await held.append("q1", "q1-s0-t0")
    await held.fail("q2", "q2-s0-t0", "deadline: 9 s")
    assert await held.amend(drop=["q0", "q1", "q2"], reason="surplus", close=True) == ["q0"]
    status = await held.status()
    assert status.query_ids == ["q0"]
    assert (status.expected, status.ended, status.sealed) == (6, 6, True)
    assert status.ended_trajectories == ["q0-s0-t0", "q0-s0-t1", "q1-s0-t0", "q2-s0-t0"]
    aborted = [e for e in status.endings.values() if e.state == "ABORTED"]
    assert {(e.query, e.reason) for e in aborted} == {("q1", "surplus"), ("q2", "surplus")}
    assert len(aborted) == 2
    for counts in status.counts:
        assert (counts.ready, counts.dropped) == (2, 1)
        assert dict(counts.drop_reasons) == {"surplus": 3, "deadline": 1}
    assert len(await rows_left(held, 0)) == 2 * 2, "payloads of dropped rows are freed"
    # Later endings are not needed: no error, and no trace.
    assert not await held.append("q1", "q1-s0-t1")
    assert not await held.fail("q2", "q2-s0-t1")
    # A repeated append of accepted rows is accepted again.
    assert (await held.status()).counts == status.counts
    assert len(await rows_left(held, 0)) == 2 * 2
    for policy in held.policies:
        await held.claim(claim=f"c-{policy}", policy=policy)
        assert (await held.commit([f"c-{policy}"], policy=policy))[0].num_samples == 2


async def test_a_late_reward_of_a_dropped_row_changes_nothing(held: Stage) -> None:
    rows = [make_sample("q1", 0, "q1-s0-t0", reward=None)]
    await held.append("q1", "q1-s0-t0", rows)
    await held.amend(drop=["q1"], reason="stale")
    assert await held.fill("q1_0_q1-s0-t0", reward=1.0) == ("D", False)
    assert await held.counts() == {"dropped": 1}


async def test_a_step_may_begin_and_end_without_queries(held: Stage) -> None:
    await held.open(1, held_open=True, queries=[])
    assert (await held.claim()).outcome == WAIT
    held.step = 0
    await held.amend(carry=["q2", "q0"], carry_to=1)
    await held.fail("q1", "q1-s0-t0")
    await held.fail("q1", "q1-s0-t1")
    await held.amend(close=True)
    empty = store_pb.STEP_OUTCOME_EMPTY
    await held.commit([], outcome=empty, version=0)
    held.step = 1
    assert (await held.status()).query_ids == ["q2", "q0"]
    await held.amend(drop=["q0", "q2"], reason="stale", close=True)
    assert (await held.claim()).outcome == EXHAUSTED
    assert (await held.commit([], outcome=empty, version=0))[0].num_samples == 0


async def test_amendments_may_be_repeated(held: Stage) -> None:
    await held.append("q1", "q1-s0-t0")
    for _ in range(2):
        await held.amend(add=["q5"], drop=["q1"], reason="surplus")
    await held.amend(drop=["q1"], reason="another")
    for _ in range(2):
        await held.amend(close=True, cursor=3)
    status = await held.status()
    assert (status.query_ids, status.expected, status.ended) == (["q0", "q2", "q5"], 8, 2)
    assert dict((await held.table()).drop_reasons) == {"surplus": 2}
    # It requests nothing new.
    assert await held.amend(add=["q5"], drop=["q1"], reason="x", close=True, cursor=2) == []


async def test_impossible_amendments_are_refused_and_change_nothing(held: Stage) -> None:
    await held.amend(drop=["q2"], reason="surplus")
    before = await held.status(queries=True)
    assert await refused(held.amend(add=["q9"], drop=["zz"], reason="r")) == (
        "unknown_query",
        "drop_query_ids",
    )
    assert await refused(held.amend(add=["q9", "q2"])) == ("query_left", "add_query_ids")
    assert await refused(held.amend(add=["q9"], carry=["q0"], carry_to=1)) == (
        "step_not_open",
        "step",
    )
    assert await held.status(queries=True) == before
    await held.open(1, queries=["q10"])
    held.step = 0
    assert await refused(held.amend(add=["q10"])) == ("query_elsewhere", "add_query_ids")
    assert await refused(held.amend(carry=["q0"], carry_to=1)) == ("step_closed", "carry_to")
    held.group_size = 3
    await held.open(2, queries=["q11"], held_open=True)
    held.step, held.group_size = 0, 2
    assert await refused(held.amend(carry=["q0"], carry_to=2)) == ("step_differs", "carry_to")
    assert await held.status(queries=True) == before
    await held.amend(close=True)
    for change in ({"add": ["q9"]}, {"drop": ["q0"], "reason": "r"}, {"cursor": 9}):
        assert await refused(held.amend(**change)) == ("step_closed", "step")
    held.step = 7
    assert await refused(held.amend(close=True)) == ("step_not_open", "step")


async def test_a_committed_step_cannot_be_amended(stage: Stage) -> None:
    await stage.append_all()
    for policy in stage.policies:
        await stage.claim(claim=f"c-{policy}", policy=policy)
        await stage.commit([f"c-{policy}"], policy=policy)
    assert await refused(stage.amend(add=["q9"])) == ("step_closed", "step")
    with pytest.raises(FailedPrecondition):
        await stage.amend(drop=["q9"], reason="r")


async def test_names_with_odd_characters_go_through_a_roster(store: Store) -> None:
    names = ('q "0"/\\', "q-ü", "q🎲")
    stage = await make_stage(store, new_id("job"), queries=names, held_open=True)
    await stage.append(names[1], "t")
    await stage.amend(add=["née"], drop=[names[1], names[0]], reason='"so"\\ é')
    assert (await stage.status()).query_ids == ["q🎲", "née"]
    await stage.amend(drop=["q🎲", "née"], reason="all", close=True)
    status = await stage.status()
    assert (status.query_ids, status.sealed) == ([], True)
    assert dict((await stage.table()).drop_reasons) == {'"so"\\ é': 4, "all": 4}


async def test_the_state_of_each_query_is_listed(held: Stage) -> None:
    await end(held, "q0")
    await held.append("q1", "q1-s0-t0")
    rows = [make_sample("q1", 1, "q1-s0-t1", reward=None)]
    await held.append("q1", "q1-s0-t1", rows)
    await held.fill("q1_1_q1-s0-t1", drop_reason="late")
    await held.append("q2", "q2-s0-t0", [make_sample("q2", 1, "q2-s0-t0", reward=None)])
    queries = (await held.status(endings=False, queries=True)).queries
    assert [
        (q.query_id, q.trajectories_ended, q.complete, q.samples, q.kept, q.pending)
        for q in queries
    ] == [("q0", 2, True, 4, 4, 0), ("q1", 2, True, 3, 2, 0), ("q2", 1, False, 1, 1, 1)]


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (-0.0, 0.0), (0.5, 1.0)])
async def test_groups_without_signal_are_dropped_when_they_ripen(
    store: Store, rewards: tuple[float, float]
) -> None:
    job = new_id("job")
    stage = await make_stage(store, job, drop_without_signal=True, policies=("solver",))
    for number, reward in enumerate(rewards):
        name = f"q0-s0-t{number}"
        # Two agents share the policy: two groups, one of which always has a signal.
        samples = [
            make_sample("q0", 0, name, agent="a", reward=reward),
            make_sample("q0", 1, name, agent="b", reward=float(number)),
        ]
        await stage.append("q0", name, samples)
    silent = rewards[0] == rewards[1]
    assert await stage.counts() == ({"dropped": 2, "ready": 2} if silent else {"ready": 4})
    counts = await stage.table()
    assert counts.groups_without_signal == int(silent)
    assert dict(counts.drop_reasons) == ({"no_signal": 2} if silent else {})
    queries = (await stage.status(queries=True)).queries
    assert (queries[0].samples, queries[0].kept) == (4, 2 if silent else 4)


async def test_a_group_of_one_is_kept_and_late_rewards_decide(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), drop_without_signal=True, policies=("solver",))
    turns = [make_sample("q0", turn, "t0", reward=1.0) for turn in range(3)]
    await stage.append("q0", "t0", turns)
    await stage.fail("q0", "t1")
    assert await stage.counts() == {"ready": 3}
    for name in ("t2", "t3"):
        await stage.append("q1", name, [make_sample("q1", 0, name, reward=None)])
    await stage.fill("q1_0_t2", reward=0.25)
    assert await stage.counts() == {"ready": 3, "pending": 2}
    assert await stage.fill("q1_0_t3", reward=0.25) == ("D", True)
    assert await stage.counts() == {"ready": 3, "dropped": 2}
    assert (await stage.claim(claim="c")).outcome == Response.OUTCOME_CLAIMED
    assert (await stage.commit(["c"]))[0].num_samples == 3


async def test_the_count_only_path_reads_no_endings(held: Stage) -> None:
    database, read = held.store.database, []
    original = database.call_each

    async def watching(commands: object, **more: object) -> object:
        read.extend(str(c[1]) for c in commands if c[0] in ("HGETALL", "HKEYS"))  # type: ignore[attr-defined]
        return await original(commands, **more)  # type: ignore[arg-type]

    database.call_each = watching  # type: ignore[method-assign, assignment]
    statuses = held.store.watching.watch(held.job)
    first = await anext(statuses)
    await held.append("q0", "q0-s0-t0")
    second = await anext(statuses)
    await held.status(endings=False)
    assert (first.trajectories_ended, second.trajectories_ended) == (0, 1)
    assert (second.closed, second.queries_complete) == (False, 0)
    assert read
    assert not [key for key in read if key.endswith(":ended")]
