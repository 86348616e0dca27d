"""The loss under a linear output layer: equal to the plain one, in less memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.peaks import tensor_peak
from troupe.algorithms.linear_loss import Head, Teacher, linear_loss, linear_scores
from troupe.algorithms.logprobs import selective_log_softmax


class Problem:
    """Random hidden states, an output layer, and a loss of both scores."""

    def __init__(
        self, lengths: Sequence[int], *, bias: bool, hot: bool, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        n, d, v = sum(lengths), 8, 33

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

        self.hidden, self.weight = draw(n, d), draw(v, d)
        self.bias = draw(v) if bias else None
        self.targets = torch.randint(v, (n,), generator=generator)
        self.heat = torch.ones(n, 1, dtype=dtype)
        if hot:
            self.heat = self.heat + torch.rand(n, 1, generator=generator, dtype=dtype)
        self.weights = draw(n).detach()
        self.rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, part: slice) -> torch.Tensor:
        """Each token for itself."""
        weights = self.weights[part]
        return (logprobs.exp() * weights).sum() - (entropy * weights.square()).sum()

    def coupled(self, logprobs: torch.Tensor, _: torch.Tensor, part: slice) -> torch.Tensor:
        """The product over each row: no part of a row will do."""
        totals = torch.zeros(int(self.rows.max()) + 1, dtype=logprobs.dtype)
        totals = totals.index_add(0, self.rows[part], logprobs)
        return totals[self.rows[part].unique()].mul(0.1).exp().sum()

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of all inputs that have one."""
        inputs = [t for t in (self.hidden, self.weight, self.bias) if t is not None]
        return list(torch.autograd.grad(loss, inputs))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum),
    block=st.integers(1, 40),
    bias=st.booleans(),
    hot=st.booleans(),
    coupled=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_linear_loss_equals_the_plain_loss(
    lengths: list[int], block: int, bias: bool, hot: bool, coupled: bool, dtype: torch.dtype
) -> None:
    """Loss, scores and gradients, however tokens are cut into blocks."""
    problem = Problem(lengths, bias=bias, hot=hot, dtype=dtype)
    loss_of: Any = problem.coupled if coupled else problem.loss
    logits = problem.hidden @ problem.weight.T
    logits = (logits if problem.bias is None else logits + problem.bias) / problem.heat
    logprobs, entropy = selective_log_softmax(logits, problem.targets)
    expected = loss_of(logprobs, entropy, slice(0, len(logprobs)))

    head = Head(problem.weight, problem.bias)
    given_ = (problem.hidden, head, problem.targets, problem.heat)
    spans = lengths if coupled else None
    found, scores = linear_loss(*given_, loss_of, spans=spans, block=block)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.float64:
        close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found, expected, **close)
    for mine, plain in zip(problem.gradients(found), problem.gradients(expected), strict=True):
        torch.testing.assert_close(mine, plain, **close)
    for known in (scores, linear_scores(*given_, block=block)):
        torch.testing.assert_close(known.logprobs, logprobs.detach(), **close)
        torch.testing.assert_close(known.entropy, entropy.detach(), **close)


def test_a_frozen_layer_gets_no_gradient() -> None:
    problem = Problem([5], bias=False, hot=False, dtype=torch.float64)
    head = Head(problem.weight.detach())
    loss, _ = linear_loss(problem.hidden, head, problem.targets, problem.heat, problem.loss)
    (gradient,) = torch.autograd.grad(loss, problem.hidden)
    whole, _ = linear_loss(
        problem.hidden, Head(problem.weight), problem.targets, problem.heat, problem.loss
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, problem.hidden)[0])


def test_under_autocast_products_are_in_half_precision_and_scores_are_not() -> None:
    problem = Problem([9, 8], bias=False, hot=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.nn.functional.linear(problem.hidden, problem.weight)
        logprobs, entropy = selective_log_softmax(logits / problem.heat, problem.targets)
        expected = problem.loss(logprobs, entropy, slice(0, 17))
        found, scores = linear_loss(
            problem.hidden, Head(problem.weight), problem.targets, problem.heat, problem.loss
        )
    assert logits.dtype == torch.bfloat16
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, logprobs.detach(), rtol=1e-5, atol=1e-5)
    for mine, plain in zip(problem.gradients(found), problem.gradients(expected), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, plain, rtol=0.02, atol=0.02)


def test_logits_of_all_tokens_never_exist() -> None:
    """Memory grows with a block, not with the tokens."""
    n, d, v, block = 512, 4, 2048, 16
    hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    targets, heat = torch.randint(v, (n,)), torch.ones(n, 1)

    def chunked() -> None:
        linear_loss(
            hidden, Head(weight), targets, heat, lambda a, h, _: a.sum() + h.sum(), block=block
        )[0].backward()

    def plain() -> None:
        logprobs, entropy = selective_log_softmax(hidden @ weight.T, targets)
        torch.autograd.backward(logprobs.sum() + entropy.sum())

    logits = 4 * n * v
    assert tensor_peak(plain) >= 2 * logits
    assert tensor_peak(chunked) <= logits / 4


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum),
    block=st.integers(1, 40),
    bias=st.booleans(),
    coupled=st.booleans(),
    frozen=st.booleans(),
)
def test_a_teachers_divergence_is_the_plain_one(
    lengths: list[int], block: int, bias: bool, coupled: bool, frozen: bool
) -> None:
    """Loss, divergences and gradients, with a teacher that has more outputs than the student."""
    problem = Problem(lengths, bias=bias, hot=True, dtype=torch.float64)
    count = sum(lengths)
    hidden, weight = torch.randn(count, 5).double(), torch.randn(40, 5).double()
    theirs = Teacher(
        hidden, Head(weight, torch.randn(40).double() if bias else None), torch.rand(count)
    )
    loss_of: Any = problem.coupled if coupled else problem.loss
    if frozen:
        problem.weight.requires_grad_(False)
        problem.bias = None if problem.bias is None else problem.bias.detach()
    inputs = [t for t in (problem.hidden, problem.weight, problem.bias) if t is not None]
    inputs = [t for t in inputs if t.requires_grad]

    logits = problem.hidden @ problem.weight.T
    logits = (logits if problem.bias is None else logits + problem.bias) / problem.heat
    others = hidden @ weight.T if theirs.head.bias is None else hidden @ weight.T + theirs.head.bias
    logq = torch.log_softmax(others[:, : logits.shape[1]] / problem.heat, -1)
    logp = torch.log_softmax(logits, -1)
    divergence = (logp.exp() * (logp - logq)).sum(-1)
    scores = selective_log_softmax(logits, problem.targets)
    expected = loss_of(*scores, slice(0, count)) + (theirs.weights.double() * divergence).sum()

    found, made = linear_loss(
        problem.hidden,
        Head(problem.weight, problem.bias),
        problem.targets,
        problem.heat,
        loss_of,
        spans=lengths if coupled else None,
        block=block,
        teacher=theirs,
    )
    torch.testing.assert_close(found, expected)
    assert made.divergence is not None
    torch.testing.assert_close(made.divergence, divergence.detach())
    mine, plain = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b)
