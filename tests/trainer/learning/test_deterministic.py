"""Deterministic mode: the same samples give the same bits, however they arrive."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows

STEPS = 2


def _learner(tokenizer: Path, *, deterministic: bool = True, **sections: Any) -> Learner:
    pipeline = {
        "mode": "sync",
        "steps": 10,
        "queries_per_step": 4,
        "deterministic": deterministic,
    }
    spec = make_spec(tokenizer, pipeline=pipeline, **sections)
    return Learner(load_model("solver", spec.policies["solver"], 0), spec, "solver")


def _claims(rows: list[Row], dice: random.Random, *, whole: bool) -> list[list[Row]]:
    """Return a random partition into claims, in random order; `whole`: of whole groups."""
    units = [[row] for row in rows]
    if whole:
        names = sorted({row.group for row in rows})
        units = [[row for row in rows if row.group == name] for name in names]
    dice.shuffle(units)
    claims: list[list[Row]] = []
    while units:
        size = dice.randint(1, 3)
        claim = [row for unit in units[:size] for row in unit]
        claims.append(dice.sample(claim, len(claim)))
        units = units[size:]
    return claims


def _renamed(rows: list[Row], dice: random.Random) -> list[Row]:
    """Return the same content under other ids: turns are numbered in the order of their ends."""
    return [replace(row, sample_id=f"{dice.randint(0, 9)}/{row.sample_id}") for row in rows]


def _train(learner: Learner, steps: list[list[Row]], seed: int, *, whole: bool) -> None:
    dice = random.Random(seed)
    for version, rows in enumerate(steps):
        if dice.random() < 0.3:  # an attempt that was given up
            learner.accumulate(dice.sample(rows, dice.randint(1, len(rows))))
            learner.discard()
        for claim in _claims(_renamed(rows, dice), dice, whole=whole):
            learner.accumulate(claim)
        assert learner.apply(version).applied


def _state(learner: Learner) -> dict[str, torch.Tensor]:
    return {**learner.weights(), **learner.moments()}


@settings(
    deadline=None,
    max_examples=6,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 999),
    shape=st.builds(Shape, groups=st.integers(1, 5), members=st.integers(1, 6)),
    whole=st.booleans(),
    algorithm=st.fixed_dictionaries(
        {
            "normalize": st.sampled_from(["token", "sequence"]),
            "kl_coefficient": st.sampled_from([0.0, 0.1]),
            "advantage": st.sampled_from(["grpo", "rloo", "reinforce_plus_plus", "rae"]),
            "loss": st.sampled_from(["ppo_clip", "gspo", "cispo", "dppo_mask"]),
            "correction": st.sampled_from(["none", "sequence_masked"]),
        }
    ),
)
def test_order_and_partition_leave_no_trace(
    tokenizer: Path, seed: int, shape: Shape, whole: bool, algorithm: dict[str, Any]
) -> None:
    """Weights and moments after several steps, bit for bit; gradients with them."""
    learners = [_learner(tokenizer, algorithm=algorithm) for _ in range(3)]
    model = learners[0].model
    steps = [random_rows(model, seed * STEPS + i, shape) for i in range(STEPS)]
    states = []
    for i, learner in enumerate(learners):
        if learner.needs_reference:
            learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
        _train(learner, steps, seed + i, whole=whole)
        states.append(_state(learner))
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        assert all(torch.equal(t, other[name]) for name, t in states[0].items())


def test_order_leaves_a_trace_without_deterministic_mode(tokenizer: Path) -> None:
    """Otherwise the test above would prove nothing."""
    learners = [_learner(tokenizer, deterministic=False) for _ in range(2)]
    steps = [random_rows(learners[0].model, i, Shape(groups=5, members=6)) for i in range(STEPS)]
    for i, learner in enumerate(learners):
        _train(learner, steps, i, whole=False)
    one, two = (_state(learner) for learner in learners)
    assert not all(torch.equal(t, two[name]) for name, t in one.items())


def test_a_group_without_all_its_members_still_counts(tokenizer: Path) -> None:
    # The store delivers all of a step's samples; rewards may name more members than were delivered.
    learner = _learner(tokenizer)
    rows = random_rows(learner.model, 0, Shape(groups=3, members=6))
    names = [row.group for row in rows]
    rows.pop(names.index(max(names, key=names.count)))
    learner.accumulate(rows)
    applied = learner.apply(0)
    assert applied.applied
    assert applied.metrics["samples"] == len(rows)
    assert applied.metrics["grad_norm"] > 0


@pytest.mark.parametrize("position", [0, 1])
def test_a_gradient_out_of_range_skips_the_step(tokenizer: Path, position: int) -> None:
    learner = _learner(tokenizer, algorithm={"clip_high": 1e9})
    before = {name: t.clone() for name, t in _state(learner).items()}
    rows = random_rows(learner.model, 3, Shape(groups=2, members=6))
    groups = [[r for r in rows if r.group == name] for name in sorted({r.group for r in rows})]
    # A ratio of e^20 makes the sum of gradients exceed what fixed point holds.
    wild = [replace(row, behaviour=row.behaviour - np.float32(20.0)) for row in groups[position]]
    groups[position] = [
        replace(row, reward=float(i), group_rewards=tuple(map(float, range(len(wild) + 1))))
        for i, row in enumerate(wild)
    ]
    for group in groups:
        learner.accumulate(group)
    applied = learner.apply(0)
    assert not applied.applied
    assert "deterministic mode cannot add" in applied.reason
    assert all(torch.equal(t, before[name]) for name, t in _state(learner).items())
    # The next step shows no trace of it.
    learner.accumulate(rows)
    assert learner.apply(0).applied
