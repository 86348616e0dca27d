"""New weights in the embedded engine: verified, at once, and never half of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStale, UpdateFailed, WeightsRefused
from services.rollout.engines.weights import adopt, fill
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    make_model,
    publish,
    reference_logprobs,
)
from tests.support.waiting import until
from troupe.transfer import Transfer
from troupe.transfer.errors import Corrupt, KeyNotFound
from troupe.v1 import common_pb2 as common_pb


async def test_weights_change_under_running_turns(
    engine: EmbeddedEngine, model: PreTrainedModel, transfer: Transfer
) -> None:
    models = [model, make_model(1), make_model(2)]
    rng = random.Random(6)
    prompts = [prompt(rng, 3, 40) for _ in range(30)]
    tasks = [
        asyncio.ensure_future(ask(engine, f"r{i}", p, max_new_tokens=60, seed=i))
        for i, p in enumerate(prompts)
    ]
    for version in (1, 2):
        before = engine.load().generated_tokens
        await until(lambda: engine.load().generated_tokens >= before + 300)  # noqa: B023
        exposed = await engine.update_weights(publish(transfer, models[version], version), transfer)
        assert 0 < exposed < 5
        assert engine.version == version
    mixed = 0
    for p, answer in zip(prompts, await asyncio.gather(*tasks), strict=True):
        assert len(answer.token_ids) == 60
        assert answer.versions[0].start == 0
        assert answer.versions[-1].end == 60
        mixed += len(answer.versions) > 1
        # Keys and values are computed anew: each token is drawn by its version alone.
        for span in answer.versions:
            expected = reference_logprobs(models[span.version], p, answer.token_ids)
            got = answer.logprobs[span.start : span.end]
            assert got == pytest.approx(expected[span.start : span.end], abs=2e-4)
    assert mixed > 10


async def test_a_prefix_cached_under_old_weights_is_forgotten(
    engine: EmbeddedEngine, transfer: Transfer
) -> None:
    ids = prompt(random.Random(7), 60, 90)
    await ask(engine, "warm", ids)
    changed = make_model(9)
    await engine.update_weights(publish(transfer, changed, 1), transfer)
    answer = await ask(engine, "r", ids)
    assert answer.cached_tokens == 0
    expected = reference_logprobs(changed, ids, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)


async def test_an_update_is_idempotent_and_a_version_has_one_content(
    engine: EmbeddedEngine, model: PreTrainedModel, transfer: Transfer
) -> None:
    ref = publish(transfer, model, 0)
    assert engine.checksum == ref.checksum
    assert await engine.update_weights(ref, transfer) == 0.0
    with pytest.raises(WeightsRefused, match="new version"):
        await engine.update_weights(publish(transfer, make_model(1), 0), transfer)
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY


async def test_weights_that_do_not_fit_change_nothing(
    engine: EmbeddedEngine, model: PreTrainedModel, transfer: Transfer
) -> None:
    state = dict(model.state_dict())
    name = "model.norm.weight"

    def ref(tensors: dict[str, torch.Tensor], version: int) -> common_pb.WeightsRef:
        key = f"job/solver/weights@{version}"
        checksum = transfer.set(key, tensors).checksum
        return common_pb.WeightsRef(version=version, key=key, checksum=checksum)

    cases = {
        "no such tensor": {**state, "extra": torch.zeros(1)},
        "the model wants": {**state, name: torch.zeros(7)},
        "torch.bfloat16": {**state, name: state[name].bfloat16()},
        "not published": {k: v for k, v in state.items() if k != name},
    }
    for version, (message, tensors) in enumerate(cases.items(), start=1):
        with pytest.raises(WeightsRefused, match=message):
            await engine.update_weights(ref(tensors, version), transfer)
    wrong = ref(state, 9)
    wrong.checksum = "0" * 32
    with pytest.raises(Corrupt):
        await engine.update_weights(wrong, transfer)
    with pytest.raises(KeyNotFound):
        await engine.update_weights(common_pb.WeightsRef(version=9, key="job/none@9"), transfer)
    assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 0)
    assert len((await ask(engine, "r", [1])).token_ids) == 8
    # A tied output layer may be published under either name, or under both.
    untied = {k: v for k, v in state.items() if k != "lm_head.weight"}
    await engine.update_weights(ref(untied, 10), transfer)
    assert engine.version == 10


async def test_weights_with_another_checksum_are_never_served(
    engine: EmbeddedEngine, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publish(transfer, make_model(1), 1)
    # Bytes that changed after the host verified them.
    tensors, manifest = transfer.get(ref.key)
    next(iter(tensors.values())).view(-1)[0] += 1
    task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=50))
    with monkeypatch.context() as changed:
        changed.setattr(transfer, "get", lambda *_, **__: (tensors, manifest))
        with pytest.raises(WeightsRefused, match="has checksum"):
            await engine.update_weights(ref, transfer)
    # Nor two contents for one tensor of the model.
    weights = dict(make_model(2).state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    made = transfer.set("job/solver/weights@2", weights)
    tied = common_pb.WeightsRef(version=2, key=made.key, checksum=made.checksum)
    with pytest.raises(WeightsRefused, match="one tensor"):
        await engine.update_weights(tied, transfer)
    assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 0)
    assert {version.version for version in (await task).versions} == {0}


async def test_an_update_that_breaks_half_way_leaves_it_stale(
    engine: EmbeddedEngine, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publish(transfer, make_model(1), 1)
    task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=200))
    await until(lambda: engine.load().running == 1, 0)

    def broken(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        last = max(tensors)
        fill(tensors | {last: torch.zeros(tensors[last].numel() + 1)}, *rest)

    with monkeypatch.context() as half_way:
        half_way.setattr("services.rollout.engines.embedded.host.adopt", broken)
        with pytest.raises(UpdateFailed, match="was not copied"):
            await engine.update_weights(ref, transfer)
    assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_STALE, None)
    with pytest.raises(EngineStale):
        await task
    with pytest.raises(EngineStale):
        await ask(engine, "r2", [1])
    await engine.update_weights(ref, transfer)
    assert (await ask(engine, "r3", [1])).versions[0].version == 1


def test_weights_are_served_from_where_they_are_published(transfer: Transfer) -> None:
    ref = publish(transfer, make_model(1), 1)
    tensors, _ = transfer.get(ref.key)
    served = make_model(0)
    own = {slot.data_ptr() for slot in served.state_dict().values()}
    before = adopt(tensors, served, ref)
    published = {tensor.data_ptr() for tensor in tensors.values()}
    for name, slot in served.state_dict().items():
        assert slot.data_ptr() in published
        assert torch.equal(slot, tensors[name])
    # Not let go of before the caller does; tied tensors are one still.
    assert {tensor.data_ptr() for tensor in before} == own
    assert served.get_input_embeddings().weight is served.get_output_embeddings().weight


async def test_served_weights_stay_when_their_version_is_deleted(
    engine: EmbeddedEngine, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.transfer.segment_pool.MIN_BYTES", 0)
    served = make_model(1)
    ref = publish(transfer, served, 1)
    await engine.update_weights(ref, transfer)
    transfer.delete(ref.key)
    for version in (2, 3, 4):
        later = publish(transfer, make_model(version), version)
        transfer.delete(later.key)
    ids = prompt(random.Random(8), 30, 40)
    answer = await ask(engine, "r", ids)
    expected = reference_logprobs(served, ids, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)
