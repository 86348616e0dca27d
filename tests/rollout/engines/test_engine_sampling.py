"""Drawing tokens: the right distribution, by the row's own seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engines.embedded.sampling import draw, uniforms
from services.rollout.engines.requests import Draw


def rows(n: int, **fields: float) -> list[Draw]:
    base = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "position": 0, **fields}
    return [Draw(**{"seed": seed, **base}) for seed in range(n)]  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_those_of_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    n = 20_000
    tokens, logprobs = draw(logits.expand(n, 5), rows(n, temperature=temperature))
    expected = torch.softmax(logits / temperature, dim=-1)
    counts = np.bincount(tokens, minlength=5)[:4]
    wanted = expected[:4].numpy() * n
    # Chi-square, 3 degrees of freedom: 16.3 is exceeded once in a thousand; seeds are fixed.
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 16.3
    assert logprobs[0] == pytest.approx(float(expected[tokens[0]].log()), abs=1e-5)


def test_greedy_rows_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    hot, cold = rows(6), rows(6, temperature=0.0)
    mixed = [cold[i] if i % 2 else hot[i] for i in range(6)]
    tokens, logprobs = draw(logits, mixed)
    alone, _ = draw(logits, hot)
    raw = torch.log_softmax(logits, dim=-1)
    for i in range(6):
        assert tokens[i] == (int(logits[i].argmax()) if i % 2 else alone[i])
        assert logprobs[i] == pytest.approx(float(raw[i, tokens[i]]), abs=1e-5)


def test_top_k_and_top_p_draw_only_from_the_tokens_that_they_keep() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log().expand(500, 4)
    assert set(draw(logits, rows(500, top_k=2))[0]) == {0, 1}
    assert set(draw(logits, rows(500, top_p=0.65))[0]) == {0, 1}
    assert set(draw(logits, rows(500, top_p=0.75))[0]) == {0, 1, 2}
    assert set(draw(logits, rows(500, top_p=1e-6))[0]) == {0}
    # The nucleus is computed from the renormalised top-k: 0.4 / 0.7 > 0.55.
    assert set(draw(logits, rows(500, top_k=2, top_p=0.55))[0]) == {0}
    # Log-probs remain relative to the whole distribution.
    _, logprobs = draw(logits[:1], rows(1, top_k=1))
    assert logprobs[0] == pytest.approx(float(probabilities[0].log()), abs=1e-5)


def test_processed_log_probs_are_those_of_the_distribution_that_was_drawn_from() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    n = 4000
    logits = probabilities.log().expand(n, 4)
    for cut, kept in (({"top_k": 2}, [0.4, 0.3]), ({"top_p": 0.75}, [0.4, 0.3, 0.2])):
        drawn = [row._replace(processed=True) for row in rows(n, **cut)]
        tokens, logprobs = draw(logits, drawn)
        expected = torch.tensor(kept) / sum(kept)
        for token, logprob in zip(tokens[:50], logprobs[:50], strict=True):
            assert logprob == pytest.approx(float(expected[token].log()), abs=1e-5)
        # The mean of 1 / mu over draws from mu is the number of tokens that can be drawn.
        found = float(np.exp(-np.array(logprobs)).mean())
        assert found == pytest.approx(len(kept), rel=0.05)
        # Without it the same tokens, with other log-probs.
        again, full = draw(logits, rows(n, **cut))
        assert again == tokens
        shift = np.array(logprobs) - np.array(full)
        assert shift == pytest.approx(-np.log(sum(kept)), abs=1e-5)
    # Greedy and untruncated rows do not change.
    for plain in ({}, {"temperature": 0.0, "top_k": 2}):
        mine = [row._replace(processed=True) for row in rows(20, **plain)]
        assert draw(logits[:20], mine) == draw(logits[:20], rows(20, **plain))


def test_ratios_to_processed_log_probs_are_importance_weights() -> None:
    """Over draws from a truncated mu, E[pi/mu f] is the sum of pi f over the kept tokens."""
    mu, pi = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    values, n = torch.tensor([1.0, -2.0, 5.0]), 20_000
    logits = mu.log().expand(n, 3)
    exact = float((pi * values)[:2].sum())
    estimates = {}
    for processed in (True, False):
        drawn = [row._replace(processed=processed) for row in rows(n, top_k=2)]
        tokens, logprobs = draw(logits, drawn)
        ratio = pi[tokens] / torch.tensor(logprobs).exp()
        estimates[processed] = float((ratio * values[tokens]).mean())
    assert estimates[True] == pytest.approx(exact, abs=0.03)
    # The log-probs of all tokens weigh each by 1 / (kept mass).
    assert estimates[False] == pytest.approx(exact / 0.8, abs=0.04)


@settings(max_examples=50, deadline=None)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=8),
    position=st.integers(0, 10_000),
)
def test_a_draw_depends_on_its_own_seed_and_position_only(seeds: list[int], position: int) -> None:
    together = uniforms(seeds, [position] * len(seeds))
    for i, seed in enumerate(seeds):
        assert uniforms([seed], [position])[0] == together[i]
    assert ((together >= 0) & (together < 1)).all()


def test_uniforms_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    n = 200
    grid = np.array([uniforms([seed] * n, range(n)) for seed in range(n)])
    assert len(np.unique(grid)) == n * n
    assert abs(grid.mean() - 0.5) < 0.005
    for shifted in (grid[1:], grid[:, 1:], grid[1:, 1:]):
        here = grid[: shifted.shape[0], : shifted.shape[1]]
        assert abs(np.corrcoef(here.ravel(), shifted.ravel())[0, 1]) < 0.02
