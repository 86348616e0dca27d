"""Versions carry a proof that the trainer's devices have computed, up to the server that serves
them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.rollout.engines.servers.verification import LocalProofs
from services.rollout.engines.weights import load_config
from services.trainer.learning.learner import Learner
from tests.support.fake_sglang import FakeSglang, serve
from tests.trainer.stage import TrainingStage
from tests.trainer.test_sending import engine_of, trained, url
from troupe.checkpoints.adapters import base_key
from troupe.checkpoints.proof import Proof, proof_in
from troupe.job import JobSpec


def served_by(spec: JobSpec, kind: str, **policy: Any) -> JobSpec:
    values = spec.model_dump(mode="json")
    values["policies"]["solver"]["engine"]["kind"] = kind
    values["policies"]["solver"] |= policy
    return JobSpec.model_validate(values)


@pytest.fixture
async def fake(stage: TrainingStage) -> AsyncIterator[FakeSglang]:
    """The double of a server, which also takes adapters."""
    model = stage.spec().policies["solver"].language_model
    fake = FakeSglang(load_config(model, "solver").to_dict())
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}
    async with serve(fake):
        yield fake


@pytest.fixture
def no_local_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def of(*_: Any) -> Proof:
        raise AssertionError("the version came with its proof")

    monkeypatch.setattr(LocalProofs, "of", of)


@pytest.mark.usefixtures("no_local_proofs")
async def test_servers_are_verified_by_the_trainers_results(
    stage: TrainingStage, fake: FakeSglang
) -> None:
    """At the start, after a step, and after the worker was lost with what it had published."""
    spec, trainer = served_by(stage.spec(), "sglang"), await stage.trainer()
    async with engine_of(spec, urls=[url(fake)], update="disk", max_context=64) as engine:
        first = await trainer.bind(spec)
        await engine.update_weights(first, stage.transfer)
        second = await trained(stage, trainer, spec, 0)
        await engine.update_weights(second, stage.transfer)
        assert (engine.version, engine.checksum) == (1, second.checksum)
        assert first.proof.logprobs != second.proof.logprobs
        assert len(second.proof.ids) == len(second.proof.logprobs) + 1
        stage.transfer.delete(second.key)
        again = await (await stage.trainer()).bind(spec, version=1, checksum=second.checksum)
        assert again.proof.logprobs == second.proof.logprobs
        await engine.update_weights(again, stage.transfer)


async def test_embedded_engines_need_no_proof(
    stage: TrainingStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Learner, "proof")
    trainer, spec = await stage.trainer(), stage.spec()
    assert not (await trainer.bind(spec)).HasField("proof")
    assert not (await trained(stage, trainer, spec, 0)).HasField("proof")


async def test_a_base_is_published_with_its_proof(stage: TrainingStage) -> None:
    spec = served_by(stage.spec(), "sglang", lora={"rank": 4, "alpha": 8})
    ref = await (await stage.trainer()).bind(spec)
    assert ref.HasField("proof")
    keys = [key for key in stage.transfer.keys("") if "/base." in key]
    assert keys == [base_key(stage.job_id, keys[0].split("base.")[1].split("/")[0])]
    base = proof_in(stage.transfer.manifest(keys[0]).metadata)
    # B is zero: the first version computes the same as its base.
    assert base is not None
    assert base.logprobs == pytest.approx(ref.proof.logprobs)
