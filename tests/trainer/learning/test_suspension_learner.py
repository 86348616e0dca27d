"""A learner that stops in the middle of a step and continues elsewhere: the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.samples import Row
from services.trainer.state import parameter_memory
from services.trainer.state.parameter_memory import MovableParameters
from services.trainer.state.suspension import ParameterPool
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows
from troupe.job import JobSpec

PIPELINE = {"steps": 10, "queries_per_step": 2, "micro_batch_samples": 4}
CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "deterministic": {"pipeline": {**PIPELINE, "deterministic": True}},
    "whole_step": {
        "algorithm": {"advantage": "reinforce_plus_plus"},
        "pipeline": {**PIPELINE, "mode": "sync"},
    },
    "rae": {"algorithm": {"advantage": "rae"}},
    "kl_and_entropy": {"algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}},
    "adapter": {},
    # The trial of packing must not depend on the weights.
    "adapter_in_half_precision": {},
    "adapter_with_critic": {"algorithm": {"advantage": "gae"}},
    "adapter_with_reference": {"algorithm": {"kl_coefficient": 0.1}},
    "teacher": {
        "frozen": ("wise",),
        "agents": {name: {"policy": name} for name in ("solver", "wise")},
        "algorithm": {"distillation": {"teachers": {"solver": "wise"}}},
    },
    "updates": {
        "algorithm": {
            "advantage": "gae",
            "epochs": 2,
            "minibatches": 2,
            "old_logprobs": "recomputed",
            "correction": "truncated",
        },
        "pipeline": {**PIPELINE, "mode": "sync"},
    },
}


def spec_of(tokenizer: Path, variant: str) -> JobSpec:
    values = make_spec(tokenizer, **VARIANTS[variant]).model_dump(mode="json")
    if "adapter" in variant:
        values["policies"]["solver"]["lora"] = {"rank": 4, "alpha": 8}
    if "half" in variant:
        values["policies"]["solver"]["model"]["dtype"] = "bfloat16"
    return JobSpec.model_validate(values)


def make(spec: JobSpec) -> Learner:
    policy = spec.policies["solver"]
    made = (
        load_adapted("solver", policy, 0, CPU) if policy.lora else load_model("solver", policy, 0)
    )
    learner = Learner(made, spec, "solver")
    if learner.needs_reference:
        learner.set_reference({name: t.clone() for name, t in learner.weights().items()})
    return learner


def steps(rows: list[Row]) -> list[list[list[Row]]]:
    """Return two steps of three micro-batches, which split groups."""
    half = len(rows) // 2
    return [[some[0::3], some[1::3], some[2::3]] for some in (rows[:half], rows[half:])]


def bits(learner: Learner) -> dict[str, bytes]:
    parts = learner.weights() | learner.moments()
    return {name: t.numpy().tobytes() for name, t in parts.items()}


def moved(learner: Learner, spec: JobSpec, pool: ParameterPool) -> Learner:
    """Return the learner after a way through another process: bytes and JSON."""
    tensors, values = learner.suspended()
    stored = {name: t.detach().clone() for name, t in tensors.items()}
    document = json.dumps(values)
    pool.give_back(learner.release())
    elsewhere = make(spec)
    elsewhere.adopt(pool.copy_to_device(stored), json.loads(document))
    return elsewhere


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_moved_between_any_two_micro_batches_ends_with_the_same_bits(
    tokenizer: Path, variant: str
) -> None:
    spec = spec_of(tokenizer, variant)
    rows = random_rows(load_model("solver", spec.policies["solver"], 0), 3, Shape(groups=6))
    still, travels = make(spec), make(spec)
    pool = ParameterPool(CPU)
    for version, batches in enumerate(steps(rows)):
        for batch in batches:
            still.accumulate(batch)
            travels.accumulate(batch)
            travels = moved(travels, spec, pool)
        one, other = still.apply(version), travels.apply(version)
        same = [
            {k: v for k, v in applied.metrics.items() if "seconds" not in k}
            for applied in (one, other)
        ]
        assert same[0] == same[1]
        assert (one.applied, one.digest) == (True, other.digest)
        assert bits(still) == bits(travels)


def test_a_suspended_learner_holds_no_memory_and_can_come_back(tokenizer: Path) -> None:
    spec = make_spec(tokenizer)
    learner = make(spec)
    rows = random_rows(learner.model, 1)
    learner.accumulate(rows)
    learner.apply(0)
    before = bits(learner)
    tensors, values = learner.suspended()
    pool = ParameterPool(CPU)
    stored = {name: t.detach().clone() for name, t in tensors.items()}
    left = learner.release()
    assert sum(p.numel() for p in learner.model.parameters()) == 0
    assert learner.moments() == {}
    places = {t.data_ptr() for t in left}
    pool.give_back(left)
    learner.adopt(pool.copy_to_device(stored), values)
    # In the memory that it had left.
    assert {p.data_ptr() for p in learner.model.parameters()} <= places
    assert bits(learner) == before


@pytest.mark.parametrize("variant", ["kl_and_entropy", "adapter_with_reference", "teacher"])
def test_frozen_models_leave_the_device_and_come_back(
    tokenizer: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, as if it were another device."""
    spec = spec_of(tokenizer, variant)
    still, travels = make(spec), make(spec)
    rows = random_rows(load_model("solver", spec.policies["solver"], 0), 3, Shape(groups=6))
    for version, batches in enumerate(steps(rows)):
        for batch in batches:
            still.accumulate(batch)
            travels.accumulate(batch)
            tensors, values = travels.suspended()
            stored = {name: t.detach().clone() for name, t in tensors.items()}
            travels.release()
            with monkeypatch.context() as patched:
                patched.setattr(parameter_memory, "is_host", lambda _: False)
                travels._passes.leave()
            frozen = travels._passes._frozen
            assert frozen._away or variant == "adapter_with_reference"
            travels.adopt(stored, values)
            assert not frozen._away
        assert still.apply(version).applied
        assert travels.apply(version).applied
        assert bits(still) == bits(travels)


