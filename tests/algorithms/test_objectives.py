"""Objectives and sequence sums: checked by hand and against loops, with their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.algorithms.corrections import sequence_ratio
from troupe.algorithms.logprobs import sequence_means, sequence_sums
from troupe.algorithms.losses import Normalize, grpo_loss_sum, normalizer, token_weights
from troupe.algorithms.objectives import clipped_loss, importance_ratio, is_outside
from troupe.algorithms.statistics import TokenStatistics
from troupe.job.sections.algorithm import Correction, Loss

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
LOSSES: list[Loss] = ["ppo_clip", "gspo", "cispo", "dppo_mask"]


def _f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 99))
def test_sums_and_means_of_sequences(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    # Names need not be small, ascending or distinct from the names of distant sequences.
    steps = torch.randint(1, 4, (len(lengths),), generator=generator)
    names = torch.cumsum(steps, 0) % 7
    sequences = torch.repeat_interleave(names, torch.tensor(lengths, dtype=torch.int64))
    sums = [part.sum() for part in values.split(lengths)] if lengths else []
    want = [s for s, n in zip(sums, lengths, strict=True) for _ in range(n)]
    means = [s / n for s, n in zip(sums, lengths, strict=True) for _ in range(n)]
    if lengths:
        torch.testing.assert_close(sequence_sums(values, sequences), torch.stack(want))
        torch.testing.assert_close(sequence_means(values, sequences), torch.stack(means))
    else:
        assert sequence_sums(values, sequences).shape == (0,)


def test_gspo_by_hand() -> None:
    """Two sequences: s = sqrt(2 * 0.5) = 1 is kept, s = 1.5 is clipped; no token is on its own."""
    lp = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    mu = -_f64(2.0, 0.5, 1.5).log()
    sequences = torch.tensor([0, 0, 1])
    loss = grpo_loss_sum(
        lp, mu, _f64(1.0, 1.0, 1.0), torch.ones(3), **CLIP, loss="gspo", sequences=sequences
    )
    assert loss.item() == pytest.approx(-(1.0 + 1.0 + 1.2))
    (grad,) = torch.autograd.grad(loss, lp)
    # s A / |y| for each of the sequence's |y| tokens: one for each token.
    torch.testing.assert_close(grad, _f64(-1.0, -1.0, 0.0))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_a_dual_clip_bounds_what_a_bad_token_costs_and_ends_its_gradient(loss: Loss) -> None:
    """max(min(rho A, clip(rho) A), 3 A) for A < 0, one token per sample."""
    ratios, advantages = _f64(5.0, 2.0, 0.5, 5.0, 5.0), _f64(-1.0, -1.0, -1.0, 1.0, 0.0)
    logprobs = torch.log(ratios).requires_grad_()
    given: dict[str, Any] = {"loss": loss, "sequences": torch.arange(5), **CLIP}
    behaviour, weights = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    for dual, objective, slopes in (
        (3.0, [-3.0, -2.0, -0.8, 1.2, 0.0], [0.0, -2.0, 0.0, 0.0, 0.0]),
        (None, [-5.0, -2.0, -0.8, 1.2, 0.0], [-5.0, -2.0, 0.0, 0.0, 0.0]),
    ):
        total = grpo_loss_sum(logprobs, behaviour, advantages, weights, dual_clip=dual, **given)
        assert total.item() == pytest.approx(-sum(objective))
        (found,) = torch.autograd.grad(-total, logprobs)
        torch.testing.assert_close(found, _f64(*slopes))
        statistics = TokenStatistics()
        statistics.add(
            total, logprobs, behaviour, advantages, torch.zeros(5), dual_clip=dual, **given
        )
        clipped = 3 if dual else 2
        assert statistics.metrics()["clip_fraction"] == pytest.approx(clipped / 5)


def test_cispo_by_hand() -> None:
    lp = _f64(-1.0, -1.0, -1.0).requires_grad_()
    mu = lp.detach() - _f64(0.1, 1.0, 9.0).log()
    loss = grpo_loss_sum(lp, mu, _f64(1.0, -2.0, 3.0), torch.ones(3), **CLIP, loss="cispo")
    (grad,) = torch.autograd.grad(loss, lp)
    # Every token keeps a gradient; the last one's weight is capped at 1 + h.
    torch.testing.assert_close(grad, _f64(-0.1, 2.0, -1.2 * 3.0))
    assert loss.item() == pytest.approx(0.1 - 2.0 + 1.2 * 3.0)


def test_dppo_masks_by_probability_and_not_by_ratio() -> None:
    mu = _f64(0.3, 0.3, 1e-6, 0.9, 0.9).log()
    # Moved by 0.3; by 0.3 against the advantage; 50 times a rare token, whose weight is bounded;
    # by -0.4 with and against.
    pi = _f64(0.6, 0.6, 5e-5, 0.5, 0.5).log().requires_grad_()
    advantages = _f64(1.0, -1.0, 1.0, -1.0, 1.0)
    assert is_outside(pi, mu, advantages, 0.2, 0.2).tolist() == [True, False, False, True, False]
    assert is_outside(pi, mu, advantages, 0.5, 0.2).tolist() == [True, False, False, False, False]
    loss = grpo_loss_sum(pi, mu, advantages, torch.ones(5), **CLIP, loss="dppo_mask")
    (grad,) = torch.autograd.grad(loss, pi)
    torch.testing.assert_close(grad, _f64(0.0, 2.0, -20.0, 0.0, -0.5 / 0.9))
    assert clipped_loss(_f64(50.0), _f64(1.0), 0.2, 0.2).item() == pytest.approx(-1.2)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["none", "masked", "sequence_masked"])
def test_on_policy_every_loss_is_reinforce(loss: Loss, correction: Correction) -> None:
    torch.manual_seed(0)
    lp = (-torch.rand(9, dtype=torch.float64)).requires_grad_()
    lengths = [2, 3, 4]
    # One advantage per sequence, as in trainers.
    advantages = torch.repeat_interleave(torch.randn(3).double(), torch.tensor(lengths))
    sequences = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    weights = token_weights(lengths, "sequence")
    total = grpo_loss_sum(
        lp,
        lp.detach(),
        advantages,
        weights,
        **CLIP,
        loss=loss,
        sequences=sequences,
        correction=correction,
    )
    (grad,) = torch.autograd.grad(total, lp)
    torch.testing.assert_close(grad, -advantages * weights)


def test_sequence_masked_by_hand() -> None:
    """Products 4 and 1.5: the first sequence goes as a whole, the other weighs 1.5 throughout."""
    lp = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    mu = -_f64(4.0, 1.0, 3.0, 0.5).log()
    sequences = torch.tensor([5, 5, 2, 2])
    torch.testing.assert_close(sequence_ratio(lp, mu, sequences), _f64(4.0, 4.0, 1.5, 1.5))
    how: dict[str, Any] = {"sequences": sequences, "correction": "sequence_masked"}
    ones = torch.ones(4, dtype=torch.float64)
    loss = grpo_loss_sum(lp, mu, ones, ones, **CLIP, **how)
    (grad,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(grad, _f64(0.0, 0.0, -1.5, -1.5))
    # Other losses keep their own weights.
    loss = grpo_loss_sum(lp, mu, ones, ones, **CLIP, **how, loss="cispo")
    (grad,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(grad, _f64(0.0, 0.0, -1.2, -0.5))


def test_losses_refuse_corrections_that_contradict_them() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="needs `sequences`"):
        grpo_loss_sum(x, x, x, x, **CLIP, loss="gspo")
    with pytest.raises(ValueError, match="needs `sequences`"):
        grpo_loss_sum(x, x, x, x, **CLIP, correction="sequence_masked")
    with pytest.raises(ValueError, match="weighs tokens by pi/mu itself"):
        grpo_loss_sum(x, x, x, x, **CLIP, loss="cispo", correction="truncated")


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["none", "masked", "sequence_masked"])
def test_micro_batches_add_up(normalize: Normalize, loss: Loss, correction: Correction) -> None:
    torch.manual_seed(5)
    lengths = [3, 1, 4, 2, 5]
    lp, mu = -torch.rand(2, 15, dtype=torch.float64)
    lp.requires_grad_()
    advantages = torch.repeat_interleave(torch.randn(5).double(), torch.tensor(lengths))
    sequences = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def gradient(first: int, last: int) -> torch.Tensor:
        at = slice(bounds[first], bounds[last])
        weights = token_weights(lengths[first:last], normalize)
        how: dict[str, Any] = {"loss": loss, "correction": correction, "sequences": sequences[at]}
        total = grpo_loss_sum(lp[at], mu[at], advantages[at], weights, **CLIP, **how)
        return torch.autograd.grad(total, lp)[0]

    parts = gradient(0, 2) + gradient(2, 3) + gradient(3, 5)
    torch.testing.assert_close(parts, gradient(0, 5), rtol=1e-12, atol=1e-14)
    share = [normalizer(lengths[a:b], normalize, 8) for a, b in ((0, 2), (2, 3), (3, 5), (0, 5))]
    assert sum(share[:3]) == share[3]
    assert normalizer([3, 0, 1], "constant", 8) == 16


def test_mismatch_metrics_by_hand() -> None:
    ratios = _f64(0.5, 1.0, 2.0, 4.0)
    total = TokenStatistics()
    for part in ratios.split(2):
        zeros = torch.zeros(2, dtype=torch.float64)
        total.add(torch.zeros(()), part.log(), zeros, zeros + 1, zeros, **CLIP)
    metrics = total.metrics()
    assert metrics["importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["importance_sampling_ratio/mean"] == pytest.approx(7.5 / 4)
    assert metrics["importance_sampling_ratio/max"] == pytest.approx(4.0)
    assert metrics["effective_sample_size"] == pytest.approx(7.5**2 / (4 * 21.25))
    k3 = sum(r - math.log(r) - 1 for r in ratios.tolist()) / 4
    assert metrics["k3_kl"] == pytest.approx(k3)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["masked_fraction"] == 0.0
    assert TokenStatistics().metrics()["effective_sample_size"] == 0.0


def test_masked_fraction_counts_each_token_once() -> None:
    """One token that the loss masks, two that the correction masks, one of them the same."""
    pi, mu = _f64(0.9, 0.5, 0.001, 0.5).log(), _f64(0.3, 0.5, 0.5, 0.5).log()
    ones = torch.ones(4, dtype=torch.float64)
    how: dict[str, Any] = {"loss": "dppo_mask", "correction": "masked", "correction_cap": 2.0}
    total = TokenStatistics()
    total.add(torch.zeros(()), pi, mu, ones, ones, **CLIP, **how)
    metrics = total.metrics()
    assert metrics["clip_fraction"] == 0.25
    assert metrics["correction/masked_fraction"] == 0.5
    assert metrics["masked_fraction"] == 0.5
    assert metrics["correction/weight_mean"] == 0.5
    assert importance_ratio(pi, mu).max() == pytest.approx(3.0)
