"""Losses against scalar references; micro-batch gradients against the full batch's."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.algorithms.advantages import group_advantages
from troupe.algorithms.logprobs import selective_log_softmax
from troupe.algorithms.losses import Normalize, grpo_loss_sum, k3_kl, normalizer, token_weights
from troupe.algorithms.objectives import clipped_loss, importance_ratio, is_clipped
from troupe.algorithms.statistics import TokenStatistics

numbers = st.floats(-3, 3)


@settings(deadline=None)
@given(numbers, numbers, numbers, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_clipped_loss_of_one_token(
    lp: float, old: float, advantage: float, low: float, high: float
) -> None:
    ratio = math.exp(lp - old)
    limited = min(max(ratio, 1 - low), 1 + high)
    expected = -min(ratio * advantage, limited * advantage)
    x = torch.tensor([lp], dtype=torch.float64, requires_grad=True)
    rho = importance_ratio(x, torch.tensor([old], dtype=torch.float64))
    a = torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_loss(rho, a, low, high)
    assert loss.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    clipped = bool(is_clipped(rho, a, low, high))
    # The policy gradient rho A grad log pi, unless the clip removes it.
    assert grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_on_policy_gradient_is_reinforce() -> None:
    lp = torch.randn(9, dtype=torch.float64, requires_grad=True)
    advantages, weights = torch.randn(2, 9, dtype=torch.float64)
    loss = grpo_loss_sum(lp, lp.detach(), advantages, weights, clip_low=0.2, clip_high=0.2)
    (grad,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(grad, -advantages * weights)


def test_k3_is_an_unbiased_estimate_of_kl() -> None:
    torch.manual_seed(1)
    pi = torch.log_softmax(torch.randn(12, dtype=torch.float64), -1)
    ref = torch.log_softmax(torch.randn(12, dtype=torch.float64), -1)
    k3 = k3_kl(pi, ref)
    assert (k3 >= 0).all()
    torch.testing.assert_close((pi.exp() * k3).sum(), (pi.exp() * (pi - ref)).sum())
    assert k3_kl(pi, pi).abs().max() == 0


def test_all_terms_pass_gradcheck() -> None:
    torch.manual_seed(3)
    old, ref, advantages, weights = torch.randn(4, 5, dtype=torch.float64)
    targets = torch.randint(6, (5,))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        lp, entropy = selective_log_softmax(logits, targets)
        return grpo_loss_sum(
            lp,
            old,
            advantages,
            weights.abs(),
            clip_low=0.2,
            clip_high=0.3,
            reference_logprobs=ref,
            kl_coefficient=0.1,
            entropy=entropy,
            entropy_coefficient=0.01,
        )

    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, logits)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8))
def test_weights_add_up_to_the_normalizer(lengths: list[int]) -> None:
    modes: list[Normalize] = ["token", "sequence"]
    for mode in modes:
        weights = token_weights(lengths, mode)
        assert weights.shape == (sum(lengths),)
        assert weights.sum().item() == pytest.approx(normalizer(lengths, mode))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    groups=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    normalize=st.sampled_from(["token", "sequence"]),
    scale=st.booleans(),
    seed=st.integers(0, 999),
)
def test_micro_batches_equal_the_full_batch(
    lengths: list[int],
    groups: int,
    sizes: list[int],
    normalize: Normalize,
    scale: bool,
    seed: int,
) -> None:
    """Any split into micro-batches in any order has the full batch's gradient."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, hidden, vocabulary = len(lengths), 5, 8
    features = [draw(length, hidden) for length in lengths]
    targets = [torch.randint(vocabulary, (k,), generator=generator) for k in lengths]
    old = [-draw(k).abs() for k in lengths]
    ref = [-draw(k).abs() for k in lengths]
    rewards = draw(n).tolist()
    members = [[r for j, r in enumerate(rewards) if j % groups == i % groups] for i in range(n)]
    weight = draw(vocabulary, hidden).requires_grad_()

    def loss_sum(batch: list[int]) -> torch.Tensor:
        advantages = group_advantages(
            [rewards[i] for i in batch], [members[i] for i in batch], scale_by_std=scale
        )
        counts = torch.tensor([lengths[i] for i in batch])
        lp, entropy = selective_log_softmax(
            torch.cat([features[i] for i in batch]) @ weight.T,
            torch.cat([targets[i] for i in batch]),
        )
        return grpo_loss_sum(
            lp,
            torch.cat([old[i] for i in batch]),
            torch.repeat_interleave(advantages, counts),
            token_weights([lengths[i] for i in batch], normalize),
            clip_low=0.2,
            clip_high=0.2,
            reference_logprobs=torch.cat([ref[i] for i in batch]),
            kl_coefficient=0.05,
            entropy=entropy,
            entropy_coefficient=0.02,
        )

    total = normalizer(lengths, normalize)
    (full,) = torch.autograd.grad(loss_sum(list(range(n))) / total, weight)

    order = rng.sample(range(n), n)
    accumulated = torch.zeros_like(weight)
    counted = 0
    while order:
        size = rng.choice(sizes)
        batch, order = order[:size], order[size:]
        accumulated += torch.autograd.grad(loss_sum(batch), weight)[0]
        counted += normalizer([lengths[i] for i in batch], normalize)
    assert counted == total
    torch.testing.assert_close(accumulated / total, full, rtol=1e-9, atol=1e-12)


def test_statistics_do_not_depend_on_the_split() -> None:
    torch.manual_seed(4)
    lp, old, ref, advantages, entropy = torch.randn(5, 20)

    def collect(cuts: list[int]) -> dict[str, float]:
        total = TokenStatistics()
        for a, b in zip([0, *cuts], [*cuts, 20], strict=True):
            total.add(
                lp[a:b].sum(),
                lp[a:b],
                old[a:b],
                advantages[a:b],
                entropy[a:b],
                clip_low=0.2,
                clip_high=0.2,
                reference_logprobs=ref[a:b],
            )
        assert total.tokens == 20
        return total.metrics()

    whole, split = collect([]), collect([3, 3, 11])
    assert whole == pytest.approx(split)
    assert whole["importance_sampling_ratio/max"] == pytest.approx((lp - old).exp().max().item())
    assert whole["kl"] > 0
    assert "kl" not in TokenStatistics().metrics()
