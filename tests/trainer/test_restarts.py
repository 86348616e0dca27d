"""Policies that begin again with their first weights: the next version, without a step."""

from __future__ import annotations

from typing import Any

import pytest

from services.trainer.state.training_state import StateStore
from tests.support.waiting import PATIENCE
from tests.trainer.stage import Trainer, TrainingStage
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, TroupeError, new_id
from troupe.transfer import checksum_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import trainer_pb2 as trainer_pb


def population(stage: TrainingStage) -> JobSpec:
    """One policy that plays both sides, in a population whose best responses begin again."""
    pipeline = {"mode": "sync", "steps": 10, "queries_per_step": 2, "deterministic": True}
    raw = stage.spec(pipeline=pipeline).model_dump(mode="json")
    raw["agents"] = {name: {"policy": "solver"} for name in ("alice", "bob")}
    raw["population"] = {"restart": "base"}
    return JobSpec.model_validate(raw)


async def restart(
    trainer: Trainer, first: common_pb.WeightsRef, left: int, checksum: str = ""
) -> Any:
    request = trainer_pb.RestartRequest(
        request_id=new_id(),
        job_id=first.job_id,
        policy="solver",
        version=left,
        checksum=checksum or first.checksum,
    )
    return (await trainer.stub.Restart(request, timeout=PATIENCE)).weights


def samples(found: list[tuple[str, str, Any]], version: int, step: int) -> list[Any]:
    """Return the same samples, begun by another version in another step."""
    moved = []
    for query, trajectory, own in found:
        name = trajectory.replace("-s0-", f"-s{step}-")
        for one in own:
            one.sample_id = one.sample_id.replace(trajectory, name)
            one.trajectory_id = name
            for span in one.versions:
                span.version = version
        moved.append((query, name, own))
    return moved


async def test_a_policy_that_begins_again_learns_as_a_new_one(stage: TrainingStage) -> None:
    """Weights and optimizer, to the bit; and after a crash, on another worker, the same."""
    spec, trainer = population(stage), await stage.trainer(trainer_keep_states=1)
    model = stage.first_model(spec)
    await stage.open()
    first = await trainer.bind(spec)
    await stage.play(model)
    learned = (await trainer.run(0, 0)).weights
    again = await restart(trainer, first, left=1)
    assert (again.version, again.checksum) == (2, first.checksum)
    assert again.key == f"{first.job_id}/solver/weights@2"
    assert checksum_of(stage.weights(again)) == first.checksum
    assert await restart(trainer, first, left=1) == again, "repeated"
    # The store does not know of it, and its worker dies: its files are still there.
    other = await stage.trainer(worker_id="another")
    assert (await other.bind(spec, version=1, checksum=learned.checksum)).version == 1
    again = await restart(other, first, left=1)
    assert again.checksum == first.checksum
    await stage.store.RestartVersion(
        store_pb.RestartVersionRequest(
            request_id=new_id(), job_id=stage.job_id, steps_done=1, weights=again
        )
    )
    await stage.open(1, version=2)
    for query, trajectory, own in samples(stage.rollouts(model), 2, 1):
        await stage.append(query, trajectory, own, 1)
    assert (await other.run(1, 2)).weights.checksum == learned.checksum
    # The first version is never too old for a new beginning.
    states = StateStore(stage.root / "runs", first.job_id, "solver")
    assert 0 in states.versions()


async def test_a_policy_that_cannot_begin_again_is_refused_with_a_reason(
    stage: TrainingStage,
) -> None:
    spec, trainer = population(stage), await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)

    async def refused(left: int, checksum: str = "") -> TroupeError:
        with pytest.raises(FailedPrecondition) as caught:
            await restart(trainer, first, left, checksum)
        assert caught.value.remedy
        return caught.value

    assert (await refused(left=3)).kind == "not_bound"
    assert (await refused(0, "0" * 32)).kind == "state_not_found"
    # None of its state was taken: it continues from there.
    await stage.play(stage.first_model(spec))
    assert (await trainer.run(0, 0)).weights.version == 1
