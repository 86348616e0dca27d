"""Linear layers of copies of their weights in bfloat16: the values of autocast, and gradients that
are summed in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.kernels.half import HalfWeights
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows
from troupe.contracts.metric_names import GRAD_NORM, POLICY_LOSS


def half_spec(tokenizer: Path) -> Any:
    values = make_spec(tokenizer, optimizer={"lr": 1e-3, "eps": 1e-3}).model_dump()
    values["policies"]["solver"]["model"]["dtype"] = "bfloat16"
    return type(make_spec(tokenizer)).model_validate(values)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_two_passes_equal_autocast(tokenizer: Path, keeps: bool, bias: bool) -> None:
    spec = half_spec(tokenizer)
    model = load_model("solver", spec.policies["solver"], 0)
    if bias:
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.bias = torch.nn.Parameter(torch.linspace(-1, 1, module.out_features))
    plain = copy.deepcopy(model)
    half = HalfWeights(model, keeps=keeps)
    twin = copy.deepcopy(model)  # casts by itself
    for seed in range(2):
        ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(seed))
        ours, theirs = logits(model, ids), logits(plain, ids)
        assert torch.equal(ours, theirs)
        assert torch.equal(logits(twin, ids), theirs)
        for one in (ours, theirs):
            one.float().square().sum().backward()
    exact = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, exact[name]
        assert grad is not None
        assert other is not None
        assert grad.dtype == torch.float32
        assert float((grad - other).norm() / other.norm()) < 1e-2, name
    assert all(parameter.grad is None for parameter in twin.parameters())
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert (half.of(weight) is half.of(weight)) == keeps
        before = half.of(weight)
        assert before is not None
        with torch.no_grad():
            weight.add_(1.0)
        after = half.of(weight)
        assert after is not None
        assert torch.equal(after, weight.to(torch.bfloat16))
        assert not torch.equal(before, after)


def test_a_step_with_copies_equals_one_with_autocast(tokenizer: Path) -> None:
    """Also with layers that are computed again; copies are freed before the update."""
    spec = half_spec(tokenizer)
    values = spec.model_dump()
    values["policies"]["solver"]["trainer"]["activation_checkpointing"] = True
    spec = type(spec).model_validate(values)
    learners = []
    for copies in (True, False):
        model = load_model("solver", spec.policies["solver"], 0)
        learner = Learner(model, spec, "solver")
        if copies:  # on a GPU `Passes` makes them
            learner._passes.__dict__["_half_weights"] = HalfWeights(model, keeps=True)
        learners.append(learner)
    ours, theirs = learners
    half = ours._passes._half_weights
    assert half is not None
    for version in range(2):
        for seed in range(2):
            rows = random_rows(theirs.model, 10 * version + seed, Shape(groups=4, members=4))
            for learner in learners:
                learner.accumulate(rows)
        assert half._copies
        mine, other = ours.apply(version), theirs.apply(version)
        assert not half._copies
        assert mine.applied, mine.reason
        assert mine.metrics[POLICY_LOSS] == pytest.approx(other.metrics[POLICY_LOSS], rel=1e-3)
        assert mine.metrics[GRAD_NORM] == pytest.approx(other.metrics[GRAD_NORM], rel=1e-2)
    for name, weight in theirs.weights().items():
        assert float((ours.weights()[name] - weight).abs().max()) < 1e-4, name
