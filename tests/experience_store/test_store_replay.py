"""Replay: trained samples return in the next step, as often as the job allows."""

from __future__ import annotations

from collections import Counter

import pytest

from services.experience_store.store import Store
from tests.support.experience import Response, Stage, ids_of, make_sample, make_stage
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import experience_store_pb2 as store_pb

EXHAUSTED = Response.OUTCOME_EXHAUSTED
WAIT = Response.OUTCOME_WAIT


@pytest.fixture
async def twice(store: Store) -> Stage:
    """A job whose samples may be used twice, with step 0 open."""
    return await make_stage(store, new_id("job"), policies=("solver",), max_uses=2)


async def train(stage: Stage, version: int, **fields: object) -> Response:
    """Claim all ready samples and commit them."""
    name = new_id("claim")
    response = await stage.claim(claim=name)
    await stage.commit([name], version=version, **fields)  # type: ignore[arg-type]
    return response


def uses_of(response: Response) -> dict[str, int]:
    return {item.sample.sample_id: item.sample.uses for item in response.samples}


async def payloads(stage: Stage) -> int:
    """Return the job's rows in Redis, of all steps."""
    database = stage.store.database
    keys = await database.call("KEYS", f"*{{{stage.job}/*:rows:*")
    return sum([await database.call("HLEN", key) for key in keys])


async def test_trained_samples_come_back_in_the_next_step_and_no_further(twice: Stage) -> None:
    await twice.append_all()
    first = await train(twice, 1)
    assert set(uses_of(first).values()) == {0}
    await twice.open(1)
    assert await twice.counts() == {"ready": 4}
    await twice.append_all()
    assert await twice.counts() == {"ready": 8}
    second = await train(twice, 2)
    assert uses_of(second) == dict.fromkeys(ids_of(first), 1) | {
        f"{query}_0_{trajectory}": 0 for query, trajectory in twice.trajectories
    }
    fresh = {item.sample.sample_id: item.sample for item in first.samples}
    for item in second.samples:
        if item.sample.uses:
            before = fresh[item.sample.sample_id]
            assert item.sample.prompt_ids == before.prompt_ids
            assert item.sample.reward == before.reward
    await twice.open(2)
    assert await twice.counts() == {"ready": 4}, "those of step 1 only"
    for query, trajectory in twice.trajectories:
        await twice.fail(query, trajectory)
    third = await train(twice, 3)
    assert uses_of(third) == {name: 1 for name, uses in uses_of(second).items() if uses == 0}
    await twice.open(3)
    assert await twice.counts() == {}
    assert await payloads(twice) == 0


async def test_reused_samples_come_back_whether_or_not_the_next_step_is_open(twice: Stage) -> None:
    await twice.append_all()
    await twice.open(1)
    await twice.append("q0", "q0-s1-t0")
    waiting = await twice.claim()
    assert waiting.outcome == WAIT
    twice.step = 0
    await train(twice, 1)
    twice.step = 1
    assert await twice.counts() == {"pending": 1, "ready": 4}
    response = await twice.claim(samples=4)
    assert set(uses_of(response).values()) == {1}


async def test_groups_stay_whole_and_apart_from_those_of_the_same_query(twice: Stage) -> None:
    for number, (query, trajectory) in enumerate(twice.trajectories):
        row = make_sample(query, 0, trajectory, reward=float(number))
        await twice.append(query, trajectory, [row])
    await train(twice, 1)
    await twice.open(1)
    for query, trajectory in twice.trajectories:
        await twice.append(query, trajectory, [make_sample(query, 0, trajectory, reward=9.0)])
    found = {}
    while (response := await twice.claim(samples=2, whole=True)).outcome != EXHAUSTED:
        groups = {item.sample.group_id for item in response.samples}
        assert len(groups) == 1
        rewards = {tuple(item.group_rewards) for item in response.samples}
        assert len(rewards) == 1
        found[groups.pop()] = rewards.pop()
    assert found == {
        "q0/solver@0": (0.0, 1.0),
        "q1/solver@0": (2.0, 3.0),
        "q0/solver": (9.0, 9.0),
        "q1/solver": (9.0, 9.0),
    }


async def test_only_trained_samples_come_back(twice: Stage) -> None:
    for query, trajectory in twice.trajectories:
        rows = [make_sample(query, turn, trajectory, reward=None) for turn in range(2)]
        await twice.append(query, trajectory, rows)
        for turn in range(2):
            sample = f"{query}_{turn}_{trajectory}"
            if sample == "q0_1_q0-s0-t0":
                await twice.fill(sample, drop_reason="reward_timeout: 3 s")
            else:
                await twice.fill(sample, reward=1.0)
    first = await train(twice, 1)
    assert len(first.samples) == 7
    assert await payloads(twice) == 7
    await twice.open(1)
    assert await twice.counts() == {"ready": 7}
    again = await twice.claim(samples=7)
    assert ids_of(again) == ids_of(first)
    assert all(
        len(i.group_rewards) == (3 if "q0" in i.sample.group_id else 4) for i in again.samples
    )


async def test_columns_that_came_late_come_back_too(twice: Stage) -> None:
    column = store_pb.Column(json="[1, 2]")
    for query, trajectory in twice.trajectories:
        row = make_sample(query, 0, trajectory, reward=None)
        await twice.append(query, trajectory, [row])
        await twice.fill(row.sample_id, reward=1.0, columns={"notes": column})
    await train(twice, 1)
    await twice.open(1)
    again = await twice.claim(samples=4)
    assert all(item.sample.columns["notes"] == column for item in again.samples)


