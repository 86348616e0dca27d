"""Leases as the trainer sees them, against the real store."""

from __future__ import annotations

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
