"""Gradients of a mixture in both precisions, in every implementation.

Rows bring their experts (`router_replay`): with their own choice, rounding would send tokens
elsewhere, and a gradient would be that of another function.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row
from tests.trainer.batches import random_rows
from tests.trainer.learning.test_expert_load import SHAPE, mixture_spec, model_of
from tests.trainer.learning.test_router_replay import routed

HOW: dict[str, dict[str, Any]] = {
    "packed": {},
    "many passes": {"forward_tokens": 24},
    "without trees": {"share_prefixes": False},
    "checkpointed": {"trainer": {"activation_checkpointing": True}},
    "plain kernels": {"trainer": {"kernels": "off"}},
}


def gradient(tokenizer: Path, rows: list[Row], dtype: str, **how: Any) -> torch.Tensor:
    """Of the summed loss, in float64; computed in float64 itself for `dtype` "float64"."""
    options = dict(how)
    algorithm = {"router_replay": True, "router_aux_loss": 0.1, "entropy_coefficient": 0.01}
    exact = dtype == "float64"
    spec = mixture_spec(
        tokenizer,
        options.pop("trainer", None),
        algorithm=algorithm,
        dtype="float32" if exact else dtype,
    )
    model = model_of(spec, torch.float64 if exact else torch.float32)
    learner = Learner(model, spec, "solver", **options)
    learner.accumulate(rows[:4])
    learner.accumulate(rows[4:])
    grads = [p.grad for p in learner.model.parameters() if p.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]).double()


@pytest.fixture(scope="module")
def rows(tokenizer: Path) -> list[Row]:
    model = copy.deepcopy(model_of(mixture_spec(tokenizer), torch.float32))
    return [routed(row) for row in random_rows(model, 3, SHAPE)]


@pytest.fixture(scope="module")
def exact(tokenizer: Path, rows: list[Row]) -> torch.Tensor:
    plain = {"forward_tokens": 1, "share_prefixes": False, "trainer": {"kernels": "off"}}
    return gradient(tokenizer, rows, "float64", **plain)


@pytest.fixture(scope="module")
def rounded(tokenizer: Path, rows: list[Row], exact: torch.Tensor) -> float:
    """Return the result of autocast to bfloat16, row by row and by the model's own operators."""
    plain = {"forward_tokens": 1, "share_prefixes": False, "trainer": {"kernels": "off"}}
    found = gradient(tokenizer, rows, "bfloat16", **plain)
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", HOW)
def test_the_gradient_of_a_mixture_is_exact(
    tokenizer: Path, rows: list[Row], exact: torch.Tensor, rounded: float, how: str, dtype: str
) -> None:
    found = gradient(tokenizer, rows, dtype, **HOW[how])
    error = float((found - exact).norm() / exact.norm())
    if dtype == "float32":
        assert error < 2e-6
    else:
        assert 1e-4 < rounded < 0.05
        assert error < 1.5 * rounded
