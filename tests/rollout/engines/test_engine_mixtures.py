"""Mixtures of experts in engines: what is published is served, and no name is skipped unsaid."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import UpdateFailed, WeightsRefused
from services.rollout.engines.servers.http import seconds_for
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.models import (
    policy_spec,
    publish_tensors,
    reference_logprobs,
    transfer_in,
)
from tests.rollout.engines.real_server import RealServer, running
from tests.support.architectures import ARCHITECTURES, MIXTURE, make
from tests.support.fake_sglang import FakeSglang, serve
from troupe.checkpoints.adapters import distinct_tensors
from troupe.checkpoints.format import CheckpointFormat
from troupe.transfer import DeferredTensors, Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

EXPERTS = "model.layers.*.mlp.experts.*.down_proj.weight"


def published(model: Any) -> DeferredTensors:
    """As trainers publish it."""
    return CheckpointFormat(model, torch.float32).of(distinct_tensors(model))


async def assert_serves(engine: Any, model: Any) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    answer = await engine.generate("r", [5, 6, 7], sampling, deadline_seconds=60)
    expected = reference_logprobs(model, [5, 6, 7], answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe"])
async def test_an_embedded_engine_serves_a_published_mixture(name: str, tmp_path: Path) -> None:
    transfer = transfer_in(tmp_path)
    engine = EmbeddedEngine("e0", "solver", policy_spec(config=ARCHITECTURES[name]))
    await engine.start()
    for version in (0, 1):
        model = make(name, version)
        ref = publish_tensors(transfer, published(model), version)
        await engine.accepts(ref, transfer)
        await engine.update_weights(ref, transfer)
        await assert_serves(engine, model)
    lacking = dict(published(make(name)))
    gone = next(n for n in lacking if ".experts.3." in n)
    del lacking[gone]
    with pytest.raises(WeightsRefused, match=r"the model wants|cannot be converted"):
        await engine.update_weights(publish_tensors(transfer, lacking, 2), transfer)
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY
    await engine.stop()


@pytest.fixture(scope="module")
def real_mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A real SGLang server of the mixture, with random weights."""
    with running(tmp_path_factory.mktemp("mixture"), model=make("qwen3_moe")) as server:
        yield server


@pytest.fixture(params=["double", pytest.param("real", marks=[pytest.mark.slow])])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    if request.param == "real":
        yield request.getfixturevalue("real_mixture").url
        return
    async with serve(FakeSglang(MIXTURE)) as address:
        yield address


async def attached(url: str, **engine: object) -> SglangEngine:
    spec = policy_spec(
        config=MIXTURE, kind="sglang", urls=[url], start_timeout_seconds=60, **engine
    )
    found = SglangEngine("e0", "solver", spec)
    await found.start()
    return found


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_a_server_serves_the_experts_that_are_published(
    url: str, update: str, tmp_path: Path
) -> None:
    engine, transfer = await attached(url, update=update), transfer_in(tmp_path)
    for version in (0, 1):
        model = make("qwen3_moe", 10 + version)
        await engine.update_weights(publish_tensors(transfer, published(model), version), transfer)
        assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, version)
        await assert_serves(engine, model)
    await engine.stop()


async def test_names_that_the_server_skips_are_refused(url: str, tmp_path: Path) -> None:
    """Experts as transformers holds them: no loader of SGLang knows these names. All else is in the
    server already, so that nothing but the experts differs."""
    engine, transfer = await attached(url), transfer_in(tmp_path)
    model = make("qwen3_moe", 20)
    stacked = publish_tensors(transfer, distinct_tensors(model), 0)
    with pytest.raises(UpdateFailed, match=r"does not take 'model\.layers\.\*\.mlp\.experts"):
        await engine.update_weights(stacked, transfer)
    assert engine.state == common_pb.ENGINE_STATE_STALE
    await engine.update_weights(publish_tensors(transfer, published(model), 1), transfer)
    await assert_serves(engine, model)
    await engine.stop()


@pytest.mark.parametrize("has_cuda", [True, False])
@pytest.mark.parametrize(
    "kind", [EXPERTS, "model.layers.*.mlp.gate.weight", "model.norm.weight", "lm_head.weight"]
)
async def test_a_kind_that_a_server_skips_is_found_whatever_it_holds(
    kind: str, has_cuda: bool, tmp_path: Path
) -> None:
    """It holds the right values by chance: a prompt says nothing then, and the next version's would
    not arrive."""
    fake, transfer = FakeSglang(MIXTURE), transfer_in(tmp_path)
    fake.has_cuda = has_cuda
    model = make("qwen3_moe", 30)
    fake.load(dict(published(model)))
    as_kind = {
        name: ".".join("*" if p.isdigit() else p for p in name.split("."))
        for name in published(model)
    }
    fake.skips = {name for name, of in as_kind.items() if of == kind}
    async with serve(fake) as address:
        engine = await attached(address)
        ref = publish_tensors(transfer, published(model), 0)
        with pytest.raises(UpdateFailed, match="does not take") as refused:
            await engine.update_weights(ref, transfer)
        assert kind in str(refused.value)
        fake.skips = set()
        await engine.update_weights(ref, transfer)
        await assert_serves(engine, model)
        await engine.stop()


async def test_names_are_tried_once_for_each_server(tmp_path: Path) -> None:
    fake, transfer = FakeSglang(MIXTURE), transfer_in(tmp_path)
    async with serve(fake) as address:
        engine = await attached(address)
        loads = []
        for version in range(3):
            before = fake.seen.count("/update_weights_from_disk")
            model = make("qwen3_moe", version)
            await engine.update_weights(
                publish_tensors(transfer, published(model), version), transfer
            )
            loads.append(fake.seen.count("/update_weights_from_disk") - before)
        assert loads[0] > 10
        assert loads[1:] == [1, 1]
        await engine.stop()


def test_a_server_has_time_by_the_size_of_what_it_reads() -> None:
    assert seconds_for(0) == 60
    assert seconds_for(64 << 30) > 600


async def test_the_proof_reads_weights_of_any_size(tmp_path: Path) -> None:
    """A version whose numbers are wrong is refused however large it says to be."""
    fake, transfer = FakeSglang(MIXTURE), Transfer(tmp_path / "transfer")
    async with serve(fake) as address:
        engine = await attached(address)
        ref = publish_tensors(transfer, published(make("qwen3_moe", 1)), 0)
        ref.num_bytes = 1 << 40
        fake.faults.ignore_weights = True
        with pytest.raises(UpdateFailed, match=r"does not take|log-probs differ"):
            await engine.update_weights(ref, transfer)
        await engine.stop()
