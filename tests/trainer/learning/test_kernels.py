"""The trainer's own functions for parts of layers: the same values and gradients, or not used."""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from services.trainer.learning.kernels import gpu
from services.trainer.learning.kernels.cpu import use_kernels
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from tests.support.training import VOCABULARY, make_spec, tiny_config
from tests.trainer.batches import Shape, random_rows
from troupe.job import JobSpec

# The number of replaced modules: norms and attention of two layers, and the last norm.
MODULES = {
    "llama": 7,
    "mistral": 7,
    "ministral": 7,
    "mixtral": 7,
    "qwen2": 7,
    "qwen3": 11,
    "phi3": 7,
    "olmo2": 11,
    "qwen3_moe": 11,
    "qwen2_moe": 7,
    # Their norms add one to the weights, so that only the rotary embedding is the same.
    "gemma": 2,
    "gemma2": 2,
    "gemma3_text": 2,
    "olmo": 2,
    "olmo3": 11,
    "granite": 7,
    "smollm3": 7,
    # Their rotary embedding turns neighbours, not halves.
    "cohere": 0,
    "cohere2": 0,
    "glm": 5,
    "glm4": 9,
    "gpt_neox": 2,
    "gpt2": 0,
    "phi": 2,
    "stablelm": 2,
    "starcoder2": 2,
    "helium": 5,
    "exaone4": 11,
    "seed_oss": 7,
    "ernie4_5": 5,
    "hunyuan_v1_dense": 11,
    "lfm2": 11,
    "nemotron": 2,
    "arcee": 7,
    "apertus": 11,
    "gpt_oss": 5,
    "glm4_moe": 7,
}


