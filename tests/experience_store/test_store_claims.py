"""Claims: full micro-batches, waiting, leases, and holders."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from services.experience_store.database import Database
from services.experience_store.records import PolicyKeys
from services.experience_store.store import Store
from tests.support.experience import Response, Stage, ids_of, make_sample, make_stage
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition, NotFound, TroupeError, new_id

CLAIMED = Response.OUTCOME_CLAIMED
WAIT = Response.OUTCOME_WAIT
EXHAUSTED = Response.OUTCOME_EXHAUSTED


@pytest.fixture
async def replica(redis_url: str) -> AsyncIterator[Store]:
    """Yield a second process' store on the same Redis."""
    store = Store(Database(redis_url))
    await store.start()
    yield store
    await store.stop()


def refused(error: pytest.ExceptionInfo[TroupeError], kind: str) -> bool:
    return error.value.kind == kind and error.value.remedy is not None


async def test_a_step_from_append_to_commit(stage: Stage) -> None:
    assert (await stage.claim()).outcome == WAIT
    for query, trajectory in stage.trajectories:
        assert await stage.append(query, trajectory)
    response = await stage.claim(claim="c1")
    assert response.outcome == CLAIMED
    assert ids_of(response) == sorted(f"{q}_1_{t}" for q, t in stage.trajectories)
    assert all(list(claimed.group_rewards) == [1.0, 1.0] for claimed in response.samples)
    assert await stage.counts() == {"claimed": 4}
    assert (await stage.claim()).outcome == EXHAUSTED
    commit, existed = await stage.commit(["c1"])
    assert (commit.num_samples, existed) == (4, False)
    assert await stage.counts() == {"trained": 4}
    assert await stage.counts("checker") == {"ready": 4}


async def test_a_group_is_claimable_only_when_all_its_trajectories_have_ended(
    stage: Stage,
) -> None:
    await stage.append("q1", "q1-s0-t0")
    assert await stage.counts() == {"pending": 1}
    await stage.append("q1", "q1-s0-t1")
    assert await stage.counts() == {"ready": 2}
    # A full micro-batch need not wait for the rest of the step, a smaller one does.
    assert (await stage.claim(samples=3)).outcome == WAIT
    response = await stage.claim(samples=2)
    assert ids_of(response) == ["q1_1_q1-s0-t0", "q1_1_q1-s0-t1"]


async def test_samples_come_in_order_of_their_ids_whatever_the_order_of_arrival(
    stage: Stage,
) -> None:
    for query, trajectory in reversed(stage.trajectories):
        await stage.append(query, trajectory)
    first = ids_of(await stage.claim(samples=3))
    rest = ids_of(await stage.claim(samples=3))
    assert first + rest == sorted(first + rest)
    assert len(rest) == 1, "the last micro-batch of a sealed step is smaller"


async def test_a_claim_larger_than_its_step_gets_what_there_is(stage: Stage) -> None:
    await stage.append_all()
    assert len((await stage.claim(samples=65_536)).samples) == 4


async def test_tokens_bound_a_claim(stage: Stage) -> None:
    for number, (query, trajectory) in enumerate(stage.trajectories):
        tokens = (10, 20, 50, 10)[number]
        await stage.append(query, trajectory, [make_sample(query, 0, trajectory, tokens=tokens)])
    sizes = []
    while (response := await stage.claim(tokens=35)).outcome == CLAIMED:
        sizes.append(len(response.samples))
    # 10 + 20 fit; 50 alone is over the bound, but a claim holds at least one sample.
    assert sizes == [2, 1, 1]
    assert response.outcome == EXHAUSTED


async def test_enough_tokens_are_a_full_micro_batch(stage: Stage) -> None:
    await stage.append("q0", "q0-s0-t0", [make_sample("q0", 0, "q0-s0-t0", tokens=30)])
    await stage.append("q0", "q0-s0-t1", [make_sample("q0", 0, "q0-s0-t1", tokens=30)])
    assert (await stage.claim(tokens=61)).outcome == WAIT
    assert len((await stage.claim(tokens=60)).samples) == 2


