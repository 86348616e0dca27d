"""The embedded engine with other architectures than the usual one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStartFailed, NonFiniteLogits
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    CONFIG,
    VOCABULARY,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.support.architectures import ARCHITECTURES
from troupe.job import EngineSpec, ModelSpec, PolicySpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


async def test_nan_weights_are_reported(transfer: Transfer) -> None:
    engine = EmbeddedEngine("e0", "solver", policy_spec())
    await engine.start()
    broken = make_model(0)
    with torch.no_grad():
        broken.get_parameter("model.norm.weight")[0] = float("nan")
    await engine.update_weights(publish(transfer, broken, 1), transfer)
    with pytest.raises(NonFiniteLogits, match="version 1"):
        await ask(engine, "r", [1])
    await engine.stop()


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
        {"model_type": "mistral", "sliding_window": 16},
        {"model_type": "gemma3_text", "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "gpt_oss", "sliding_window": 16, "num_local_experts": 4,
         "num_experts_per_tok": 2, "tie_word_embeddings": False,
         "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ids=lambda fields: str(fields["model_type"]),
)  # fmt: skip
async def test_other_architectures(fields: dict[str, object], transfer: Transfer) -> None:
    config = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, **fields}
    if fields["model_type"] != "gpt2":
        config = {**CONFIG, **fields}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("sinks"):
                tensor.normal_()
    model_spec = ModelSpec(config=config, tokenizer="unused")
    engine = EmbeddedEngine("e0", "solver", PolicySpec(model=model_spec))
    await engine.start()
    await engine.update_weights(publish(transfer, model, 0), transfer)
    rng = random.Random(8)
    prompts = [prompt(rng) for _ in range(12)]
    answers = await asyncio.gather(*(ask(engine, f"r{i}", p) for i, p in enumerate(prompts)))
    for p, answer in zip(prompts, answers, strict=True):
        expected = reference_logprobs(model, p, answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    await engine.stop()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gemma2"}, "caps attention scores"),
        (ARCHITECTURES["qwen3_next"], "linear_attention"),
        (ARCHITECTURES["llama4"], "chunked_attention"),
    ],
    ids=["capped", "linear", "chunked"],
)
async def test_a_model_that_would_be_computed_wrongly_is_refused(
    config: dict[str, Any], why: str
) -> None:
    spec = PolicySpec(model=ModelSpec(config=config, tokenizer="unused"))
    with pytest.raises(EngineStartFailed, match=why) as refused:
        await EmbeddedEngine("e0", "solver", spec).start()
    assert refused.value.field == "policies.solver.engine.kind"
    assert "kind: sglang" in (refused.value.remedy or "")


async def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    spec = PolicySpec(model=ModelSpec(path=str(tmp_path / "none")), engine=EngineSpec())
    engine = EmbeddedEngine("e0", "solver", spec)
    with pytest.raises(EngineStartFailed, match=r"policies.solver.model.path"):
        await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_DEAD
    bad = {**CONFIG, "model_type": "no-such-type"}
    spec = PolicySpec(model=ModelSpec(config=bad, tokenizer="x"), engine=EngineSpec())
    with pytest.raises(EngineStartFailed, match=r"policies.solver.model.config = no-such-type"):
        await EmbeddedEngine("e1", "solver", spec).start()


async def test_eos_comes_from_the_model(tmp_path: Path, transfer: Transfer) -> None:
    model = make_model(0)
    model.config.eos_token_id = 17
    model.generation_config.eos_token_id = [17, 18]
    model.save_pretrained(tmp_path / "model")
    spec = PolicySpec(model=ModelSpec(path=str(tmp_path / "model")), engine=EngineSpec())
    engine = EmbeddedEngine("e0", "solver", spec)
    await engine.start()
    await engine.update_weights(publish(transfer, model, 0), transfer)
    answers = await asyncio.gather(
        *(ask(engine, f"r{i}", [i + 1], seed=i, max_new_tokens=200) for i in range(20))
    )
    ends = {a.token_ids[-1] for a in answers if a.finish_reason == "stop"}
    assert ends
    assert ends <= {17, 18}
    await engine.stop()