def make_model(kind: str) -> Any:
    """Return a model with random weights, also for norms, which otherwise begin as ones."""
    values = tiny_config(model_type=kind, hidden_size=64, num_attention_heads=4)
    values["num_key_value_heads"] = 2
    values |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def outcome(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of two random rows, and the gradient of a weighted sum of them."""
    torch.manual_seed(1)
    model.zero_grad()
    ids = torch.randint(VOCABULARY, (2, 12))
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.randn_like(logits)).sum().backward()
    return logits.detach(), gradients_of(model)


def rounded(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`outcome` under autocast, which ends before the backward pass."""
    inner = model.forward

    def forward(**inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(**inputs)

    model.forward = forward
    try:
        return outcome(model)
    finally:
        del model.forward


def gradients_of(model: Any) -> torch.Tensor:
    """One after another."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("kind", "modules"), MODULES.items())
def test_architectures_compute_the_same_with_our_kernels(kind: str, modules: int) -> None:
    model = make_model(kind)
    before = outcome(model)
    assert use_kernels(model) == modules
    for own, ours in zip(before, outcome(model), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=float(own.abs().max()) * 4e-6)
    assert use_kernels(model) == 0  # they do already


class OddRMSNorm(torch.nn.Module):
    """A module with a misleading name."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.eps = 1e-6
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Like RMSNorm, with one difference."""
        eps = 1e-5 if self.odd == "eps" else self.eps
        centred = x - x.mean(-1, keepdim=True) if self.odd == "mean" else x
        weight = 1 + self.weight if self.odd == "weight" else self.weight
        r = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
        if self.odd == "gradient":
            r = r.detach()
        return centred * r * weight


@pytest.mark.parametrize("odd", ["eps", "mean", "weight", "gradient"])
def test_a_norm_of_another_formula_is_left_alone(odd: str) -> None:
    assert use_kernels(OddRMSNorm(odd)) == 0
    assert use_kernels(OddRMSNorm("")) == 1


def test_other_models_of_a_class_are_left_alone() -> None:
    own = modeling_qwen3.apply_rotary_pos_emb
    first, other = make_model("qwen3"), make_model("qwen3")
    assert use_kernels(first) == 11
    assert not any("forward" in vars(module) for module in other.modules())
    assert modeling_qwen3.apply_rotary_pos_emb is own
    # A copy computes with its own weights.
    changed = copy.deepcopy(first)
    with torch.no_grad():
        for module in (changed, other):
            for parameter in module.parameters():
                parameter.mul_(1.5)
    ours, expected = outcome(changed)[0], outcome(other)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outcome(first)[0], expected, atol=1e-2)


@pytest.mark.parametrize("kind", MODULES)
def test_rounded_products_are_as_near_to_exact_ones_as_they_were(kind: str) -> None:
    model = make_model(kind)
    exact, own = outcome(model), rounded(model)
    use_kernels(model)
    for true, theirs, ours in zip(exact, own, rounded(model), strict=True):
        error, ours_error = (float((some - true).norm()) for some in (theirs, ours))
        assert 0.0 < error < 0.1 * float(true.norm())
        assert ours_error < 1.25 * error


def test_the_last_norm_is_not_rounded() -> None:
    model = make_model("qwen3")
    use_kernels(model)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _m, _i, output: last.append(output))
    rounded(model)
    assert [states.dtype for states in last] == [torch.float32]


def test_unmeasured_cases_use_the_model_s_own_kernels() -> None:
    model, plain = make_model("qwen3"), make_model("qwen3")
    use_kernels(model)
    found, expected = outcome(model.double()), outcome(plain.double())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert use_kernels(make_model("qwen3").bfloat16()) == 0


def learner_of(tokenizer: Path, kernels: str, dtype: str = "float32", **trainer: object) -> Learner:
    """Return a learner that has accumulated the gradient of a random step."""
    values = make_spec(tokenizer, algorithm={"kl_coefficient": 0.05}).model_dump(mode="json")
    solver = values["policies"]["solver"]
    solver["model"]["dtype"] = dtype
    solver["trainer"] |= {"kernels": kernels, **trainer}
    spec = JobSpec.model_validate(values)
    policy = spec.policies["solver"]
    model = load_model("solver", policy, 0)
    rows = random_rows(model, 0, Shape(prompt=20, response=40))
    learner = Learner(model, spec, "solver")
    learner.set_reference({n: p * 1.01 for n, p in model.named_parameters()})
    learner.accumulate(rows)
    return learner


def test_a_job_may_turn_kernels_off(tokenizer: Path) -> None:
    without, ours = learner_of(tokenizer, "off"), learner_of(tokenizer, "auto")
    assert not any("forward" in vars(module) for module in without.model.modules())
    assert any("forward" in vars(module) for module in ours.model.modules())
    expected = gradients_of(without.model)
    assert expected.any()
    torch.testing.assert_close(gradients_of(ours.model), expected, rtol=1e-4, atol=1e-5)
    again = learner_of(tokenizer, "auto")
    assert torch.equal(gradients_of(ours.model), gradients_of(again.model))


@pytest.mark.parametrize("again", [False, True])
def test_a_step_of_rounded_products_is_as_near_as_without(tokenizer: Path, again: bool) -> None:
    exact = gradients_of(learner_of(tokenizer, "off").model)

    def error(kernels: str) -> torch.Tensor:
        found = learner_of(tokenizer, kernels, "bfloat16", activation_checkpointing=again)
        return (gradients_of(found.model) - exact).norm()

    own = error("off")
    assert 0.0 < own < 0.1 * exact.norm()
    assert error("auto") < 1.25 * own


class _Norm(torch.autograd.Function):
    """Liger's RMSNorm in torch's operators."""

    @staticmethod
    def forward(x: Any, weight: Any, eps: float, offset: float, mode: str, *rest: Any) -> Any:
        assert (offset, mode, rest) == (0.0, "llama", (False, None))
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return (x.float() * r).to(x.dtype) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps) * weight
        return *torch.autograd.grad(y, (x, weight), grad), None, None, None, None, None


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
def test_ligers_kernels_are_used_where_they_give_the_same_results(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself needs a GPU: here it is one of torch's operators."""
    model = make_model(kind)
    assert gpu.use_liger(model) == 0  # it is on a CPU
    monkeypatch.setattr(gpu, "serves", lambda device: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    assert gpu.use_liger(model) == 0  # it is not installed
    fake = types.ModuleType("liger_kernel.ops")
    fake.LigerRMSNormFunction = _Norm  # type: ignore[attr-defined]
    fake.LigerRopeFunction = types.SimpleNamespace(apply=rope)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", fake)
    expected = outcome(copy.deepcopy(model))
    assert gpu.use_liger(model) == MODULES[kind]
    for ours, own in zip(outcome(model), expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    # A kernel that computes something else, or fails, is not used.
    for wrong in (lambda q, k, cos, sin: (q, k), lambda *_: None):
        fake.LigerRopeFunction = types.SimpleNamespace(apply=wrong)  # type: ignore[attr-defined]
        other = make_model(kind)
        assert gpu.use_liger(other) == MODULES[kind] - 2  # its layers' attention
