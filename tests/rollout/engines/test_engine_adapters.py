"""Engines of policies that train an adapter: log-probs are the trainer's, versions do not mix."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.embedded.adapters import AdaptedLayers, RowAdapter, RowSpan
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStartFailed, UpdateFailed, WeightsRefused
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.weights import adopt, load_config, skeleton, with_base
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import CONFIG, make_model, policy_spec, publish, transfer_in
from tests.rollout.engines.real_server import interpreter
from tests.rollout.engines.trained_adapters import LAYERS, TrainedAdapter, lora_spec
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.training import rounding
from tests.support.waiting import until
from troupe.checkpoints.adapters import base_key, merged
from troupe.job import PolicySpec
from troupe.transfer import KeyNotFound, Transfer
from troupe.v1 import common_pb2 as common_pb

PROMPT = [5, 6, 7]


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    fake = FakeSglang(CONFIG)
    fake.info |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
    async with serve(fake):
        yield fake


def half_spec(**engine: object) -> PolicySpec:
    spec = lora_spec(**engine)
    half = spec.language_model.model_copy(update={"dtype": "bfloat16"})
    return spec.model_copy(update={"model": half})


def sglang(fake: FakeSglang, **engine: object) -> SglangEngine:
    url = f"http://127.0.0.1:{fake.server.port}"
    spec = lora_spec(kind="sglang", urls=[url], **engine)
    return SglangEngine("e0", "solver", spec)


@pytest.fixture(params=["continuous", "deterministic", "sglang"])
async def engine(request: pytest.FixtureRequest, fake: FakeSglang) -> AsyncIterator[ServingEngine]:
    made: ServingEngine
    if request.param == "sglang":
        made = sglang(fake)
    else:
        fixed = request.param == "deterministic"
        made = EmbeddedEngine("e0", "solver", lora_spec(), deterministic=fixed)
    await made.start()
    yield made
    await made.stop()


async def test_every_version_is_the_trainers(engine: ServingEngine, transfer: Transfer) -> None:
    trained = TrainedAdapter(1)
    for version in range(3):
        ref = trained.publish(transfer, version)
        await engine.accepts(ref, transfer)
        await engine.update_weights(ref, transfer)
        assert (engine.version, engine.checksum) == (version, ref.checksum)
        answer = await ask(engine, f"r{version}", PROMPT, max_new_tokens=6, seed=1)
        assert [(s.version, s.start, s.end) for s in answer.versions] == [(version, 0, 6)]
        wanted = trained.logprobs(PROMPT, answer.token_ids)
        assert answer.logprobs == pytest.approx(wanted, abs=2e-4)
        assert wanted != pytest.approx(
            TrainedAdapter(99).logprobs(PROMPT, answer.token_ids), abs=0.1
        )
        trained.step(10 + version)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_over_a_half_precision_base_an_adapter_is_computed_as_peft_does(
    transfer: Transfer, deterministic: bool
) -> None:
    engine = EmbeddedEngine("e0", "solver", half_spec(), deterministic=deterministic)
    await engine.start()
    try:
        trained = TrainedAdapter(1, dtype=torch.bfloat16)
        for version in range(2):
            ref = trained.publish(transfer, version)
            await engine.update_weights(ref, transfer)
            assert engine.checksum == ref.checksum
            answer = await ask(engine, f"r{version}", PROMPT, max_new_tokens=6, seed=1)
            wanted = trained.logprobs(PROMPT, answer.token_ids)
            # Attention of another kind rounds bfloat16 in another order.
            exact = copy.deepcopy(trained.model).double()
            off = rounding(trained.model, exact, PROMPT, answer.token_ids)
            assert answer.logprobs == pytest.approx(wanted, abs=3 * off)
            other = TrainedAdapter(99, dtype=torch.bfloat16)
            assert answer.logprobs != pytest.approx(
                other.logprobs(PROMPT, answer.token_ids), abs=6 * off
            )
            trained.step(10 + version)
    finally:
        await engine.stop()


@pytest.mark.parametrize("std", [0.2, 0.005])
def test_small_adapter_updates_survive_a_half_precision_base(
    transfer: Transfer, std: float
) -> None:
    """Merged into bfloat16, an update below half a unit in the last place of a weight is lost."""
    trained = TrainedAdapter(1, dtype=torch.bfloat16)
    trained.step(3, std)
    spec = half_spec()
    model = skeleton(load_config(spec.language_model, "solver"), "bfloat16", "solver")
    ref = trained.publish(transfer, 0)
    adapted = with_base(transfer.get(ref.key)[0], ref, transfer, None)
    assert adapted is not None
    adopt(adapted.base.tensors, model, ref)
    layers = AdaptedLayers(model)
    layers.cover(adapted.adapter.modules)
    rows = [RowSpan(64, RowAdapter.of(adapted.adapter, model.device))]
    weights = merged(adapted.base.tensors, adapted.adapter)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        layer = model.get_submodule(name)
        theirs = trained.model.get_submodule(f"base_model.model.{name}")
        inputs = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(7))  # type: ignore[arg-type]
        inputs = inputs.to(torch.bfloat16)
        with torch.no_grad(), layers.passing(rows):
            found, wanted, base = layer(inputs), theirs(inputs), theirs.base_layer(inputs)
            a, b = (t.double() for t in adapted.adapter.pair(name))
            exact = inputs.double() @ a.T @ b.T * adapted.adapter.scale
        assert torch.equal(found, wanted)
        told = (found - base).double().flatten()
        assert torch.cosine_similarity(told, exact.flatten(), dim=0) > 0.2
        if std < 0.01:  # what is told is told of an update that the weights cannot hold
            kept = (weights[f"{name}.weight"] == adapted.base.tensors[f"{name}.weight"]).float()
            assert kept.mean() > 0.9


async def test_an_engine_takes_over_another_policys_adapter(
    engine: ServingEngine, transfer: Transfer
) -> None:
    one, two = TrainedAdapter(1), TrainedAdapter(2)
    await engine.update_weights(one.publish(transfer, 4, "solver"), transfer)
    assert await engine.drain("moves", deadline_seconds=1) == 0
    engine.assign("checker")
    await engine.update_weights(two.publish(transfer, 0, "checker"), transfer)
    answer = await ask(engine, "r", PROMPT, max_new_tokens=4, seed=1)
    assert answer.logprobs == pytest.approx(two.logprobs(PROMPT, answer.token_ids), abs=2e-4)
    # The base belongs to another job's model, so it is loaded, too.
    other = TrainedAdapter(3, base_seed=5)
    await engine.update_weights(other.publish(transfer, 1, "checker"), transfer)
    answer = await ask(engine, "s", PROMPT, max_new_tokens=4, seed=1)
    assert answer.logprobs == pytest.approx(other.logprobs(PROMPT, answer.token_ids), abs=2e-4)


async def test_adapters_that_do_not_fit_are_refused_without_effect(
    engine: ServingEngine, transfer: Transfer
) -> None:
    trained = TrainedAdapter(1)
    await engine.update_weights(trained.publish(transfer, 0), transfer)
    whole = publish(transfer, make_model(0), 1)
    with pytest.raises(WeightsRefused, match="whole weights are published"):
        await engine.accepts(whole, transfer)
    wide = TrainedAdapter(1, rank=2).publish(transfer, 1)
    for refuse in (engine.accepts, engine.update_weights):
        with pytest.raises(WeightsRefused, match=r"the engine's adapter has \[4, "):
            await refuse(wide, transfer)
    with pytest.raises(WeightsRefused, match="its rank is 3"):
        await engine.update_weights(trained.publish(transfer, 1, rank=3), transfer)
    lost = trained.publish(transfer, 1, base="0" * 32)
    with pytest.raises(KeyNotFound):
        await engine.update_weights(lost, transfer)
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY
    answer = await ask(engine, "r", PROMPT, max_new_tokens=3, seed=1)
    assert answer.logprobs == pytest.approx(trained.logprobs(PROMPT, answer.token_ids), abs=2e-4)


async def test_a_base_of_another_shape_is_refused(
    engine: ServingEngine, transfer: Transfer
) -> None:
    trained = TrainedAdapter(1)
    short = {n: t for n, t in make_model(0).named_parameters() if "norm" not in n}
    base = transfer.set("probe", short).checksum
    transfer.set(base_key("job", base), short)
    with pytest.raises(WeightsRefused, match="are not published"):
        await engine.update_weights(trained.publish(transfer, 0, base=base), transfer)
    assert engine.state == common_pb.ENGINE_STATE_STALE


async def test_a_plain_policy_takes_no_adapter(transfer: Transfer) -> None:
    engine = EmbeddedEngine("e0", "solver", policy_spec())
    await engine.start()
    with pytest.raises(WeightsRefused, match="the policy has no `lora`"):
        await engine.update_weights(TrainedAdapter(1).publish(transfer, 0), transfer)
    await engine.stop()


async def test_turns_in_hand_end_with_the_version_that_they_began_with(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = sglang(fake)
    await engine.start()
    trained = TrainedAdapter(1)
    await engine.update_weights(trained.publish(transfer, 0), transfer)
    loads = [name for name in fake.seen if "update_weights" in name]
    turn = asyncio.create_task(ask(engine, "long", PROMPT, max_new_tokens=60, seed=1))
    await until(lambda: bool(fake.calls))
    trained.step(2)
    assert await engine.update_weights(trained.publish(transfer, 1), transfer) == 0.0
    assert len(fake.adapters) == 2  # the long turn still needs the first
    young = await ask(engine, "young", PROMPT, max_new_tokens=3, seed=1)
    assert [span.version for span in young.versions] == [1]
    old = await turn
    assert [(span.version, span.end) for span in old.versions] == [(0, 60)]
    trained.step(1)
    assert old.logprobs == pytest.approx(trained.logprobs(PROMPT, old.token_ids), abs=2e-4)
    trained.step(3)
    await engine.update_weights(trained.publish(transfer, 2), transfer)
    assert [name.split("@")[1][0] for name in fake.adapters] == ["2"]
    # The base went there once.
    assert [name for name in fake.seen if "update_weights" in name] == loads
    await engine.stop()


async def test_turns_are_asked_for_again_where_the_job_wants_that(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = sglang(fake, in_flight="restart")
    await engine.start()
    trained = TrainedAdapter(1)
    await engine.update_weights(trained.publish(transfer, 0), transfer)
    turn = asyncio.create_task(ask(engine, "long", PROMPT, max_new_tokens=60, seed=1))
    await until(lambda: bool(fake.calls))
    await engine.update_weights(trained.publish(transfer, 1), transfer)
    with pytest.raises(Exception, match="given back"):
        await turn
    await engine.stop()


async def test_an_adapter_that_did_not_arrive_is_not_served(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = sglang(fake)
    await engine.start()
    trained = TrainedAdapter(1)
    await engine.update_weights(trained.publish(transfer, 0), transfer)
    wrong = trained.publish(transfer, 1, alpha=80.0)
    fake.alters = lambda config: {**config, "lora_alpha": 8}
    with pytest.raises(UpdateFailed, match="prompt log-probs differ"):
        await engine.update_weights(wrong, transfer)
    assert engine.state == common_pb.ENGINE_STATE_STALE
    fake.alters = None
    await engine.update_weights(wrong, transfer)
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY
    assert len(fake.adapters) == 1
    await engine.stop()


async def test_a_server_that_was_lost_gets_base_and_adapter_again(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = sglang(fake)
    await engine.start()
    trained = TrainedAdapter(1)
    ref = trained.publish(transfer, 0)
    await engine.update_weights(ref, transfer)
    await fake.server.crash()
    with pytest.raises(Exception, match="died"):
        await ask(engine, "r", PROMPT, max_new_tokens=3)
    fake.adapters.clear()
    fake.load({n: torch.zeros_like(t) for n, t in make_model(0).named_parameters()})
    await fake.server.start()
    await engine.start()
    await engine.update_weights(ref, transfer)
    answer = await ask(engine, "s", PROMPT, max_new_tokens=3, seed=1)
    assert answer.logprobs == pytest.approx(trained.logprobs(PROMPT, answer.token_ids), abs=2e-4)
    await engine.stop()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"enable_lora": None}, "started without LoRA"),
        ({"max_lora_rank": 2}, "up to rank 2, the policy's have 4"),
        ({"lora_target_modules": ["q_proj"]}, "it adapts no down_proj, gate_proj"),
    ],
)
async def test_a_server_for_other_adapters_is_refused(
    fake: FakeSglang, info: dict[str, object], message: str
) -> None:
    fake.info |= info
    with pytest.raises(EngineStartFailed, match=message) as caught:
        await sglang(fake).start()
    assert "--enable-lora --max-lora-rank 4" in (caught.value.remedy or "")
    assert caught.value.field == "policies.solver.engine.urls"


@pytest.mark.slow
async def test_a_real_server_computes_what_peft_computes(
    transfer: Transfer, tmp_path: Path
) -> None:
    """Launched for the policy's adapters: base once, three versions, one of them mid-turn."""
    spec = lora_spec(
        kind="sglang",
        python=interpreter(tmp_path),
        launch=["--lora-backend", "torch_native"],
        start_timeout_seconds=400,
    )
    engine = SglangEngine("e0", "solver", spec)
    await engine.start()
    try:
        trained = TrainedAdapter(1)
        for version in range(2):
            await engine.update_weights(trained.publish(transfer, version), transfer)
            for number, prompt in enumerate((PROMPT, [9, 3, 1, 1, 4], [50])):
                answer = await ask(engine, f"r{version}.{number}", prompt, max_new_tokens=8)
                assert [span.version for span in answer.versions] == [version]
                wanted = trained.logprobs(prompt, answer.token_ids)
                assert answer.logprobs == pytest.approx(wanted, abs=2e-4)
            trained.step(7 + version)
        trained.step(7)  # what version 1 is
        turn = asyncio.create_task(ask(engine, "long", PROMPT, max_new_tokens=120, seed=1))
        await until(lambda: engine.load().running == 1)
        two = TrainedAdapter(5)
        assert await engine.update_weights(two.publish(transfer, 2), transfer) == 0.0
        young = await ask(engine, "young", PROMPT, max_new_tokens=8)
        assert young.logprobs == pytest.approx(two.logprobs(PROMPT, young.token_ids), abs=2e-4)
        old = await turn
        assert len({span.version for span in old.versions}) == 1
        if old.versions[0].version == 1:  # else it had ended before
            wanted = trained.logprobs(PROMPT, old.token_ids)
            assert old.logprobs == pytest.approx(wanted, abs=2e-4)
        await engine.update_weights(two.publish(transfer, 3), transfer)
        assert [name.split(".")[0] for name in engine._versions.names] == ["solver@3"]
    finally:
        await engine.stop()
