"""Sums of joint pairs, which the trainers of several policies exchange: one set of sums for all."""

from __future__ import annotations

import asyncio
import math

import pytest

from services.experience_store.claims import added_up
from services.experience_store.store import Store
from tests.support.experience import Stage
from tests.support.experience_client import Client
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import experience_store_pb2 as store_pb


def sums_of(*pairs: tuple[str, float]) -> store_pb.PairSums:
    """Return one policy's sums of pairs of two policies."""
    return store_pb.PairSums(
        pairs=[
            store_pb.PairSum(
                pair=pair,
                chosen=value,
                rejected=-value,
                chosen_tokens=3,
                rejected_tokens=4,
                policies=1,
                joint_policies=2,
            )
            for pair, value in pairs
        ]
    )


async def give(
    stage: Stage,
    policy: str,
    sums: store_pb.PairSums | None,
    *,
    claimant: str = "trainer",
    wait: float = 0.0,
) -> store_pb.ExchangePairSumsResponse:
    request = store_pb.ExchangePairSumsRequest(
        request_id=new_id(),
        job_id=stage.job,
        policy=policy,
        step=stage.step,
        claimant=claimant,
        sums=sums,
    )
    return await stage.store.pairs.exchange(request, wait)


async def given(stage: Stage) -> dict[str, bool]:
    status = await stage.store.steps.status(stage.job, stage.step)
    return {counts.policy: counts.pair_sums for counts in status.counts}


async def bytes_of(stage: Stage) -> int:
    return sum((await stage.store.high_water.of_job(stage.job)).values())


async def test_every_policy_gets_the_sums_once_all_have_given_theirs(stage: Stage) -> None:
    first, second = stage.policies
    assert await given(stage) == {first: False, second: False}
    alone = await give(stage, first, sums_of(("a", 1.5), ("b", 0.25)))
    assert list(alone.missing) == [second]
    assert not alone.HasField("sums")
    assert await given(stage) == {first: True, second: False}
    waiting = asyncio.create_task(give(stage, first, sums_of(("a", 1.5), ("b", 0.25)), wait=60))
    await stage.until_waiting()
    other = await give(stage, second, sums_of(("b", 4.0), ("c", 8.0)))
    found = await waiting
    assert found == other
    assert not found.missing
    assert [(one.pair, one.chosen, one.policies) for one in found.sums.pairs] == [
        ("a", 1.5, 1),
        ("b", 4.25, 2),
        ("c", 8.0, 1),
    ]
    whole = found.sums.pairs[1]
    assert (whole.rejected, whole.chosen_tokens, whole.rejected_tokens) == (-4.25, 6, 8)


async def test_a_trainer_that_begins_the_step_again_gets_the_sums_that_others_have_read(
    stage: Stage,
) -> None:
    first, second = stage.policies
    await give(stage, first, sums_of(("a", 1.0)))
    before = await give(stage, second, sums_of(("a", 2.0)))
    # By rounding it may compute others.
    again = await give(stage, first, sums_of(("a", 1.0 + 1e-9)), claimant="other")
    assert again == before


async def test_a_policy_that_has_given_its_sums_waits_without_them(stage: Stage) -> None:
    first, second = stage.policies
    # Whoever has given none yet is named, too: it has to.
    assert list((await give(stage, first, None)).missing) == [first, second]
    assert await given(stage) == {first: False, second: False}
    await give(stage, first, sums_of(("a", 1.0)))
    waiting = asyncio.create_task(give(stage, first, None, wait=PATIENCE))
    await stage.until_waiting()
    other = await give(stage, second, sums_of(("a", 2.0)))
    assert await waiting == other
    assert [one.chosen for one in other.sums.pairs] == [3.0]


async def test_policies_without_pairs_are_waited_for_too(stage: Stage) -> None:
    first, second = stage.policies
    assert (await give(stage, first, sums_of(("a", 1.0)))).missing
    found = await give(stage, second, store_pb.PairSums())
    assert [one.policies for one in found.sums.pairs] == [1]


