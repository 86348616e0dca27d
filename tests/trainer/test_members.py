"""Frozen versions: kept bit for bit, published on request, deleted when no longer needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from services.trainer.frozen_versions import _key
from tests.support.waiting import PATIENCE
from tests.trainer.stage import Trainer, TrainingStage
from troupe.rpc import DataLoss, FailedPrecondition, InvalidArgument, NotFound, new_id
from troupe.transfer import checksum_of
from troupe.transfer.blob import stem_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb


def of(kind: Any, ref: common_pb.WeightsRef, **more: Any) -> Any:
    named = {"job_id": ref.job_id, "policy": ref.policy, "version": ref.version}
    return kind(request_id=new_id(), **named, **more)


async def keep(trainer: Trainer, ref: common_pb.WeightsRef) -> Path:
    request = of(trainer_pb.KeepMemberRequest, ref, checksum=ref.checksum)
    kept = await trainer.stub.KeepMember(request, timeout=PATIENCE)
    assert kept.num_bytes > ref.num_bytes
    return Path(kept.path)


async def publish(trainer: Trainer, ref: common_pb.WeightsRef) -> common_pb.WeightsRef:
    request = of(trainer_pb.PublishMemberRequest, ref, checksum=ref.checksum)
    published: common_pb.WeightsRef = (
        await trainer.stub.PublishMember(request, timeout=PATIENCE)
    ).weights
    return published


async def test_a_member_outlives_its_version(stage: TrainingStage) -> None:
    spec, trainer = stage.spec(), await stage.trainer()
    await stage.open()
    first = await trainer.bind(spec)
    path = await keep(trainer, first)
    assert await keep(trainer, first) == path
    # It can be loaded, and has one file of weights.
    assert AutoModelForCausalLM.from_pretrained(path).config.model_type == "qwen3"
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    await trainer.release()
    other = await stage.trainer(worker_id="another")
    ref = await publish(other, first)
    assert ref.key == f"{first.job_id}/solver/members/0@0"
    # No member is a newer version of another, whose place it would take on other hosts.
    stems = {stem_of(_key("job", "solver", version)) for version in range(3)}
    assert len(stems) == 3
    assert checksum_of(stage.weights(ref)) == ref.checksum == first.checksum
    assert ref.num_bytes == first.num_bytes
    # Out of memory, but not gone.
    await other.stub.DropMember(of(trainer_pb.DropMemberRequest, ref), timeout=PATIENCE)
    await publish(other, first)
    request = of(trainer_pb.DropMemberRequest, ref, files=True)
    await other.stub.DropMember(request, timeout=PATIENCE)
    with pytest.raises(NotFound) as caught:
        await publish(other, first)
    assert (caught.value.kind, caught.value.value) == ("member_gone", "solver@0")
    assert not path.exists()


async def test_names_of_members_lead_to_no_other_directory(stage: TrainingStage) -> None:
    stub = (await stage.trainer()).stub
    for job, policy in (("job", "../../other"), ("..", "solver"), ("a/b", "solver")):
        drop = trainer_pb.DropMemberRequest(job_id=job, policy=policy, files=True)
        with pytest.raises(InvalidArgument):
            await stub.DropMember(drop, timeout=PATIENCE)
        publish = trainer_pb.PublishMemberRequest(job_id=job, policy=policy, checksum="a")
        with pytest.raises(InvalidArgument):
            await stub.PublishMember(publish, timeout=PATIENCE)


async def test_a_member_whose_bytes_changed_is_not_published(stage: TrainingStage) -> None:
    trainer = await stage.trainer()
    await stage.open()
    first = await trainer.bind(stage.spec())
    path = await keep(trainer, first)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DataLoss) as caught:
        await publish(trainer, first)
    assert caught.value.kind == "member_corrupt"
    shutil.rmtree(path)
    with pytest.raises(FailedPrecondition) as refused:
        await keep(
            trainer,
            common_pb.WeightsRef(
                job_id=first.job_id, policy="solver", version=3, checksum="0" * 32
            ),
        )
    assert refused.value.kind == "version_not_kept"


async def test_tied_and_adapted_weights_are_kept_exactly(stage: TrainingStage) -> None:
    trainer = await stage.trainer()
    await stage.open()
    spec = stage.spec()
    adapted = spec.model_dump(mode="json")
    adapted["policies"]["solver"]["lora"] = {"rank": 2}
    first = await trainer.bind(type(spec).model_validate(adapted))
    path = await keep(trainer, first)
    assert (path / "adapter_config.json").is_file()
    ref = await publish(trainer, first)
    assert checksum_of(stage.weights(ref)) == first.checksum
