"""Importance corrections: by hand, by gradient check, and in expectation over a bandit."""

from __future__ import annotations

import math

import pytest
import torch

from troupe.algorithms.corrections import corrected_loss, masked_weights, truncated_weights
from troupe.algorithms.losses import grpo_loss_sum
from troupe.algorithms.objectives import importance_ratio
from troupe.algorithms.statistics import TokenStatistics
from troupe.job.sections.algorithm import Correction, Loss

RATIOS = torch.tensor([0.1, 0.5, 1.0, 1.9, 2.0, 2.1, math.inf], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CORRECTIONS: list[Correction] = ["truncated", "masked"]


def test_truncated_weights_by_hand() -> None:
    assert truncated_weights(RATIOS, 2.0).tolist() == [0.1, 0.5, 1.0, 1.9, 2.0, 2.0, 2.0]
    assert truncated_weights(RATIOS, 1.0).tolist() == [0.1, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_masked_weights_by_hand() -> None:
    assert masked_weights(RATIOS, 2.0).tolist() == [0.0, 0.5, 1.0, 1.9, 2.0, 0.0, 0.0]
    assert masked_weights(RATIOS, 1.0).tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_loss_of_three_tokens_by_hand(correction: Correction) -> None:
    lp = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    mu = lp.detach() - torch.tensor([4.0, 1.5, 0.25], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    loss = grpo_loss_sum(
        lp, mu, advantages, weights, **CLIP, correction=correction, correction_cap=2.0
    )
    (grad,) = torch.autograd.grad(loss, lp)
    first, last = (2.0, 0.25) if correction == "truncated" else (0.0, 0.0)
    by_hand = [-first * 1.0, 1.5 * 2.0 * 0.5, -last * 3.0]
    torch.testing.assert_close(grad, torch.tensor(by_hand, dtype=torch.float64))
    assert loss.item() == pytest.approx(sum(by_hand))


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("cap", [1.0, 2.0, 50.0])
def test_on_policy_it_is_the_plain_policy_gradient(correction: Correction, cap: float) -> None:
    torch.manual_seed(0)
    lp = (-torch.rand(9, dtype=torch.float64)).requires_grad_()
    advantages, weights = torch.randn(2, 9, dtype=torch.float64)
    loss = grpo_loss_sum(
        lp, lp.detach(), advantages, weights, **CLIP, correction=correction, correction_cap=cap
    )
    (grad,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(grad, -advantages * weights)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_gradient_is_that_of_the_loss_with_constant_weights(correction: Correction) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    actions = torch.randint(5, (6,))
    mu, advantages = -torch.rand(6, dtype=torch.float64) * 4, torch.randn(6, dtype=torch.float64)
    start = torch.log_softmax(logits.detach(), -1).gather(1, actions[:, None])[:, 0]
    weigh = truncated_weights if correction == "truncated" else masked_weights
    weights = weigh(importance_ratio(start, mu), 1.7)

    def surrogate(x: torch.Tensor) -> torch.Tensor:
        lp = torch.log_softmax(x, -1).gather(1, actions[:, None])[:, 0]
        return -(weights * advantages * lp).sum()

    assert torch.autograd.gradcheck(surrogate, logits)
    lp = torch.log_softmax(logits, -1).gather(1, actions[:, None])[:, 0]
    how = {"correction": correction, "correction_cap": 1.7}
    loss = grpo_loss_sum(lp, mu, advantages, torch.ones(6), **CLIP, **how)  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(surrogate(logits), logits)
    torch.testing.assert_close(found, expected)


def test_masked_tokens_carry_no_loss_at_all() -> None:
    lp = torch.tensor([-1.0, -1.0], requires_grad=True)
    mu, ones = torch.tensor([-9.0, -1.0]), torch.ones(2)
    entropy = torch.tensor([3.0, 3.0], requires_grad=True)
    loss = grpo_loss_sum(
        lp,
        mu,
        ones,
        ones,
        **CLIP,
        correction="masked",
        reference_logprobs=torch.tensor([-2.0, -2.0]),
        kl_coefficient=1.0,
        entropy=entropy,
        entropy_coefficient=1.0,
    )
    by_logprobs, by_entropy = torch.autograd.grad(loss, (lp, entropy))
    assert by_logprobs[0] == by_entropy[0] == 0
    assert by_logprobs[1] != 0
    assert by_entropy[1] == -1


def _bandit(correction: Correction, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradient over actions of mu, and the on-policy one, of a bandit of four arms.

    Expectations are sums over the arms: exact, no draws.
    """
    theta = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    mu = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0, 0.4], dtype=torch.float64), -1)
    reward = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    lp = torch.log_softmax(theta, -1)
    loss = grpo_loss_sum(
        lp, mu, reward, mu.exp(), **CLIP, correction=correction, correction_cap=cap
    )
    (found,) = torch.autograd.grad(loss, theta, retain_graph=True)
    (exact,) = torch.autograd.grad(-(lp.exp() * reward).sum(), theta)
    return found, exact


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_off_policy_the_corrected_gradient_is_the_on_policy_one(correction: Correction) -> None:
    found, exact = _bandit(correction, 1e6)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def test_the_bias_vanishes_as_the_cap_grows() -> None:
    biases = []
    for cap in (1.0, 1.5, 2.5, 10.0):
        found, exact = _bandit("truncated", cap)
        biases.append(float((found - exact).norm()))
    assert biases == sorted(biases, reverse=True)
    assert biases[0] > 0.05
    assert biases[-1] < 1e-12
    # Uncorrected, the clipped ratio is biased here too.
    found, exact = _bandit("none", 1e6)
    assert float((found - exact).norm()) > 0.05


def test_draws_agree_with_the_expectation() -> None:
    """The trainer's estimate: actions drawn from mu, weighted, averaged."""
    torch.manual_seed(2)
    theta = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    mu = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0, 0.4], dtype=torch.float64), -1)
    reward = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    n = 200_000
    actions = torch.multinomial(mu.exp(), n, replacement=True)
    lp = torch.log_softmax(theta, -1)[actions]
    weights = truncated_weights(importance_ratio(lp, mu[actions]), 1e6)
    (found,) = torch.autograd.grad(corrected_loss(lp, reward[actions], weights).sum() / n, theta)
    _, exact = _bandit("truncated", 1e6)
    # The weights are at most 5, so a mean of n scatters by about 5 / sqrt(n) = 0.011.
    torch.testing.assert_close(found, exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_statistics_tell_weights_and_what_was_cut(correction: Correction) -> None:
    ratios = torch.tensor([0.25, 1.0, 1.5, 4.0])
    total = TokenStatistics()
    for part in ratios.split(2):
        logprobs = part.log()
        zeros = torch.zeros(2)
        total.add(
            torch.zeros(()), logprobs, zeros, torch.ones(2), zeros, **CLIP, correction=correction
        )
    metrics = total.metrics()
    if correction == "truncated":
        assert metrics["correction/weight_mean"] == pytest.approx((0.25 + 1 + 1.5 + 2) / 4)
        assert metrics["correction/truncated_fraction"] == 0.25
    else:
        assert metrics["correction/weight_mean"] == pytest.approx((1 + 1.5) / 4)
        assert metrics["correction/masked_fraction"] == 0.5
    # Nothing is clipped without a clip.
    assert metrics["clip_fraction"] == 0.0


def _tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """pi, pi_old, mu and advantages of five tokens of one sequence."""
    generator = torch.Generator().manual_seed(3)
    pi = -torch.rand(5, dtype=torch.float64, generator=generator)
    noise = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    advantages = torch.randn(5, dtype=torch.float64, generator=generator)
    return pi, pi + 0.2 * noise[0], pi + 0.7 * noise[1], advantages


@pytest.mark.parametrize("correction", ["none", "truncated", "masked", "sequence_masked"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "dppo_mask"])
def test_decoupled_is_the_loss_against_the_old_weights_times_a_constant(
    loss: Loss, correction: Correction
) -> None:
    """Hilton et al. 2022: the clip looks at pi/pi_old, the weight at pi_old/mu."""
    pi, old, mu, advantages = _tokens()
    pi.requires_grad_()
    sequences, ones = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.float64)
    weights = (old - mu).exp()
    if correction == "sequence_masked":
        weights = weights.prod().expand(5)
    inside = (weights >= 1 / 1.5) & (weights <= 1.5)
    if correction == "truncated":
        weights = weights.clamp(max=1.5)
    elif correction != "none":
        weights = torch.where(inside, weights, 0.0)
    else:
        weights = ones
    found = grpo_loss_sum(
        pi,
        mu,
        advantages,
        ones,
        **CLIP,
        loss=loss,
        sequences=sequences,
        correction=correction,
        correction_cap=1.5,
        old_logprobs=old,
    )
    # Against a behaviour that is pi_old itself the loss is known.
    plain = grpo_loss_sum(pi, old, advantages, weights, **CLIP, loss=loss, sequences=sequences)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(
        torch.autograd.grad(found, pi, retain_graph=True)[0], torch.autograd.grad(plain, pi)[0]
    )


def test_with_one_update_a_step_decoupled_is_truncated() -> None:
    """pi_old is pi then: the same gradient, without a forward pass for it."""
    pi, _, mu, advantages = _tokens()
    pi.requires_grad_()
    ones = torch.ones(5, dtype=torch.float64)
    grads = []
    for old in (None, pi.detach()):
        how = {"correction": "truncated", "correction_cap": 1.5, "old_logprobs": old}
        loss = grpo_loss_sum(pi, mu, advantages, ones, **CLIP, **how)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(loss, pi)[0])
    torch.testing.assert_close(grads[0], grads[1])


def test_decoupled_statistics_tell_the_clip_and_the_weights_apart() -> None:
    old, mu = torch.zeros(4), -torch.tensor([0.25, 1.0, 1.5, 4.0]).log()
    pi = torch.tensor([1.5, 1.0, 1.0, 1.0]).log()
    total = TokenStatistics()
    how = {"correction": "masked", "old_logprobs": old}
    total.add(torch.zeros(()), pi, mu, torch.ones(4), pi, **CLIP, **how)  # type: ignore[arg-type]
    metrics = total.metrics()
    assert metrics["clip_fraction"] == 0.25  # pi/pi_old = 1.5
    assert metrics["masked_fraction"] == 0.5  # pi_old/mu of 0.25 and 4
    assert metrics["correction/weight_mean"] == pytest.approx((1 + 1.5) / 4)
    assert metrics["importance_sampling_ratio/max"] == pytest.approx(4.0)
