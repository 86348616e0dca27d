"""State in host memory (`trainer.offload`): the same results, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning import optimizer
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.optimizer import OffloadedAdamW
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows
from troupe.job import JobSpec

SHAPE = Shape(groups=4, members=4, prompt=12, response=10)


def learner_of(tokenizer: Path, how: str, *, lora: Any = None, **sections: Any) -> Learner:
    values = make_spec(tokenizer, **sections).model_dump(mode="json")
    values["policies"]["solver"]["trainer"]["offload"] = how
    values["policies"]["solver"]["lora"] = lora
    spec = JobSpec.model_validate(values)
    policy = spec.policies["solver"]
    if policy.lora is not None:
        model = load_adapted("solver", policy, 0, torch.device("cpu"))
    else:
        model = load_model("solver", policy, 0)
    return Learner(model, spec, "solver")


def step(learner: Learner, version: int) -> dict[str, float]:
    rows = random_rows(load_model("solver", learner._policy, 0), version, SHAPE)
    learner.accumulate(rows)
    applied = learner.apply(version)
    assert applied.applied, applied.reason
    return {n: v for n, v in applied.metrics.items() if n != "train/seconds"}


def assert_same(mine: Learner, theirs: Learner) -> None:
    for kind in ("weights", "moments", "published"):
        one, other = getattr(mine, kind)(), getattr(theirs, kind)()
        assert set(one) == set(other)
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("how", ["optimizer", "all"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": {"advantage": "gae"}},
        {"algorithm": {"kl_coefficient": 0.1}},
        {"optimizer": {"weight_decay": 0.1, "warmup_steps": 2}},
    ],
    ids=["plain", "critic", "reference", "decay"],
)
def test_steps_with_offload_equal_steps_without(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, how: str, sections: dict[str, Any]
) -> None:
    """Weights, moments, published weights and metrics of three steps, with parts that are smaller
    than tensors and hold several of them."""
    monkeypatch.setattr(optimizer, "OFFLOADED_PART", 1 << 10)
    mine, theirs = (learner_of(tokenizer, one, **sections) for one in (how, "none"))
    assert isinstance(mine._optimizer, OffloadedAdamW)
    if mine.needs_reference:
        for learner in (mine, theirs):
            learner.set_reference(learner.weights())
    for version in range(3):
        assert step(mine, version) == step(theirs, version)
        assert_same(mine, theirs)


def test_a_state_continues_with_offload_or_without(tokenizer: Path) -> None:
    """Saved with it and loaded without, vice versa, and suspended within a step."""
    expected = learner_of(tokenizer, "none")
    for version in range(3):
        step(expected, version)
    before = learner_of(tokenizer, "all")
    step(before, 0)
    after = learner_of(tokenizer, "none")
    after.restore(before.weights(), before.moments())
    step(after, 1)
    again = learner_of(tokenizer, "all")
    again.restore(after.weights(), after.moments())
    rows = random_rows(load_model("solver", again._policy, 0), 2, SHAPE)
    again.accumulate(rows)
    tensors, values = again.suspended()
    resumed = learner_of(tokenizer, "all")
    resumed.adopt({name: t.clone() for name, t in tensors.items()}, values)
    again.release()
    assert resumed.apply(2).applied
    assert_same(resumed, expected)


def test_an_adapter_trains_the_same_with_offload(tokenizer: Path) -> None:
    """Its base stays on the device."""
    mine, theirs = (learner_of(tokenizer, one, lora={"rank": 2}) for one in ("all", "none"))
    for version in range(2):
        step(mine, version)
        step(theirs, version)
        assert_same(mine, theirs)
