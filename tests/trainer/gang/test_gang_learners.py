"""Gangs train adapters and critics: the numbers, states and checkpoints of one device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.gang.gang import Gangs
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.ranks import Stopped
from services.trainer.learning.samples import Row
from services.trainer.state.training_state import StateStore, TrainingState
from tests.trainer.batches import Shape, random_rows
from tests.trainer.gang.test_gang import (
    PLAIN,
    assert_close,
    assert_equal,
    gang_spec,
    gangs,
    whole_state,
)
from troupe.job import JobSpec
from troupe.transfer import checksum_of

__all__ = ["gangs"]

CPU = torch.device("cpu")
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9}
LORA = {"rank": 3, "alpha": 6}
CRITIC: dict[str, Any] = {"advantage": "gae", "critic": {"optimizer": OPTIMIZER, "value_clip": 0.2}}


def learning_spec(tokenizer: Path, *, lora: bool, critic: bool, **sections: Any) -> JobSpec:
    algorithm = {"kl_coefficient": 0.1} | (CRITIC if critic else {})
    values = gang_spec(
        tokenizer, **{"algorithm": algorithm, "optimizer": OPTIMIZER} | sections
    ).model_dump()
    if lora:
        values["policies"]["solver"]["lora"] = LORA
    return JobSpec.model_validate(values)


def pair(gangs: Gangs, spec: JobSpec) -> tuple[GangLearner, Learner]:
    """Return the policy on two ranks and on one device, in float64."""
    own = spec.policies["solver"]
    if own.lora is None:
        model = load_model("solver", own, spec.seed)
    else:
        model = load_adapted("solver", own, spec.seed, CPU)
    one = Learner(model.double(), spec, "solver", **PLAIN)
    options = {"double": True, **PLAIN}
    return GangLearner(gangs, "job/solver", spec, "solver", options), one


def step_rows(spec: JobSpec, seed: int, groups: int = 2) -> list[Row]:
    model = load_model("solver", spec.policies["solver"].model_copy(update={"lora": None}), 0)
    return random_rows(model, seed, Shape(groups=groups, members=3))


def assert_same_step(gang: GangLearner, one: Learner, rows: list[Row], step: int) -> None:
    for learner in (gang, one):
        learner.accumulate(rows[:1])
        learner.accumulate(rows[1:])
    ours, theirs = gang.apply(step), one.apply(step)
    assert (ours.applied, ours.digest) == (theirs.applied, theirs.digest), ours.reason
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, value in theirs.metrics.items():
        if name != "train/seconds":
            assert ours.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.slow
def test_two_ranks_value_turns_as_one_device_does(tokenizer: Path, gangs: Gangs) -> None:
    critic = {**CRITIC["critic"], "values": "turn", "episodes": "agent", "gamma": 0.9}
    algorithm = {"advantage": "gae", "critic": critic}
    spec = learning_spec(tokenizer, lora=False, critic=True, algorithm=algorithm)
    gang, one = pair(gangs, spec)
    for step in range(2):
        assert_same_step(gang, one, step_rows(spec, step, groups=2), step)
    assert_close(gang, one, 1e-7)
    gang.release()


@pytest.mark.parametrize(
    ("lora", "critic"),
    [
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_two_ranks_learn_what_one_device_does(
    tokenizer: Path, tmp_path: Path, gangs: Gangs, lora: bool, critic: bool
) -> None:
    """Steps, a state in parts and back, and a suspension within a step, from and to one device."""
    spec = learning_spec(tokenizer, lora=lora, critic=critic)
    gang, one = pair(gangs, spec)
    assert (gang.vocabulary, gang.num_parameters) == (one.vocabulary, one.num_parameters)
    assert_equal(gang.weights(), dict(one.weights()))
    assert_equal(gang.moments(), dict(one.moments()))
    store = StateStore(tmp_path, "job", "solver")
    store.save(TrainingState(0, "a" * 32, one.snapshot()))
    for learner in (gang, one):
        learner.load_reference(store.load(0))
    for step in range(2):
        # One group has fewer rows than there are ranks.
        rows = step_rows(spec, step, groups=2 - step)
        assert_same_step(gang, one, rows, step)
    assert_close(gang, one, 1e-7)
    assert (
        any(float(t.abs().max()) > 1e-6 for n, t in gang.weights().items() if "lora_B" in n)
        or not lora
    )

    # In parts on the disk; whole when one device reads it.
    weights, moments = gang.weights(), gang.moments()
    store.save(TrainingState(2, "c" * 32, gang.snapshot()))
    read = store.load(2)
    assert_equal(read.weights, weights)
    assert_equal(read.moments, moments)
    one.load(read)

    # Suspended in the middle of a step, resumed on one device, and back.
    rows = step_rows(spec, 9, groups=3)
    gang.accumulate(rows[:5])
    tensors, values = gang.suspended()
    assert gang.release() == []
    one.adopt(whole_state(gangs, tensors), values)
    tensors, values = one.suspended()
    tensors = {name: t.clone() for name, t in tensors.items()}
    gang.adopt(tensors, values)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        gang.accumulate(rows[5:], stop)
    gang.adopt(tensors, values)
    assert_same_step(gang, one, rows[5:], 2)
    assert_close(gang, one, 1e-7)

    gang.load(store.load(2))
    assert_equal(gang.weights(), weights)
    assert_equal(gang.moments(), moments)
    store.save(TrainingState(3, "d" * 32, one.snapshot()))
    gang.load(store.load(3))
    assert_equal(gang.weights(), dict(one.weights()))
    assert_equal(gang.moments(), dict(one.moments()))
    gang.release()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_in_gangs_share_the_base_of_one_device(
    tokenizer: Path, tmp_path: Path, gangs: Gangs, dtype: str
) -> None:
    """Published, with the checksum of its base; two policies on one base; beginning with an
    adapter that was trained before."""
    first = learning_spec(tokenizer, lora=False, critic=False).policies["solver"]
    load_model("solver", first, 0).save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "tokenizer": str(tokenizer), "dtype": dtype}
    spec = learning_spec(tokenizer, lora=True, critic=False, model=model)
    one = Learner(load_adapted("solver", spec.policies["solver"], 0, CPU), spec, "solver", **PLAIN)
    gang = GangLearner(gangs, "job/solver", spec, "solver", PLAIN)
    other = GangLearner(gangs, "job/other", spec, "solver", PLAIN)
    assert gang.base is not None
    assert one.base is not None
    assert gang.base.checksum == other.base.checksum == one.base.checksum  # type: ignore[union-attr]
    assert checksum_of(gang.base.weights()) == one.base.checksum
    assert checksum_of(gang.published()) == checksum_of(one.published())
    rows = [row for row in step_rows(spec, 3) if row.response_length]
    for learner in (gang, one):
        learner.accumulate(rows)
    ours, theirs = gang.apply(0), one.apply(0)
    assert ours.metrics["grad_norm"] == pytest.approx(theirs.metrics["grad_norm"], rel=2e-2)
    assert checksum_of(other.published()) != checksum_of(gang.published())
    gang.release()
    other.release()


def test_advantages_use_the_values_of_all_ranks(tokenizer: Path, gangs: Gangs) -> None:
    """A chain's turns may be on different ranks: advantages need the values of all."""
    spec = learning_spec(tokenizer, lora=False, critic=True)
    gang, one = pair(gangs, spec)
    rows = step_rows(spec, 4, groups=1)
    chained = [
        Row(**{**vars(row), "trajectory": "t", "chain": "c", "agent": "agent0", "turn": turn})
        for turn, row in enumerate(rows)
    ]
    assert_same_step(gang, one, chained, 0)
    assert np.isfinite(one.apply(1).metrics.get("grad_norm", 0.0))
    gang.release()