async def test_a_claimant_that_was_superseded_gives_nothing(stage: Stage) -> None:
    await stage.append_all()
    first = stage.policies[0]
    await stage.claim("zombie", policy=first)
    await stage.store.claims.release(stage.job, first, stage.step, "")
    await stage.claim("trainer", policy=first)
    with pytest.raises(FailedPrecondition) as refused:
        await give(stage, first, sums_of(("a", 1.0)), claimant="zombie")
    assert refused.value.kind == "claim_lost"
    assert not (await given(stage))[first]


async def test_sums_stay_until_every_policy_has_committed_and_are_then_freed(
    stage: Stage, store: Store
) -> None:
    await stage.append_all()
    first, second = stage.policies
    before = await bytes_of(stage)
    mine = sums_of(("a", 1.0))
    await give(stage, first, mine)
    assert await bytes_of(stage) == before + mine.ByteSize()
    expected = await give(stage, second, mine)
    claimed = await stage.claim(policy=first)
    await stage.commit([claimed.claim_id], policy=first, version=1)
    await store.sweeper.sweep()
    assert await give(stage, second, mine) == expected
    with pytest.raises(FailedPrecondition) as over:
        await give(stage, first, mine)
    assert (over.value.kind, "committed" in over.value.message) == ("claim_lost", True)
    claimed = await stage.claim(policy=second)
    await stage.commit([claimed.claim_id], policy=second, version=1)
    await store.sweeper.sweep()
    assert await bytes_of(stage) == 0
    assert await given(stage) == {first: True, second: True}


async def test_sums_are_freed_with_their_tables(stage: Stage, store: Store) -> None:
    await give(stage, stage.policies[0], sums_of(("a", 1.0)))
    await store.tables.drop(stage.job)
    left = await store.database.call("KEYS", f"*{stage.job}*pair_sums*")
    assert left == []


async def test_watchers_learn_that_a_policy_has_given_its_sums(stage: Stage) -> None:
    async def watch() -> set[str]:
        async for status in stage.store.watching.watch(stage.job):
            if given := {one.policy for one in status.counts if one.pair_sums}:
                return given
        raise AssertionError("the stream ended")

    watching = asyncio.create_task(watch())
    await stage.until_waiting()
    await give(stage, stage.policies[0], sums_of(("a", 1.0)))
    async with asyncio.timeout(PATIENCE):
        assert await watching == {stage.policies[0]}


def test_sums_are_added_in_the_order_of_policies_bit_for_bit() -> None:
    parts = [sums_of(("a", value)).SerializeToString() for value in (1e16, 1.0, -1e16)]
    assert added_up(parts).pairs[0].chosen == (1e16 + 1.0) - 1e16
    broken = added_up([parts[0], sums_of(("a", math.nan)).SerializeToString()])
    assert math.isnan(broken.pairs[0].chosen)


@pytest.mark.parametrize(
    ("sums", "field"),
    [
        (sums_of(("", 1.0)), "sums.pairs[0].pair"),
        (sums_of(("a", 1.0), ("a", 2.0)), "sums.pairs[1].pair"),
        (
            store_pb.PairSums(
                pairs=[store_pb.PairSum(pair="a", policies=1, joint_policies=1, chosen_tokens=-1)]
            ),
            "sums.pairs[0].chosen_tokens",
        ),
        (
            store_pb.PairSums(pairs=[store_pb.PairSum(pair="a", policies=2, joint_policies=1)]),
            "sums.pairs[0].policies",
        ),
    ],
)
async def test_sums_that_are_no_pairs_are_refused(
    client: Client, sums: store_pb.PairSums, field: str
) -> None:
    request = store_pb.ExchangePairSumsRequest(
        request_id=new_id(), job_id="job", policy="solver", step=0, claimant="trainer", sums=sums
    )
    with pytest.raises(InvalidArgument) as refused:
        await client.stub.ExchangePairSums(request)
    assert refused.value.field == field
