"""The divergence from the first version as a part of the reward, against plain references."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.learning.samples import Row
from tests.support.training import make_spec
from tests.trainer.batches import random_rows, response_logprobs
from tests.trainer.learning.test_supervised import gradient

BETA = 0.3


def learner_of(tokenizer: Path, mode: str = "sync", **algorithm: Any) -> Learner:
    pipeline = {"steps": 10, "queries_per_step": 2, "micro_batch_samples": 4, "mode": mode}
    spec = make_spec(tokenizer, algorithm=algorithm, pipeline=pipeline)
    model = load_model("solver", spec.policies["solver"], 0).double()
    return Learner(model, spec, "solver", forward_tokens=60)


def with_reference(learner: Learner, by: float = 1.0) -> Any:
    """Another model, which becomes the learner's first version."""
    other = copy.deepcopy(learner.model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    learner.set_reference(dict(other.state_dict()))
    return other


def divergence(reference: Any, row: Row) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        theirs = response_logprobs(reference, row)[0].numpy()
    found: np.ndarray[Any, Any] = row.behaviour.astype(np.float64) - theirs
    return found


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "rae"])
@pytest.mark.parametrize("brings", [False, True])
def test_groups_compare_rewards_without_the_divergence(
    tokenizer: Path, advantage: str, brings: bool
) -> None:
    mine = learner_of(tokenizer, advantage=advantage, kl_coefficient=BETA, kl_in="reward")
    plain = learner_of(tokenizer, advantage=advantage)
    reference = with_reference(mine)
    rows = random_rows(mine.model, 1)
    net = {r.sample_id: r.reward - BETA * divergence(reference, r).sum() for r in rows}
    given = [
        replace(
            row,
            reward=net[row.sample_id],
            group_rewards=tuple(sorted(net[o.sample_id] for o in rows if o.group == row.group)),
        )
        for row in rows
    ]
    expected = gradient(plain, given, [])
    if brings:
        for k, row in enumerate(rows):
            with torch.no_grad():
                theirs = response_logprobs(reference, row)[0].float().numpy()
            rows[k] = replace(row, reference=theirs)
        mine.set_reference(dict(mine.model.state_dict()))  # not used
    found = gradient(mine, rows, [4])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    without = gradient(plain, rows, [])
    assert float((found - without).norm()) > 1e-2 * float(without.norm())


def test_micro_batches_add_up_and_the_metrics_are_those_of_the_task(tokenizer: Path) -> None:
    learner = learner_of(tokenizer, mode="micro_batch", kl_coefficient=BETA, kl_in="reward")
    with_reference(learner)
    rows = random_rows(learner.model, 2)
    whole = gradient(learner, rows, [])
    for cuts in ([3], list(range(1, len(rows)))):
        found = gradient(learner, rows, cuts)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)
    learner.discard()
    learner.accumulate(rows)
    metrics = learner.apply(0).metrics
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(r.reward for r in rows))
    assert metrics["kl"] > 0


def test_a_critic_is_paid_token_by_token(tokenizer: Path) -> None:
    learner = learner_of(
        tokenizer,
        advantage="gae",
        critic={"gae_lambda": 1.0},
        kl_coefficient=BETA,
        kl_in="reward",
    )
    reference = with_reference(learner)
    rows = [replace(row, trajectory=f"t{k}") for k, row in enumerate(random_rows(learner.model, 3))]
    batch = learner._step._estimated(rows, None)
    for row, before in zip(batch.rows, rows, strict=True):
        earned = -BETA * divergence(reference, before)
        if len(earned):
            earned[-1] += before.reward
        # The head of a new critic is zero: what is left is the return from each token on.
        expected = np.cumsum(earned[::-1])[::-1]
        assert row.advantages is not None
        np.testing.assert_allclose(row.advantages, expected, rtol=1e-5, atol=1e-5)


def test_the_divergence_in_the_reward_is_not_in_the_loss(tokenizer: Path) -> None:
    """Where all divergences are equal, groups do not see them; the loss would."""
    learner = learner_of(
        tokenizer, advantage="dr_grpo", kl_coefficient=BETA, kl_in="reward", normalize="sequence"
    )
    plain = learner_of(tokenizer, advantage="dr_grpo", normalize="sequence")
    reference = with_reference(learner, by=0.02)
    rows = [row for row in random_rows(learner.model, 4) if row.response_length]
    moved = []
    for row in rows:
        gap = divergence(reference, row)
        moved.append(
            replace(row, behaviour=row.behaviour - (gap - 1 / len(gap)).astype(np.float32))
        )
    # Groups must be whole.
    sizes = {row.group: sum(one.group == row.group for one in moved) for row in moved}
    rewards = {g: tuple(sorted(o.reward for o in moved if o.group == g)) for g in sizes}
    moved = [replace(row, group_rewards=rewards[row.group]) for row in moved]
    torch.testing.assert_close(
        gradient(learner, moved, []), gradient(plain, moved, []), rtol=1e-4, atol=1e-5
    )
