"""Actors, which need fewer passes, compute the same values as learners."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from troupe.networks.modules import Tanh, draw, likeliest

NEVER = -1e9


def test_tanh_is_torchs_and_has_its_gradient() -> None:
    values = torch.linspace(-12, 12, 4001)
    with torch.inference_mode():
        found = Tanh()(values)
    torch.testing.assert_close(found, torch.tanh(values), rtol=3e-7, atol=1.2e-7)
    mine, theirs = (values.clone().requires_grad_() for _ in range(2))
    Tanh()(mine).sum().backward()
    torch.tanh(theirs).sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_draws_have_their_probabilities_and_log_probs() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, NEVER], [NEVER, 0.5, NEVER, 2.0]])
    rows = logits.repeat(20_000, 1).view(20_000, 2, 4)
    actions, log_probs = draw(rows, torch.Generator().manual_seed(5))
    chances = logits.softmax(-1)
    counts = torch.nn.functional.one_hot(actions, 4).double().mean(0)
    np.testing.assert_allclose(counts, chances, atol=0.015)
    assert (counts[chances == 0] == 0).all()
    expected = rows.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_draw_legal_actions(
    drawn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, drawn))
    # Some of many rows sum to more than 1, some to less.
    logits = torch.randn(5000, 6, generator=torch.Generator().manual_seed(1))
    logits[:, [0, 5]] = NEVER
    actions, _ = draw(logits, torch.Generator())
    assert (actions == (1 if drawn == 0 else 4)).all()


def test_the_likeliest_is_certain() -> None:
    logits = torch.tensor([[[0.0, 2.0]], [[3.0, 1.0]]])
    actions, log_probs = likeliest(logits)
    assert actions.tolist() == [[1], [0]]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))
