"""Endings of trajectories: the first one counts, in all tables or none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.experience_store.store import Store
from tests.support.experience import Stage, ids_of, make_sample, make_stage
from troupe.rpc import FailedPrecondition, InvalidArgument, ResourceExhausted, new_id


async def test_the_first_ending_stays(stage: Stage) -> None:
    query, trajectory = stage.trajectories[0]
    assert await stage.append(query, trajectory, [make_sample(query, 0, trajectory, reward=0.25)])
    assert not await stage.append(query, trajectory, [make_sample(query, 0, trajectory, reward=9)])
    assert not await stage.fail(query, trajectory)
    status = await stage.store.steps.status(stage.job, 0)
    assert status.endings[trajectory].state == "COMPLETED"
    assert await stage.counts() == {"pending": 1}


async def test_repeating_an_append_returns_what_it_returned(stage: Stage) -> None:
    query, trajectory = stage.trajectories[0]
    assert await stage.append(query, trajectory, attempt="a1")
    assert await stage.append(query, trajectory, attempt="a1")
    assert not await stage.append(query, trajectory, attempt="a2")
    assert not await stage.append(query, trajectory, attempt="a2")
    assert await stage.counts() == {"pending": 1}


async def _staged(stage: Stage) -> list[bytes]:
    """Return the keys of rows whose ending is not decided, and of the notes about them."""
    keys: list[bytes] = await stage.store.database.call("KEYS", f"*{stage.job}/*:stage*")
    return keys


async def test_rows_of_a_repeated_append_do_not_stay(stage: Stage) -> None:
    query, trajectory = stage.trajectories[0]
    rows = [make_sample(query, 0, trajectory)]
    for attempt in ("a1", "a1", "a2"):
        await stage.append(query, trajectory, rows, attempt=attempt)
        assert await _staged(stage) == []
    stage.step = 7
    with pytest.raises(FailedPrecondition, match="not open"):
        await stage.append(query, trajectory, rows)
    assert await _staged(stage) == []


@pytest.mark.parametrize("arrived", [1, 2, 3])
async def test_rows_of_an_append_that_broke_off_are_freed(stage: Stage, arrived: int) -> None:
    """Only the first of the commands arrived: note, rows, the script that ends it in one table."""
    query, trajectory = stage.trajectories[0]
    database = stage.store.database
    original = database.call_each

    async def breaking(commands: Any, **rest: Any) -> list[Any]:
        if commands[0][0] != "SADD":
            return await original(commands, **rest)
        await original(commands[:arrived])
        raise ConnectionError

    database.call_each = breaking  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await stage.append(query, trajectory, [make_sample(query, 0, trajectory)], attempt="a1")
    database.call_each = original  # type: ignore[method-assign]
    assert len(await _staged(stage)) == min(arrived, 2)
    assert await stage.append(query, trajectory, attempt="a2") == (arrived < 3)
    assert await stage.counts() == {"pending": 1}
    await stage.store.tables.drop(stage.job)
    assert await _staged(stage) == []


@pytest.mark.parametrize("policy", ["checker", "solver"])
async def test_an_ending_whose_rows_redis_refused_is_not_decided(stage: Stage, policy: str) -> None:
    """At its memory limit Redis may refuse rows and accept the script after them."""
    query, trajectory = stage.trajectories[0]
    database = stage.store.database
    original, refused = database.call_each, 0

    async def refusing(commands: Any, **rest: Any) -> list[Any]:
        nonlocal refused
        if commands[0][0] != "SADD" or refused:
            return await original(commands, **rest)
        refused += 1
        taken = [one for one in commands if one[0] != "HSET" or f"/{policy}}}" not in one[1]]
        assert len(taken) == len(commands) - 1
        await original(taken, **rest)
        raise ResourceExhausted("full", kind="redis_full")

    database.call_each = refusing  # type: ignore[method-assign]
    with pytest.raises(ResourceExhausted):
        await stage.append(query, trajectory, attempt="a1")
    assert not (await stage.status()).ended
    assert await stage.append(query, trajectory, attempt="a1")
    assert await stage.append("q0", "q0-s0-t1")
    for each in stage.policies:
        assert await stage.counts(each) == {"ready": 2}


async def test_racing_endings_agree_in_all_tables(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), queries=("q",), group_size=1)

    def rows(turn: int) -> list[object]:
        return [
            make_sample("q", turn, "t", policy="solver", agent="solver"),
            make_sample("q", turn + 1, "t", policy="checker", agent="checker"),
        ]

    wins = await asyncio.gather(
        *(stage.append("q", "t", rows(10 * attempt)) for attempt in range(8))  # type: ignore[arg-type]
    )
    assert wins.count(True) == 1
    winner = wins.index(True) * 10
    assert ids_of(await stage.claim(policy="solver")) == [f"q_{winner}_t"]
    assert ids_of(await stage.claim(policy="checker")) == [f"q_{winner + 1}_t"]


async def test_members_that_failed_leave_the_rest_of_their_group_usable(stage: Stage) -> None:
    await stage.append("q0", "q0-s0-t0")
    await stage.fail("q0", "q0-s0-t1", "workflow_raised: ValueError: too long to count")
    assert await stage.counts() == {"ready": 1}
    await stage.fail("q1", "q1-s0-t0", "deadline: 9 s")
    await stage.end("q1", "q1-s0-t1", "ABORTED", [], reason="deadline: 10 s")
    response = await stage.claim(claim="c1")
    assert [list(claimed.group_rewards) for claimed in response.samples] == [[1.0]]
    status = await stage.store.steps.status(stage.job, 0)
    assert status.sealed
    for counts in status.counts:
        assert dict(counts.drop_reasons) == {"workflow_raised": 1, "deadline": 2}


@pytest.mark.parametrize("before", range(3))
async def test_reasons_are_counted_by_whole_characters(stage: Stage, before: int) -> None:
    """Half a character could not be read, and no step could open any more."""
    reason = "x" * before + "超時" * 40
    await stage.fail("q0", "q0-t0", reason)
    (counted,) = (await stage.table()).drop_reasons
    assert reason.startswith(counted)
    assert 62 <= len(counted.encode()) <= 64
    assert list((await stage.store.audit.check(stage.job)).violations) == []


async def test_an_ending_may_have_no_rows_for_some_policy(stage: Stage) -> None:
    for query, trajectory in stage.trajectories:
        await stage.append(query, trajectory, [make_sample(query, 0, trajectory)])
    assert await stage.counts("solver") == {"ready": 4}
    assert await stage.counts("checker") == {}
    assert (await stage.claim(policy="checker")).samples == []


async def test_rows_that_do_not_belong_to_the_step_are_refused_and_leave_nothing(
    stage: Stage,
) -> None:
    with pytest.raises(FailedPrecondition) as error:
        await stage.append("q9", "q9-s0-t0")
    assert error.value.kind == "unknown_query"
    for number in range(2):
        await stage.append("q0", f"q0-s0-t{number}")
    with pytest.raises(FailedPrecondition) as error:
        await stage.append("q0", "q0-s0-t7")
    assert error.value.kind == "group_closed"
    with pytest.raises(InvalidArgument) as invalid:
        await stage.append("q1", "q1-s0-t0", [make_sample("q1", 0, "q1-s0-t0", policy="frozen")])
    assert invalid.value.field == "samples[0].policy"
    stage.step = 3
    with pytest.raises(FailedPrecondition) as error:
        await stage.append("q0", "q0-s3-t0")
    assert error.value.kind == "step_not_open"
    stage.step = 0
    assert await stage.counts() == {"ready": 2}
    keys = await stage.store.database.call("KEYS", f"*{stage.job}*staged*")
    assert keys == []


async def test_rows_arrive_as_they_were_sent(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), queries=("q",), group_size=1)
    sent = make_sample("q", 3, "t", reward=0.1 + 0.2, tokens=101)
    await stage.append("q", "t", [sent])
    received = (await stage.claim()).samples[0].sample
    sent.state = received.state
    assert received == sent


async def test_equal_sample_ids_of_two_trajectories_are_reported_not_overwritten(
    store: Store,
) -> None:
    stage = await make_stage(store, new_id("job"), queries=("q", "q_0"), group_size=1)
    await stage.append("q", "1_t", [make_sample("q", 0, "1_t", reward=0.5)])
    await stage.append("q_0", "t", [make_sample("q_0", 1, "t", reward=0.75)])
    response = await stage.claim()
    assert [claimed.sample.reward for claimed in response.samples] == [0.5]
    status = await stage.store.steps.status(stage.job, 0)
    assert dict(status.counts[1].drop_reasons) == {"sample_id_taken": 1}