async def test_a_repeated_claim_returns_the_same_samples(stage: Stage) -> None:
    await stage.append_all()
    first = await stage.claim(claim="c1", samples=2)
    second = await stage.claim(claim="c2", samples=2)
    assert await stage.claim(claim="c1", samples=2) == first
    assert set(ids_of(first)).isdisjoint(ids_of(second))
    with pytest.raises(FailedPrecondition) as error:
        await stage.claim("somebody else", claim="c1")
    assert refused(error, "claim_lost")


async def test_a_claim_waits_for_samples_that_others_hold(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim("one", samples=3)
    assert (await stage.claim("two", claim="c2")).outcome == CLAIMED
    assert (await stage.claim("two")).outcome == WAIT
    assert (await stage.claim("one")).outcome == WAIT
    assert await stage.release("one") == 3
    assert (await stage.claim("two", claim="c3")).outcome == CLAIMED
    assert (await stage.claim("two")).outcome == EXHAUSTED


async def test_a_waiting_claim_is_woken_by_the_last_trajectory(stage: Stage) -> None:
    *most, (query, trajectory) = stage.trajectories
    for early in most:
        await stage.append(*early)
    waiting = asyncio.create_task(stage.claim(wait=PATIENCE))
    await stage.until_waiting()
    assert not waiting.done()
    await stage.append(query, trajectory)
    response = await asyncio.wait_for(waiting, PATIENCE)
    assert len(response.samples) == 4


async def test_a_waiting_claim_is_woken_by_another_replica(stage: Stage, replica: Store) -> None:
    waiting = asyncio.create_task(stage.claim(wait=PATIENCE))
    await stage.until_waiting()
    other = Stage(replica, stage.job, stage.policies, stage.queries, stage.group_size)
    await other.append_all()
    assert len((await asyncio.wait_for(waiting, PATIENCE)).samples) == 4


async def test_a_waiting_claim_hears_its_own_process_without_pubsub(redis_url: str) -> None:
    store = Store(Database(redis_url))  # never started: it hears nothing from Redis
    stage = await make_stage(store, new_id("job"))
    waiting = asyncio.create_task(stage.claim(wait=PATIENCE))
    await stage.until_waiting()
    await stage.append_all()
    assert len((await asyncio.wait_for(waiting, PATIENCE)).samples) == 4
    await store.stop()


async def test_a_waiting_claim_is_woken_when_a_lease_runs_out(stage: Stage) -> None:
    await stage.append_all()
    assert len((await stage.claim("zombie", lease=0.2)).samples) == 4
    # Within less than the wait: a claim that was not woken would return nothing.
    response = await stage.claim("trainer", wait=PATIENCE)
    assert len(response.samples) == 4


async def test_a_wait_ends_by_its_deadline_without_asking_again(stage: Stage) -> None:
    asked = Counter[str]()
    original = stage.store.database.run_each

    async def counting(calls):  # type: ignore[no-untyped-def]
        asked.update(call.script for call in calls)
        return await original(calls)

    stage.store.database.run_each = counting  # type: ignore[method-assign]
    assert (await stage.claim(wait=0.5)).outcome == WAIT
    assert asked["claim"] <= 2, "once, and once more at the deadline"


async def test_a_stopping_store_answers_waiting_claims(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.claim(wait=PATIENCE))
    await stage.until_waiting()
    await stage.store.notices.stop()
    assert (await asyncio.wait_for(waiting, PATIENCE)).outcome == WAIT


async def test_an_expired_claim_is_lost_and_its_claimant_begins_again(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim("slow", claim="c1", lease=0.01)
    await stage.until({"ready": 4})
    for call in (stage.claim("slow", claim="c1"), stage.claim("slow"), stage.renew("slow")):
        with pytest.raises(FailedPrecondition) as error:
            await call
        assert refused(error, "claim_lost")
    with pytest.raises(FailedPrecondition) as error:
        await stage.commit(["c1"], "slow")
    assert refused(error, "claim_lost")
    assert await stage.release("slow") == 0
    assert len((await stage.claim("slow", claim="c2")).samples) == 4
    assert not (await stage.commit(["c2"], "slow"))[1]


@pytest.mark.parametrize("hours", [1, -1, 24 * 365])
async def test_a_jump_of_the_wall_clock_neither_ends_leases_nor_prolongs_them(
    stage: Stage, hours: int
) -> None:
    await stage.append_all()
    await stage.claim("living", claim="c1", samples=2, lease=60)
    await stage.claim("dead", claim="c2", samples=2, lease=0.5)
    # As if the last script had run this long ago, or in the future.
    step = PolicyKeys(stage.job, stage.policies[0]).step(stage.step, "step")
    await stage.store.database.call("HINCRBY", step, "wall", -hours * 3_600_000)
    assert await stage.renew("living", lease=60) == 1
    await stage.until({"ready": 2, "claimed": 2})
    assert len((await stage.claim("living", claim="c3")).samples) == 2
    assert not (await stage.commit(["c1", "c3"], "living"))[1]


@pytest.mark.slow
async def test_renewed_leases_outlive_their_first_expiry(stage: Stage) -> None:
    await stage.append_all()
    for lease in (3, 30):
        await stage.claim("early", claim=f"early {lease}", samples=2, lease=lease)
        await stage.claim("late", claim=f"late {lease}", samples=1, lease=lease)
        with contextlib.suppress(FailedPrecondition):  # the machine was busy for longer than that
            assert await stage.renew("early", lease=600) == 1
            break
    # The lease without renewal ends later than the other one would have ended.
    await stage.until({"ready": 2, "claimed": 2})


async def test_a_superseded_claimant_is_refused_once_somebody_took_over(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim("zombie", claim="old")
    assert await stage.release("") == 4
    assert (await stage.claim("heir", claim="new")).outcome == CLAIMED
    for call in (
        stage.claim("zombie"),
        stage.renew("zombie"),
        stage.commit(["old"], "zombie"),
        stage.commit(["new"], "zombie"),
    ):
        with pytest.raises(FailedPrecondition) as error:
            await call
        assert refused(error, "claim_lost")
    await stage.commit(["new"], "heir")


async def test_a_claimant_that_supersedes_everybody_may_itself_go_on(stage: Stage) -> None:
    await stage.append_all()
    await stage.claim("trainer", claim="before")
    await stage.release("")
    response = await stage.claim("trainer", claim="after")
    assert len(response.samples) == 4
    await stage.commit(["after"])


async def test_an_empty_step_is_exhausted_at_once(stage: Stage) -> None:
    for query, trajectory in stage.trajectories:
        await stage.fail(query, trajectory)
    assert (await stage.claim()).outcome == EXHAUSTED


async def test_unknown_steps_and_policies_are_named(stage: Stage) -> None:
    with pytest.raises(NotFound) as missing:
        await stage.claim(policy="nobody")
    assert "checker, solver" in str(missing.value)
    stage.step = 7
    with pytest.raises(FailedPrecondition) as error:
        await stage.claim()
    assert refused(error, "step_not_open")


async def test_many_claimants_never_share_a_sample(store: Store) -> None:
    queries = tuple(f"q{number}" for number in range(12))
    stage = await make_stage(
        store, new_id("job"), policies=("solver",), queries=queries, group_size=4
    )

    async def train(claimant: str) -> list[str]:
        seen: list[str] = []
        while True:
            response = await stage.claim(claimant, samples=5, wait=0.5)
            if response.outcome == CLAIMED:
                seen += ids_of(response)
            elif (await stage.counts()) == {"claimed": 48}:
                return seen

    async def roll_out(part: int) -> None:
        for query, trajectory in stage.trajectories[part::3]:
            await stage.append(query, trajectory)

    results = await asyncio.gather(
        *(roll_out(part) for part in range(3)), *(train(f"t{number}") for number in range(6))
    )
    claimed = [sample for seen in results[3:] for sample in seen or []]
    assert len(claimed) == len(set(claimed)) == 48


async def test_rewards_of_a_group_are_the_same_however_much_of_it_is_given_out(
    store: Store,
) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",), group_size=5)
    rewards = [0.1, 0.7, -0.3, 1e-9, 3.0]
    names = [name for query, name in stage.trajectories if query == "q0"]
    for name, reward in zip(names, rewards, strict=True):
        await stage.append("q0", name, [make_sample("q0", 0, name, reward=reward)])
    # The group is requested alone, with its query, or in the claim.
    for number in (1, 3, 5):
        claimed = await stage.claim(samples=number)
        assert [list(one.group_rewards) for one in claimed.samples] == [rewards] * number
        await stage.release("trainer")
