"""Passes side by side: the same gradient, with a fixed order of sums."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from services.trainer.learning.cpu_threads import CpuThreads, split_rows, worth_splitting
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.learning.ranks import Stopped
from tests.trainer.batches import random_rows
from tests.trainer.learning.test_lora import CPU, lora_spec
from tests.trainer.learning.test_passes import SHAPE, gradient, learner_of


def side_by_side(tokenizer: Path, members: int) -> tuple[Learner, torch.Tensor]:
    """Use this number of members with one torch thread each; more would wait for cores."""
    learner = learner_of(tokenizer, {})
    learner._passes._threads = CpuThreads(members) if members > 1 else None
    return learner, gradient(learner)


def test_passes_side_by_side_give_the_gradient_of_one_after_the_other(
    tokenizer: Path,
) -> None:
    """The loss has a divergence from the first version, so that it has twins, too."""
    _, alone = side_by_side(tokenizer, 1)
    learner, together = side_by_side(tokenizer, 3)
    _, again = side_by_side(tokenizer, 3)

    assert len(learner._passes._thread_models) == 3
    # Sums in another order: rounding depends on the largest terms.
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6 * float(alone.abs().max()))
    assert torch.equal(together, again)


def test_twins_follow_a_policy_that_moves_to_other_memory(tokenizer: Path) -> None:
    learner, first = side_by_side(tokenizer, 2)
    tensors, values = learner.suspended()
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in learner.release():
        tensor.fill_(float("nan"))
    learner.adopt(moved, values)
    learner.discard()

    assert torch.equal(gradient(learner), first)


@pytest.mark.parametrize("stopped", [False, True])
def test_twins_hold_no_memory_of_their_own(tokenizer: Path, stopped: bool) -> None:
    """A leaving policy releases its memory; an abandoned step leaves no gradients."""
    learner, _ = side_by_side(tokenizer, 2)
    if stopped:
        twin = learner._passes._thread_models[1]
        for _, own in twin.pairs:
            own.data, own.grad = torch.ones(3), torch.ones(3)
        stop = threading.Event()
        stop.set()
        with pytest.raises(Stopped):
            learner.accumulate(random_rows(learner.model, 1, SHAPE), stop)
    for seat in learner._passes._thread_models[1:]:
        assert seat.pairs
        assert all(own.nbytes == 0 and own.grad is None for _, own in seat.pairs)


def test_metrics_of_several_threads_equal_those_of_one(tokenizer: Path) -> None:
    found = [side_by_side(tokenizer, count)[0].apply(0).metrics for count in (1, 2)]

    for one, two in zip(*(sorted(metrics.items()) for metrics in found), strict=True):
        if "seconds" not in one[0]:
            assert two == (one[0], pytest.approx(one[1], rel=1e-4, abs=1e-6))


def test_a_crew_stops_between_passes(tokenizer: Path) -> None:
    learner, _ = side_by_side(tokenizer, 2)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        learner.accumulate(random_rows(learner.model, 1, SHAPE), stop)


def test_calls_share_the_callers_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        crew = CpuThreads(9)
        assert crew.run([torch.get_num_threads] * crew.size) == [2, 2, 2, 2]
        assert torch.get_num_threads() == 4
        with pytest.raises(ZeroDivisionError):
            crew.run([torch.get_num_threads, lambda: 1 // 0])
    finally:
        torch.set_num_threads(before)


def test_groups_stay_together_and_members_get_about_equally_many_tokens(tokenizer: Path) -> None:
    policy = learner_of(tokenizer, {})._policy
    rows = random_rows(load_model("solver", policy, 0), 3, SHAPE)
    hands = split_rows(rows, 2)

    assert sorted(i for hand in hands for i in hand) == list(range(len(rows)))
    groups = [{rows[i].group for i in hand} for hand in hands]
    assert not groups[0] & groups[1]
    tokens = [sum(len(rows[i].ids) for i in hand) for hand in hands]
    largest = max(
        sum(len(row.ids) for row in rows if row.group == name) for name in {r.group for r in rows}
    )
    assert max(tokens) - min(tokens) <= largest
    assert len(split_rows(rows[:1], 4)) == 1


def test_a_crew_is_used_for_small_models_on_several_threads() -> None:
    small = [torch.nn.Parameter(torch.zeros(1000))]
    with torch.device("meta"):
        large = [torch.nn.Parameter(torch.zeros(17 << 20))]

    assert worth_splitting(small, 2)
    assert not worth_splitting(small, 1)
    assert not worth_splitting(large, 2)


def test_models_with_dropout_are_computed_in_one_thread(tokenizer: Path) -> None:
    """Threads would draw from one generator, in no fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for dropout in (0.0, 0.1):
            spec = lora_spec(tokenizer, ["a"], dropout=dropout)
            model = load_adapted("a", spec.policies["a"], 0, CPU)
            assert (Learner(model, spec, "a")._passes._threads is None) == (dropout > 0)
    finally:
        torch.set_num_threads(before)
