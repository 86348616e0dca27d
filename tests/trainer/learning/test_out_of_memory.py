"""Passes that run out of memory are repeated as smaller ones; nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning import pass_budget
from services.trainer.learning.forward import Forward
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.ranks import is_out_of_memory
from services.trainer.learning.samples import Row
from tests.support.training import make_spec
from tests.trainer.batches import Shape, random_rows
from troupe.rpc import Aborted, FailedPrecondition

BUDGET = 96
SHAPE = Shape(groups=4, members=4, prompt=12, response=10)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads would divide the rows, and each would run out of memory separately."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def allocate_too_much() -> None:
    """Raise the error of torch's own allocator, for 4 EiB."""
    torch.empty(1 << 62, dtype=torch.uint8)


class Room:
    """Memory for passes of at most `tokens` tokens: larger ones fail in the forward pass, or in the
    backward pass once `after` parameters have their gradients."""

    def __init__(self, tokens: int, after: int | None = None) -> None:
        self.tokens, self.after = tokens, after
        self.failed = 0

    def put_under(self, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
        real: Callable[..., Any] = Forward.loss
        done = 0
        small = True

        def loss(forward: Forward, batch: Any, *args: Any, **how: Any) -> Any:
            nonlocal done, small
            done, small = 0, batch.input_ids.numel() <= self.tokens
            if not small and self.after is None:
                self.failed += 1
                allocate_too_much()
            return real(forward, batch, *args, **how)

        def count(_: torch.Tensor) -> None:
            nonlocal done
            done += 1
            if not small and self.after is not None and done > self.after:
                self.failed += 1
                allocate_too_much()

        monkeypatch.setattr(Forward, "loss", loss)
        for parameter in learner.model.parameters():
            parameter.register_post_accumulate_grad_hook(count)


def learner_of(tokenizer: Path, budget: int, **sections: Any) -> Learner:
    spec = make_spec(tokenizer, **sections)
    model = load_model("solver", spec.policies["solver"], 0)
    return Learner(model, spec, "solver", forward_tokens=budget, skip_zero_advantages=False)


def outcome(learner: Learner, micro_batches: list[list[Row]]) -> tuple[Any, dict[str, float]]:
    """Return weights after a step, and its metrics without seconds."""
    for rows in micro_batches:
        learner.accumulate(rows)
    applied = learner.apply(0)
    assert applied.applied, applied.reason
    weights = {name: t.clone() for name, t in learner.weights().items()}
    return weights, {n: v for n, v in applied.metrics.items() if n != "train/seconds"}


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.parametrize("after", [None, 0, 7])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"pipeline": {"steps": 4, "queries_per_step": 2, "deterministic": True}},
        {"algorithm": {"advantage": "gae"}},
    ],
    ids=["plain", "deterministic", "critic"],
)
def test_a_micro_batch_is_repeated_as_if_passes_had_been_smaller(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, after: int | None, sections: dict[str, Any]
) -> None:
    """Bit for bit: weights, and metrics except for the ones about memory shortage."""
    learner = learner_of(tokenizer, BUDGET, **sections)
    # Deterministic passes are over one group each.
    alone = "pipeline" in sections
    rows = random_rows(learner.model, 1, replace(SHAPE, groups=1) if alone else SHAPE)
    room = Room(20 if alone else 40, after)
    with monkeypatch.context() as patch:
        room.put_under(learner, patch)
        weights, metrics = outcome(learner, [rows])
    assert room.failed
    assert metrics.pop("train/out_of_memory") == room.failed
    smaller = metrics.pop("train/forward_tokens")
    assert smaller < BUDGET
    before = learner_of(tokenizer, int(smaller), **sections)
    others, expected = outcome(before, [rows])
    assert same(weights, others)
    assert metrics == expected


def test_gradients_of_earlier_micro_batches_stay_exact(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with a host: gradients are copied before a pass that is larger than any so far;
    the step of such a micro-batch is that of smaller passes throughout."""
    monkeypatch.setattr(pass_budget, "COPIED", {"cpu"})
    learner = learner_of(tokenizer, BUDGET)
    small = random_rows(learner.model, 2, Shape(groups=1, members=2, prompt=4, response=3))
    large = random_rows(learner.model, 3, SHAPE)
    with monkeypatch.context() as patch:
        room = Room(40, 5)
        room.put_under(learner, patch)
        weights, metrics = outcome(learner, [small, large, small])
    assert room.failed
    fewer = int(metrics["train/forward_tokens"])
    assert sum(len(row.ids) for row in small) <= fewer  # computed alike
    others, _ = outcome(learner_of(tokenizer, fewer), [small, large, small])
    assert same(weights, others)


def test_gradients_are_copied_only_before_a_pass_that_is_larger_than_any_so_far(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole micro-batches exceed the budget of a pass; their passes do not."""
    monkeypatch.setattr(pass_budget, "COPIED", {"cpu"})
    copies: list[list[int]] = []
    real = pass_budget.PassBudget._copied

    def copied(budget: Any, parameters: Any) -> Any:
        found = real(budget, parameters)
        copies.append([one.data_ptr() for one in found if one is not None])
        return found

    monkeypatch.setattr(pass_budget.PassBudget, "_copied", copied)
    learner = learner_of(tokenizer, 64)
    short = [random_rows(learner.model, seed, SHAPE) for seed in range(6)]
    for step in range(3):
        for rows in short:
            learner.accumulate(rows)
        assert learner.apply(step + 1).applied
    assert copies == [], "the first micro-batch of all has the largest pass"
    growing = learner_of(tokenizer, 10_000)
    for seed, groups in enumerate((1, 2, 4, 4, 1)):
        growing.accumulate(random_rows(growing.model, seed, replace(SHAPE, groups=groups)))
    assert len(copies) == 2
    assert copies[0] == copies[1], "into the same memory"
    assert copies[0]
    budget = growing._passes.budget
    assert budget._memory
    growing.discard()
    assert not budget._memory, "a step that is given up keeps no copy"
    assert budget._saved is None


def test_a_step_begins_again_where_gradients_cannot_be_copied(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: the orchestrator repeats the step after this error, in smaller passes."""
    learner = learner_of(tokenizer, BUDGET)
    small = random_rows(learner.model, 2, Shape(groups=1, members=2, prompt=4, response=3))
    large = random_rows(learner.model, 3, SHAPE)
    with monkeypatch.context() as patch:
        Room(40, 5).put_under(learner, patch)
        learner.accumulate(small)
        with pytest.raises(Aborted) as raised:
            learner.accumulate(large)
        assert raised.value.kind == "out_of_memory"
        learner.discard()
        weights, metrics = outcome(learner, [large])
    others, _ = outcome(learner_of(tokenizer, int(metrics["train/forward_tokens"])), [large])
    assert same(weights, others)


def test_a_row_that_does_not_fit_alone_is_named(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names its length, the device's memory, the needed memory and remedies."""
    learner = learner_of(tokenizer, BUDGET)
    rows = random_rows(learner.model, 1, SHAPE)
    longest = max(len(row.ids) for row in rows)
    with monkeypatch.context() as patch:
        Room(4).put_under(learner, patch)
        with pytest.raises(FailedPrecondition) as raised:
            learner.accumulate(rows)
    error = raised.value
    assert error.kind == "row_out_of_memory"
    assert f"a row of {longest} tokens" in error.message
    assert "by the memory model" in error.message
    for remedy in ("trainer.gang", "activation_checkpointing", "max_tokens"):
        assert remedy in str(error)


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    """Only the allocators' own errors are."""
    with pytest.raises(RuntimeError) as raised:
        allocate_too_much()
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))
