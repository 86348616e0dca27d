"""Mixtures of experts in the trainer: published, kept and exported in their checkpoints' form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.trainer.learning.learner import Learner
from services.trainer.learning.lora import adapter_of
from services.trainer.learning.model import load_adapted, load_model, load_tokenizer
from services.trainer.state.checkpoint import checkpoint_path, lineage_of, save_checkpoint
from tests.support.training import make_spec, tiny_config
from tests.trainer.learning.test_learner import make_rows
from troupe.checkpoints.merging import merge_in_place
from troupe.job import JobSpec
from troupe.rpc import InvalidArgument
from troupe.transfer import Transfer, checksum_of

MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def mixture_spec(tokenizer: Path, dtype: str = "float32", lora: Any = None) -> JobSpec:
    model = {"config": tiny_config() | MIXTURE, "tokenizer": str(tokenizer), "dtype": dtype}
    values = make_spec(tokenizer, model=model).model_dump(mode="json")
    values["policies"]["solver"]["lora"] = lora
    return JobSpec.model_validate(values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_publishes_what_transformers_would_save(
    tokenizer: Path, tmp_path: Path, dtype: str
) -> None:
    spec = mixture_spec(tokenizer, dtype)
    learner = Learner(load_model("solver", spec.policies["solver"], spec.seed), spec, "solver")
    before = {name: tensor.clone() for name, tensor in learner.published().items()}
    learner.accumulate(make_rows(learner.model, 8, 0, noise=0.3))
    assert learner.apply(0).applied
    after = learner.published()
    learner.model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert checksum_of(after) == checksum_of(saved)
    experts = [name for name in saved if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert any(not torch.equal(before[name], saved[name]) for name in experts)
    key = Transfer(tmp_path / "transfer").set("job/solver/weights@1", after)
    assert key.checksum == checksum_of(saved)


def test_an_exported_mixture_is_what_transformers_saves(tokenizer: Path, tmp_path: Path) -> None:
    spec = mixture_spec(tokenizer)
    policy = spec.policies["solver"]
    learner = Learner(load_model("solver", policy, spec.seed), spec, "solver")
    path = checkpoint_path(tmp_path, "job", "solver", 3)
    fast = load_tokenizer("solver", policy)
    save_checkpoint(
        path,
        learner.model,
        learner.weights(),
        fast,
        keep=2,
        dtype=torch.bfloat16,
        published=dict(learner.published()),
    )
    saved = load_file(path / "model.safetensors")
    half = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert half.dtype == torch.bfloat16
    half.save_pretrained(tmp_path / "again")
    assert checksum_of(load_file(tmp_path / "again" / "model.safetensors")) == checksum_of(saved)
    # Engines load float32 here, which is other content and thus a separate file.
    assert checksum_of(load_file(path / "published.safetensors")) == checksum_of(
        learner.published()
    )


def test_an_adapter_on_a_mixture_covers_only_attention_and_reports_it(
    tokenizer: Path, tmp_path: Path
) -> None:
    """All experts are one tensor, which has no adapter."""
    spec = mixture_spec(tokenizer, lora={"rank": 4, "alpha": 8, "target_modules": "all-linear"})
    policy = spec.policies["solver"]
    model = load_adapted("solver", policy, spec.seed, torch.device("cpu"))
    learner = Learner(model, spec, "solver")
    adapter = adapter_of(model)
    assert adapter is not None
    assert {name.rpartition(".")[2] for name in adapter.content(torch.float32).modules} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in adapter.base.weights()
    assert checksum_of(adapter.base.weights()) == adapter.base.checksum

    # Exported: the adapter with its base, and merged.
    learner.accumulate(make_rows(model, 8, 0, noise=0.3))
    assert learner.apply(0).applied
    fast = load_tokenizer("solver", policy)
    path = checkpoint_path(tmp_path, "job", "solver", 1)
    about = lineage_of(spec, "job", "solver", 1, 0, "c" * 32, model)
    save_checkpoint(path, model, learner.weights(), fast, keep=2, lineage=about)
    merge_in_place(path)
    merged = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gate_proj", "gate_up_proj"])
def test_an_adapter_on_experts_is_refused(tokenizer: Path, name: str) -> None:
    """By the name in files, and by the name in transformers."""
    spec = mixture_spec(tokenizer, lora={"rank": 4, "alpha": 8, "target_modules": [name]})
    with pytest.raises(InvalidArgument, match="experts") as refused:
        load_adapted("solver", spec.policies["solver"], spec.seed, torch.device("cpu"))
    assert refused.value.field == "policies.solver.lora.target_modules"
    assert "q_proj" in (refused.value.remedy or "")


def test_an_adapter_of_a_mixture_reports_that_experts_are_frozen(tokenizer: Path) -> None:
    """A shared expert's `gate_proj` is adapted, routed experts' are not."""
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}
    model = {"config": tiny_config() | MIXTURE | shared, "tokenizer": str(tokenizer)}
    values = make_spec(tokenizer, model=model).model_dump(mode="json")
    lora = {"rank": 4, "alpha": 8, "target_modules": ["gate_proj", "q_proj"]}
    values["policies"]["solver"]["lora"] = lora
    spec = JobSpec.model_validate(values)
    with capture_logs() as logged:
        model = load_adapted("solver", spec.policies["solver"], spec.seed, torch.device("cpu"))
    (said,) = [one for one in logged if one["event"] == "experts are not adapted"]
    assert said["target_modules"] == ["gate_proj"]
    adapter = adapter_of(model)
    assert adapter is not None
    names = adapter.content(torch.float32).modules
    assert not [name for name in names if ".experts." in name]
    assert any("shared_expert" in name for name in names)


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq"])
def test_a_quantized_checkpoint_is_refused(tokenizer: Path, tmp_path: Path, method: str) -> None:
    """Before its weights are read: transformers would train fp8 numbers, or fail in a kernel."""
    (tmp_path / "model").mkdir()
    config = tiny_config() | MIXTURE | {"quantization_config": {"quant_method": method}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model = {"path": str(tmp_path / "model"), "tokenizer": str(tokenizer)}
    spec = make_spec(tokenizer, model=model)
    with pytest.raises(InvalidArgument, match=rf"quantized \({method}\)") as refused:
        load_model("solver", spec.policies["solver"], 0)
    assert (refused.value.kind, refused.value.field) == (
        "model_quantized",
        "policies.solver.model.path",
    )
    assert "dequantize" in (refused.value.remedy or "")
