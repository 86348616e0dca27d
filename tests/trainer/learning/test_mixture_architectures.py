"""Every architecture that transformers converts on load: it trains, publishes, exports, comes back.

A model of it makes one step. What the trainer publishes and what it exports must be the trained
model again, to the bit, for whoever loads it by the names of a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model, load_tokenizer
from services.trainer.state.checkpoint import checkpoint_path, save_checkpoint
from tests.support.architectures import ARCHITECTURES, FURTHER
from tests.support.training import make_spec
from tests.trainer.learning.test_learner import make_rows
from troupe.checkpoints.format import ModelArrangement
from troupe.job import TrainerSpec

# One of each kind of conversion is tried every time.
ALWAYS = {"qwen3_moe", "gpt_oss"}
CONVERTED = [
    pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow])
    for name in (*ARCHITECTURES, *FURTHER)
]


@pytest.mark.parametrize("name", CONVERTED)
def test_an_architecture_trains_and_its_checkpoint_loads_again(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    config = ARCHITECTURES.get(name) or FURTHER[name]
    spec = make_spec(tokenizer, model={"config": config, "tokenizer": str(tokenizer)})
    # Its own kernels round differently from transformers', which the exported model uses.
    plain = TrainerSpec(kernels="off")
    policy = spec.policies["solver"].model_copy(update={"trainer": plain})
    spec = spec.model_copy(update={"policies": {"solver": policy}})
    learner = Learner(load_model("solver", policy, spec.seed), spec, "solver")
    before = {n: t.clone() for n, t in learner.published().items()}
    learner.accumulate(make_rows(learner.model, 8, 0, noise=0.3))
    assert learner.apply(0).applied
    published = learner.published()
    moved = [n for n, t in published.items() if not torch.equal(t, before[n])]
    assert len(moved) > len(before) / 2

    fresh = load_model("solver", policy, spec.seed + 1)
    arranged = ModelArrangement.of(fresh, published).arranged(published)
    fresh.load_state_dict(dict(arranged), strict=False)
    assert_same(fresh, learner.model)

    path = checkpoint_path(tmp_path, "job", "solver", 1)
    fast = load_tokenizer("solver", policy)
    save_checkpoint(path, learner.model, learner.weights(), fast, keep=2)
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert_same(exported, learner.model)


def assert_same(mine: Any, trained: Any) -> None:
    """Check for the same weights bit for bit, and logits that differ only by memory layout."""
    assert all(torch.equal(a, b) for a, b in zip(*map(state_of, (mine, trained)), strict=True))
    torch.testing.assert_close(logits(mine), logits(trained), rtol=1e-5, atol=1e-5)


def state_of(model: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in sorted(model.state_dict().items())]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return logits by transformers' own attention."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 8, 9, 10]]), use_cache=False).logits
        return found
    finally:
        model.set_attn_implementation(own)
