"""Advantages from values, by the sums that the paper writes; the value loss by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.algorithms.values import ValueStatistics, clipped_values, gae, value_loss

fractions = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def _f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 6), max_size=5), fractions, fractions, st.integers(0, 99))
def test_gae_is_the_papers_sum(
    lengths: list[int], gamma: float, gae_lambda: float, seed: int
) -> None:
    """Equation 16, term by term; no chain knows of another."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), dtype=torch.float64, generator=generator)
    found = gae(rewards, values, lengths, gamma=gamma, gae_lambda=gae_lambda)
    expected: list[float] = []
    for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True):
        following = [*v.tolist()[1:], 0.0]
        delta = [r[t] + gamma * following[t] - v[t] for t in range(len(r))]
        for t in range(len(r)):
            terms = [(gamma * gae_lambda) ** k * d for k, d in enumerate(delta[t:])]
            expected.append(float(sum(terms)))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_between_turns_the_next_turns_first_value_counts() -> None:
    """Two turns of two tokens; the first has a reward of its own, the last ends the chain."""
    rewards, values = _f64(0.0, 1.0, 0.0, 2.0), _f64(0.5, 0.25, 4.0, 1.0)
    one_step = gae(rewards, values, [4], gamma=0.5, gae_lambda=0.0)
    by_hand = [0.5 * 0.25 - 0.5, 1.0 + 0.5 * 4.0 - 0.25, 0.5 * 1.0 - 4.0, 2.0 - 1.0]
    torch.testing.assert_close(one_step, _f64(*by_hand))
    returns = gae(rewards, values, [4], gamma=1.0, gae_lambda=1.0) + values
    torch.testing.assert_close(returns, _f64(3.0, 3.0, 2.0, 2.0))
    # Two chains of one turn each hear nothing of each other.
    apart = gae(rewards, values, [2, 2], gamma=1.0, gae_lambda=1.0) + values
    torch.testing.assert_close(apart, _f64(1.0, 1.0, 2.0, 2.0))


def test_a_chains_advantages_are_the_same_bits_in_any_company() -> None:
    rewards, values = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    how = {"gamma": 0.99, "gae_lambda": 0.95}
    together = gae(rewards, values, [13, 17], **how)
    parts = zip(rewards.split([13, 17]), values.split([13, 17]), strict=True)
    alone = [gae(r, v, [len(r)], **how) for r, v in parts]
    assert torch.equal(together, torch.cat(alone))


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="but chains of 3 tokens"):
        gae(torch.zeros(2), torch.zeros(2), [3], gamma=1.0, gae_lambda=1.0)


def test_the_value_loss_by_hand() -> None:
    """Within the clip; beyond it but further from the target; beyond it towards the target."""
    old = _f64(0.0, 0.0, 0.0)
    values = _f64(0.1, -1.0, 1.0).requires_grad_()
    returns = _f64(1.0, 1.0, 1.0)
    assert clipped_values(values, old, 0.2).tolist() == pytest.approx([0.1, -0.2, 0.2])
    losses = value_loss(values, returns, old, 0.2)
    torch.testing.assert_close(losses, 0.5 * _f64(0.81, 4.0, 0.64))
    (grad,) = torch.autograd.grad(losses.sum(), values)
    # A value that has moved far enough towards its target stops; one that moved away comes back.
    torch.testing.assert_close(grad, _f64(-0.9, -2.0, 0.0))
    plain = value_loss(values, returns, old, 0.0)
    torch.testing.assert_close(plain, 0.5 * (values - returns).square())


def test_in_the_first_update_the_clip_has_no_effect() -> None:
    values = torch.randn(9, dtype=torch.float64).requires_grad_()
    returns = torch.randn(9, dtype=torch.float64)
    grads = [
        torch.autograd.grad(value_loss(values, returns, values.detach(), clip).sum(), values)[0]
        for clip in (0.0, 0.1)
    ]
    torch.testing.assert_close(grads[0], grads[1])


def test_explained_variance_is_the_share_that_values_take_away() -> None:
    generator = torch.Generator().manual_seed(1)
    returns = torch.randn(64, generator=generator)

    def explained(values: torch.Tensor) -> dict[str, float]:
        total = ValueStatistics()
        for v, r in zip(values.split(20), returns.split(20), strict=True):
            total.add(v, r, v, 0.2)
        return total.metrics()

    assert explained(returns)["critic/explained_variance"] == pytest.approx(1.0)
    assert explained(torch.full((64,), 5.0))["critic/explained_variance"] == pytest.approx(0.0)
    assert explained(-returns)["critic/explained_variance"] == pytest.approx(-3.0)
    half = explained(returns / 2)
    assert half["critic/explained_variance"] == pytest.approx(0.75)
    assert half["loss/value"] == pytest.approx(float((returns / 2).square().mean() / 2))
    assert half["critic/return_mean"] == pytest.approx(float(returns.mean()), abs=1e-6)
    assert ValueStatistics().metrics()["critic/explained_variance"] == 0.0
    flat = ValueStatistics()
    flat.add(torch.zeros(3), torch.full((3,), 0.1), torch.zeros(3), 0.2)
    assert flat.metrics()["critic/explained_variance"] == 0.0
