"""Leases as the trainer sees them, against the real store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.trainer.claims import StepClaims, is_lost
from tests.support.waiting import PATIENCE
from tests.trainer.stage import TrainingStage
from troupe.rpc import FailedPrecondition, TroupeError, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb


async def _claimed(stage: TrainingStage) -> StepClaims:
    await stage.open()
    await stage.play(stage.first_model(stage.spec()))
    claims = StepClaims(stage.store, stage.job_id, "solver", 0, new_id("worker"), PATIENCE)
    answer = await claims.claim({"max_samples": 64}, 5)
    assert answer.outcome == store_pb.ClaimMicroBatchResponse.OUTCOME_CLAIMED
    return claims


async def test_a_renewal_after_its_own_commit_is_not_a_lost_lease(stage: TrainingStage) -> None:
    # A renewal that was sent while the commit was under way: there is nothing left to renew.
    claims = await _claimed(stage)
    await stage.bound(common_pb.WeightsRef(job_id=stage.job_id, policy="solver"))
    weights = common_pb.WeightsRef(job_id=stage.job_id, policy="solver", version=1)
    await claims.commit(store_pb.STEP_OUTCOME_APPLIED, "", weights, {})
    await claims.renew()


async def test_the_store_refuses_samples_that_it_did_not_hand_out(stage: TrainingStage) -> None:
    claims = await _claimed(stage)
    weights = common_pb.WeightsRef(job_id=stage.job_id, policy="solver", version=1)
    with pytest.raises(FailedPrecondition) as refused:
        await claims.commit(store_pb.STEP_OUTCOME_APPLIED, "", weights, {}, 12345)
    assert refused.value.kind == "digest_mismatch"


async def test_renewing_a_claim_that_was_taken_over_reports_it(stage: TrainingStage) -> None:
    claims = await _claimed(stage)
    other = StepClaims(stage.store, stage.job_id, "solver", 0, new_id("worker"), PATIENCE)
    await other.supersede()
    with pytest.raises(TroupeError) as lost:
        await claims.renew()
    assert is_lost(lost.value)


class Asked:
    """A stub of the store that notes which of its calls to exchange sums had some."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.gave: list[bool] = []

    async def ExchangePairSums(
        self, request: store_pb.ExchangePairSumsRequest, timeout: float
    ) -> store_pb.ExchangePairSumsResponse:
        self.gave.append(request.HasField("sums"))
        answer: store_pb.ExchangePairSumsResponse
        answer = await self._store.ExchangePairSums(request, timeout=timeout)
        return answer


async def test_sums_of_joint_pairs_are_sent_once_however_long_the_other_policies_take(
    stage: TrainingStage,
) -> None:
    await stage.open(policies=("checker", "solver"))
    asked = Asked(stage.store)
    solver = StepClaims(asked, stage.job_id, "solver", 0, new_id("worker"), PATIENCE)
    checker = StepClaims(stage.store, stage.job_id, "checker", 0, new_id("worker"), PATIENCE)
    missing: list[list[str]] = []
    late = asyncio.Event()

    def note(policies: Any) -> None:
        missing.append(list(policies))
        if len(missing) == 3:
            late.set()

    # A policy without pairs gives an empty message.
    waiting = asyncio.create_task(solver.exchange(store_pb.PairSums(), 0.05, note))
    async with asyncio.timeout(PATIENCE):
        await late.wait()
        pair = store_pb.PairSum(pair="q\tg", chosen=1.0, policies=1, joint_policies=1)
        mine = store_pb.PairSums(pairs=[pair])
        assert await checker.exchange(mine, 5.0, lambda _: None) == mine
        assert await waiting == mine
    assert asked.gave == [True, *[False] * (len(missing) - 1)]
    assert missing == [*[["checker"]] * (len(missing) - 1), []]