def test_frozen_parameters_are_copied_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.rand(3)), torch.nn.Parameter(torch.rand(2, 2))]
    values = [p.detach().clone() for p in parameters]
    frozen, trained = (MovableParameters(parameters[:1], frozen=one) for one in (True, False))
    here = [p.data_ptr() for p in parameters]
    frozen.leave()
    assert [p.data_ptr() for p in parameters] == here  # a CPU is the host
    monkeypatch.setattr(parameter_memory, "is_host", lambda _: False)
    frozen = MovableParameters([*parameters, parameters[0]], frozen=True)
    places = set()
    for _ in range(2):
        frozen.leave()
        assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
        places.add(parameters[0].data_ptr())
        frozen.arrive()
        assert parameters[0].data_ptr() not in places
    assert len(places) == 1
    assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
    for value in (1.0, 2.0):
        with torch.no_grad():
            parameters[0].fill_(value)
        trained.leave()
        trained.arrive()
        assert torch.equal(parameters[0], torch.full((3,), value))


def test_kept_memory_is_bounded_and_never_shared() -> None:
    pool = ParameterPool(CPU, limit=64)
    whole = torch.zeros(8)
    pool.give_back([whole, torch.zeros(100), torch.zeros(16)[:8], torch.zeros(4, 2).t()])
    first = pool.copy_to_device({"a": torch.ones(8)})["a"]
    second = pool.copy_to_device({"a": torch.ones(8)})["a"]
    assert first.data_ptr() == whole.data_ptr()
    assert second.data_ptr() != whole.data_ptr()
    assert torch.equal(first, torch.ones(8))


def test_weights_of_another_model_are_refused(tokenizer: Path) -> None:
    spec = make_spec(tokenizer)
    learner = make(spec)
    tensors, values = learner.suspended()
    name = next(name for name in tensors if name.startswith("weights/"))
    before = bits(learner)
    fewer = {key: t for key, t in tensors.items() if key != name}
    with pytest.raises(ValueError, match="missing"):
        learner.adopt(fewer, values)
    assert bits(learner) == before