async def test_a_skipped_step_gives_nothing_back(twice: Stage) -> None:
    await twice.append_all()
    skipped = store_pb.STEP_OUTCOME_SKIPPED
    await train(twice, 0, outcome=skipped, reason="nan_loss: inf")
    await twice.open(1)
    assert await twice.counts() == {}
    assert await payloads(twice) == 0


async def test_a_repeated_commit_gives_back_once(twice: Stage) -> None:
    await twice.append_all()
    await twice.claim(claim="c1")
    await twice.commit(["c1"])
    assert (await twice.commit(["c1"]))[1]
    await twice.open(1)
    assert (await twice.open(1))[0]
    twice.step = 0
    assert (await twice.commit(["c1"]))[1]
    twice.step = 1
    assert await twice.counts() == {"ready": 4}


async def test_reused_samples_that_are_too_old_are_dropped_as_stale(twice: Stage) -> None:
    await twice.append_all()  # begun by version 0
    await twice.open(1, version=0)
    assert (await twice.claim(oldest=1)).outcome == WAIT
    twice.step = 0
    await train(twice, 1)
    twice.step = 1
    assert await twice.counts() == {"dropped": 4}
    twice.step = 2
    await twice.open(2)


async def test_expired_leases_return_reused_samples(twice: Stage) -> None:
    await twice.append_all()
    first = await train(twice, 1)
    await twice.open(1)
    await twice.claim(claim="lost", samples=4)
    assert await twice.release("") == 4
    for query, trajectory in twice.trajectories:
        await twice.fail(query, trajectory)
    with pytest.raises(FailedPrecondition):
        await twice.commit(["lost"])
    second = await train(twice, 2)
    assert uses_of(second) == dict.fromkeys(ids_of(first), 1)


@pytest.mark.parametrize("uses", [1, 3])
async def test_every_sample_is_used_as_often_as_allowed(store: Store, uses: int) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",), max_uses=uses)
    trained = Counter[str]()
    for step in range(4 + uses):
        if step:
            await stage.open(step)
        for query, trajectory in stage.trajectories:
            if step < 4:
                await stage.append(query, trajectory)
            else:
                await stage.fail(query, trajectory)
        response = await stage.claim(claim=f"c{step}")
        if response.outcome == EXHAUSTED:
            await stage.commit([], outcome=store_pb.STEP_OUTCOME_EMPTY, version=step)
            break
        trained.update(ids_of(response))
        await stage.commit([f"c{step}"], version=step + 1)
    assert len(trained) == 16
    assert set(trained.values()) == {uses}
    assert await payloads(stage) == 0


async def test_dropped_tables_free_samples_that_wait_for_the_next_step(twice: Stage) -> None:
    await twice.append_all()
    await train(twice, 1)
    assert await payloads(twice) == 4
    await twice.store.tables.drop(twice.job)
    assert await payloads(twice) == 0
    keys = await twice.store.database.call("KEYS", f"*{{{twice.job}/solver}}:0:*")
    assert keys == []


def rewards_of(response: Response) -> dict[str, list[float]]:
    return {item.sample.sample_id: list(item.group_rewards) for item in response.samples}


async def rewarded(store: Store, rewards: list[float], **fields: object) -> Stage:
    """A job whose samples may be used three times, and in its step 0 one group of these rewards."""
    stage = await make_stage(
        store,
        new_id("job"),
        policies=("solver",),
        queries=("q0",),
        group_size=len(rewards),
        max_uses=3,
        **fields,  # type: ignore[arg-type]
    )
    for reward, (query, trajectory) in zip(rewards, stage.trajectories, strict=True):
        await stage.append(query, trajectory, [make_sample(query, 0, trajectory, reward=reward)])
    return stage


async def lose(stage: Stage, claim: str, *samples: str) -> None:
    where = (stage.job, "solver", stage.step, "trainer", claim)
    assert await stage.store.claims.drop_gone(*where, samples) == len(samples)


async def next_step(stage: Stage, claim: str) -> Response:
    """Commit the claim, open the next step, end its own trajectories, and claim the returned
    samples."""
    await stage.commit([claim], version=stage.step + 1)
    await stage.open(stage.step + 1)
    for query, trajectory in stage.trajectories:
        await stage.fail(query, trajectory)
    return await stage.claim(claim=f"{claim}+")


async def test_statistics_of_a_group_stay_although_values_of_members_go(store: Store) -> None:
    rewards = [0.1, 0.7, 0.2, 0.4]
    stage = await rewarded(store, rewards)
    first = await stage.claim(claim="c")
    names = ids_of(first)
    assert rewards_of(first) == dict.fromkeys(names, rewards)
    await lose(stage, "c", names[1])
    second = await next_step(stage, "c")
    assert rewards_of(second) == dict.fromkeys([names[0], *names[2:]], rewards)
    await lose(stage, "c+", names[0])
    third = await next_step(stage, "c+")
    assert rewards_of(third) == dict.fromkeys(names[2:], rewards), "two losses, in two steps"
    await stage.commit(["c++"], version=3)
    report = await stage.store.audit.check(stage.job)
    assert list(report.violations) == []
    # The other one had been trained before.
    assert dict(report.policies[0].drop_reasons)["value_gone"] == 1
    await stage.open(3)
    for query, trajectory in stage.trajectories:
        await stage.fail(query, trajectory)
    assert (await stage.claim()).outcome == EXHAUSTED
    assert await payloads(stage) == 0


async def test_a_group_that_lost_its_odd_member_still_has_signal(store: Store) -> None:
    stage = await rewarded(store, [1.0, 0.0, 1.0], drop_without_signal=True)
    names = ids_of(await stage.claim(claim="c"))
    await lose(stage, "c", names[1])
    assert ids_of(await next_step(stage, "c")) == [names[0], names[2]]
