"""A server is verified by the proof that came with its version, and by one of its own else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engines.errors import UpdateFailed
from services.rollout.engines.servers.verification import LocalProofs
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.models import CONFIG, make_model, policy_spec, publish, transfer_in
from tests.rollout.engines.trained_adapters import LAYERS, TrainedAdapter, lora_spec
from tests.support.fake_sglang import FakeSglang, serve
from troupe.checkpoints.adapters import AdapterContent, adapted, base_key, distinct_tensors
from troupe.checkpoints.format import CheckpointFormat
from troupe.checkpoints.proof import Proof, Prover, metadata_of
from troupe.transfer import DeferredTensors, Transfer
from troupe.v1 import common_pb2 as common_pb


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    fake = FakeSglang(CONFIG)
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
    async with serve(fake):
        yield fake


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checksums of the weights by which a proof was computed in this process."""
    found: list[str] = []
    own = LocalProofs.of

    async def of(self: LocalProofs, published: Any, checksum: str, adapter: Any) -> Proof:
        found.append(checksum)
        return await own(self, published, checksum, adapter)

    monkeypatch.setattr(LocalProofs, "of", of)
    return found


async def engine_of(fake: FakeSglang, *, lora: bool = False) -> SglangEngine:
    make = lora_spec if lora else policy_spec
    spec = make(kind="sglang", urls=[f"http://127.0.0.1:{fake.server.port}"], max_context=48)
    engine = SglangEngine("e0", "solver", spec)
    await engine.start()
    return engine


def rounded(model: Any) -> DeferredTensors:
    return CheckpointFormat(model, torch.float32).rounded(distinct_tensors(model))


def proven(transfer: Transfer, seed: int, version: int, proof_of: int) -> common_pb.WeightsRef:
    """The weights of `seed`, with the proof of another seed's weights."""
    model = make_model(proof_of)
    ref = publish(transfer, make_model(seed), version)
    ref.proof.CopyFrom(Prover(model.config).prove(rounded(model), ()).to_message())
    return ref


async def test_the_proof_of_a_version_is_read_and_not_computed(
    fake: FakeSglang, transfer: Transfer, computed: list[str]
) -> None:
    """Longer than the server's context: as much of it as fits is asked for."""
    engine = await engine_of(fake)
    for version in range(2):
        ref = proven(transfer, version, version, proof_of=version)
        assert len(ref.proof.ids) > 48
        await engine.update_weights(ref, transfer)
        assert engine.version == version
    with pytest.raises(UpdateFailed, match=r"differ by .* on average"):
        await engine.update_weights(proven(transfer, 5, 2, proof_of=6), transfer)
    assert not computed
    await engine.stop()


async def test_a_version_without_a_proof_gets_one_here(
    fake: FakeSglang, transfer: Transfer, computed: list[str]
) -> None:
    engine = await engine_of(fake)
    first = publish(transfer, make_model(1), 0)
    await engine.update_weights(first, transfer)
    fake.faults.ignore_weights = True
    second = publish(transfer, make_model(2), 1)
    with pytest.raises(UpdateFailed, match=r"did not change|differ by .* on average"):
        await engine.update_weights(second, transfer)
    assert computed == [first.checksum, second.checksum]
    await engine.stop()


@pytest.mark.parametrize("came", [True, False])
async def test_adapters_and_their_base_are_verified_by_their_own_proofs(
    fake: FakeSglang, transfer: Transfer, computed: list[str], came: bool
) -> None:
    """A base's proof is in its manifest, since no version names it."""
    engine, trained = await engine_of(fake, lora=True), TrainedAdapter(1)
    prover = Prover(trained.base.config)
    base = rounded(trained.base)
    for version in range(2):
        ref = trained.publish(transfer, version)
        content = AdapterContent.of(transfer.get(ref.key)[0])
        if came:
            named = dict(trained.base.named_parameters())
            proof = prover.prove(base, (), what="base")
            transfer.set(base_key("job", content.base), named, metadata=metadata_of(proof))
            ref.proof.CopyFrom(prover.prove(adapted(base, content), ()).to_message())
        await engine.update_weights(ref, transfer)
        assert engine.version == version
        assert computed == ([] if came else [content.base, ref.checksum])
        if not came:
            break
        trained.step(10)
    wrong = trained.publish(transfer, 5)
    wrong.proof.CopyFrom(prover.prove(base, (), what="base").to_message())
    with pytest.raises(UpdateFailed, match=r"differ by .* on average"):
        await engine.update_weights(wrong, transfer)
    await engine.stop()
