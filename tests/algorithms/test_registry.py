"""Users' own losses, corrections and advantages: the interface of the built-in ones, checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from troupe.algorithms.losses import grpo_loss_sum
from troupe.algorithms.objectives import LOSSES, traits_of
from troupe.algorithms.registry import (
    ADVANTAGES,
    AlgorithmFunctions,
    Field,
    FunctionFault,
    OwnFunction,
)
from troupe.algorithms.statistics import TokenStatistics
from troupe.algorithms.traits import ADVANTAGE_TRAITS, LOSS_TRAITS
from troupe.client.cli.specification import try_imports
from troupe.job import JobSpecError, load_job
from troupe.job.sections.algorithm import Advantage, Loss
from troupe.workflow.errors import EntrypointError

OWN = "tests.support.own_algorithms"
ROOT = Path(__file__).parents[2]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Log-probs with gradient, behaviour, advantages, weights, and samples of three tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3)]
    behaviour = -draw[0].abs()
    logprobs = (behaviour + 0.4 * draw[1]).requires_grad_()
    return logprobs, behaviour, draw[2], torch.ones(count).double(), torch.arange(count) // 3


def test_an_own_loss_is_called_like_a_built_in_one() -> None:
    logprobs, behaviour, advantages, weights, samples = tokens(12)
    sums = []
    for loss in ("ppo_clip", OwnFunction("loss", f"{OWN}:ppo")):
        total = grpo_loss_sum(
            logprobs, behaviour, advantages, weights, loss=loss, sequences=samples, **CLIP
        )
        sums.append((total, *torch.autograd.grad(total, logprobs)))
    for theirs, mine in zip(*sums, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_an_own_correction_weighs_tokens_and_masks_those_of_weight_zero(
    loss: str, recomputed: bool
) -> None:
    logprobs, behaviour, advantages, weights, samples = tokens(30)
    old = logprobs.detach() if recomputed else None
    how = {"sequences": samples, "old_logprobs": old, **CLIP}
    correction = OwnFunction("correction", f"{OWN}:halved")
    total = grpo_loss_sum(
        logprobs, behaviour, advantages, weights, loss=loss, correction=correction, **how
    )
    (found,) = torch.autograd.grad(total, logprobs)
    factors = torch.where(logprobs - behaviour > -0.5, 0.5, 0.0).detach()
    if loss == "ppo_clip" and not recomputed:
        expected = -factors * advantages
    else:
        plain = grpo_loss_sum(logprobs, behaviour, advantages, factors, loss=loss, **how)
        (expected,) = torch.autograd.grad(plain, logprobs)
    torch.testing.assert_close(found, expected)
    assert 0 < int((found == 0).sum()) < 30

    statistics = TokenStatistics()
    statistics.add(
        total,
        logprobs.detach(),
        behaviour,
        advantages,
        torch.zeros(30),
        loss=loss,
        correction=correction,
        **how,
    )
    metrics = statistics.metrics()
    assert metrics["masked_fraction"] == float((factors == 0).double().mean())
    assert metrics["correction/own_fraction"] == metrics["masked_fraction"]
    assert metrics["correction/weight_mean"] == pytest.approx(float(factors.mean()))


WRONG: list[tuple[Field, str, str]] = [
    ("loss", "too_short", "shape (6,), not (7,)"),
    ("loss", "summed", "shape (), not (7,)"),
    ("loss", "detached", "detached"),
    ("loss", "as_list", "list"),
    ("loss", "infinite", "index 0 is inf"),
    ("loss", "derives", "backward"),
    ("loss", "in_place", "in place"),
    ("loss", "leaves", "SystemExit"),
    ("loss", "of_two", "one argument"),
    ("loss", "missing", "no attribute"),
    ("correction", "with_gradients", "carries gradients"),
    ("correction", "negative", "not be negative"),
    ("advantage", "pairs", "shape (3, 2), not (3,) or (7,)"),
]


@pytest.mark.parametrize(("field", "name", "why"), WRONG)
def test_a_bad_own_function_is_refused_when_it_is_loaded(field: Field, name: str, why: str) -> None:
    with pytest.raises(EntrypointError) as caught:
        OwnFunction(field, f"{OWN}:{name}")
    assert caught.value.field == f"algorithm.{field}"
    assert caught.value.value == f"{OWN}:{name}"
    assert why in caught.value.message


def test_a_fault_of_the_arguments_is_not_the_functions() -> None:
    logprobs, behaviour, advantages, weights, samples = tokens(6)
    behaviour[2] = torch.nan
    loss = OwnFunction("loss", f"{OWN}:ppo")
    total = grpo_loss_sum(
        logprobs, behaviour, advantages, weights, loss=loss, sequences=samples, **CLIP
    )
    assert torch.isnan(total)


def test_a_later_fault_names_field_and_function() -> None:
    logprobs, behaviour, advantages, weights, samples = tokens(6)
    loss = OwnFunction("loss", f"{OWN}:late")
    with pytest.raises(FunctionFault, match=f"{OWN}:late: its result at index 0 is inf") as caught:
        grpo_loss_sum(
            logprobs - 9.0, behaviour, advantages, weights, loss=loss, sequences=samples, **CLIP
        )
    assert caught.value.field == "algorithm.loss"


def test_every_loss_that_a_job_can_name_has_a_function_and_traits() -> None:
    assert LOSSES.keys() == LOSS_TRAITS.keys() == set(get_args(Loss))
    for name, loss in LOSSES.items():
        assert traits_of(loss) is LOSS_TRAITS[name]


def test_every_advantage_that_a_job_can_name_has_a_function_and_traits() -> None:
    assert {*ADVANTAGES, "gae"} == ADVANTAGE_TRAITS.keys() == set(get_args(Advantage))


def test_own_functions_couple_tokens_and_need_all_rows() -> None:
    built_in = AlgorithmFunctions(LOSSES["ppo_clip"], None, None)
    assert built_in.scales_with_advantage
    assert not built_in.couples_tokens
    assert AlgorithmFunctions(LOSSES["gspo"], None, None).couples_tokens
    own = AlgorithmFunctions(OwnFunction("loss", f"{OWN}:ppo"), None, None)
    assert not own.scales_with_advantage
    assert own.couples_tokens


def test_the_functions_of_the_docs_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    fields: list[Field] = ["loss", "correction", "advantage"]
    for field in fields:
        OwnFunction(field, f"of_the_docs:my_{field}")
    sys.modules.pop("of_the_docs")


def test_the_job_of_the_example_can_be_imported() -> None:
    spec = load_job(ROOT / "examples/own_algorithm/job.yaml")
    tried = try_imports(spec)
    assert {"algorithm.loss", "algorithm.correction", "algorithm.advantage"} <= set(tried)
    wrong = spec.model_copy(
        update={"algorithm": spec.algorithm.model_copy(update={"loss": f"{OWN}:detached"})}
    )
    with pytest.raises(JobSpecError, match=rf"algorithm\.loss = {OWN}:detached.*detached"):
        try_imports(wrong)
