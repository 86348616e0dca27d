"""Chunked loss over the log-probs of a linear output layer, without all tokens' [N, V] logits.

Each block of tokens runs through output layer, log-softmax, loss and their backward pass in reused
buffers; only its gradients with respect to hidden states and layer are kept. Nothing is computed
twice, unless the loss couples more tokens than fit a block. Cut Your Losses (Wijmans et al. 2024)
and Liger Kernel (Hsu et al. 2024) do the same for cross-entropy.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

log = logging.getLogger(__name__)

# Elements of a row of logits that a Triton program processes at a time.
_BLOCK: Final = 8192
_WARPS: Final = 16
_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels can be used for logits of this type on this device."""
    return device.type == "cuda" and dtype in _TYPES and triton is not None and _works(device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Return whether kernels compile on this device and agree with plain torch."""
    logits = torch.linspace(-3.0, 3.0, 300, device=device).sin().reshape(3, 100).contiguous()
    logp = torch.log_softmax(logits, -1)
    targets = torch.tensor([0, 50, 99], device=device)
    logprobs, entropy, mass = (logits.new_empty(3) for _ in range(3))
    try:
        score_rows(logits, targets, logits.new_ones(3), logprobs, entropy, mass)
    except Exception as error:  # compilers raise any kind
        log.warning("no Triton kernels on %s, so losses take longer there: %s", device, error)
        return False
    plain = logp.gather(-1, targets[:, None])[:, 0], -(logp * logp.exp()).sum(-1)
    same = all(
        torch.allclose(f, p, atol=1e-4) for f, p in zip((logprobs, entropy), plain, strict=True)
    )
    if not same:
        log.warning("Triton kernels give wrong results on %s and are not used", device)
    return same


def score_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    mass: torch.Tensor,
) -> None:
    """Fill `logprobs`, `entropy` and `mass` (float32 [n]) from logits over temperatures.

    `logits`: [n, V], contiguous; `targets`: int64 [n]; `temperatures`: [n]. `logprobs` are the
    targets', `entropy` is in nats, `mass` is the logsumexp. A logit of -inf contributes nothing
    to the entropy.
    """
    vocabulary = logits.shape[1]
    _score[(len(logits),)](
        logits,
        targets,
        temperatures,
        logprobs,
        entropy,
        mass,
        vocabulary,
        BLOCK=_block(vocabulary),
        num_warps=_WARPS,
    )


def slope_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    entropy: torch.Tensor,
    mass: torch.Tensor,
    by_logprob: torch.Tensor,
    by_entropy: torch.Tensor,
) -> None:
    """Overwrite `logits` with the gradient of a loss with respect to them.

    `by_logprob`, `by_entropy`: the loss's gradients with respect to the targets' log-probs and the
    entropies, float32 [n]. Other arguments as passed to, and filled by, `score_rows`.
    """
    vocabulary = logits.shape[1]
    shared = (targets, temperatures, entropy, mass, by_logprob, by_entropy)
    _slope[(len(logits),)](logits, *shared, vocabulary, BLOCK=_block(vocabulary), num_warps=_WARPS)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left` [m, k] @ `right` [k, n], of half precision or of its own type, to `total` [m, n].

    On a GPU a sum in float32 takes the products of half precision as they are added up, in one
    kernel; elsewhere they are rounded and then added.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda" and _adds_products(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


@functools.cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a product of `dtype` can be added to float32 in place on this device."""
    left = torch.linspace(-1.0, 1.0, 64 * 32, device=device).sin().reshape(64, 32).to(dtype)
    total = torch.ones(64, 64, device=device)
    try:
        torch.addmm(total, left, left.T, out_dtype=total.dtype, out=total)
    except RuntimeError as error:  # also if the operator does not exist there
        log.warning("products are not added in float32 on %s: %s", device, error)
        return False
    right = torch.allclose(total.double(), 1 + left.double() @ left.double().T, atol=1e-4)
    if not right:
        log.warning("products that are added in float32 are wrong on %s and are not used", device)
    return right


def _block(vocabulary: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(vocabulary)))


if triton is not None:
    # Without annotations: Triton interprets them itself, and does not know Python's.
    @triton.jit  # type: ignore[untyped-decorator]
    def _score(  # type: ignore[no-untyped-def]
        logits,
        targets,
        temperatures,
        logprobs,
        entropy,
        mass,
        vocabulary,
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * vocabulary
        temperature = tl.load(temperatures + row)
        top = float("-inf")  # the largest so far, m
        total = 0.0  # sum of e^(x - m)
        spread = 0.0  # sum of (x - m) e^(x - m)
        for at in range(0, vocabulary, BLOCK):
            place = at + tl.arange(0, BLOCK)
            inside = place < vocabulary
            x = tl.load(start + place, mask=inside, other=float("-inf")).to(tl.float32)
            x = x / temperature
            higher = tl.maximum(top, tl.max(x, 0))
            shift = tl.where(total > 0, top - higher, 0.0)
            spread = tl.exp(shift) * (spread + shift * total)
            total = total * tl.exp(shift)
            # In a block whose logits are all -inf the maximum is -inf, too.
            away = tl.where(x == float("-inf"), x, x - higher)
            weight = tl.exp(away)
            total += tl.sum(weight, 0)
            spread += tl.sum(tl.where(weight == 0, 0.0, weight * away), 0)
            top = higher
        whole = top + tl.log(total)
        chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) / temperature
        tl.store(mass + row, whole)
        tl.store(logprobs + row, chosen - whole)
        tl.store(entropy + row, tl.log(total) - spread / total)

    @triton.jit  # type: ignore[untyped-decorator]
    def _slope(  # type: ignore[no-untyped-def]
        logits,
        targets,
        temperatures,
        entropy,
        mass,
        by_logprob,
        by_entropy,
        vocabulary,
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * vocabulary
        temperature = tl.load(temperatures + row)
        target = tl.load(targets + row)
        whole = tl.load(mass + row)
        own = tl.load(entropy + row)
        direct = tl.load(by_logprob + row)
        bonus = tl.load(by_entropy + row)
        for at in range(0, vocabulary, BLOCK):
            place = at + tl.arange(0, BLOCK)
            inside = place < vocabulary
            x = tl.load(start + place, mask=inside, other=float("-inf")).to(tl.float32)
            logp = x / temperature - whole
            p = tl.exp(logp)
            # d log pi(a) / dx_j = [j = a] - p_j;   dH / dx_j = -p_j (log p_j + H)
            slope = direct * (tl.where(place == target, 1.0, 0.0) - p)
            slope -= bonus * tl.where(p == 0, 0.0, p * (logp + own))
            slope = slope / temperature
            tl.store(start + place, slope.to(logits.dtype.element_ty), mask=inside)


# Bytes of one block's logits: enough rows for matrix products at full speed, but little memory
# compared with the rest of a pass.
_BLOCK_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
# Elements that are exponentiated at a time: few enough to stay in a CPU's caches.
_SCRATCH_ELEMENTS: Final = {"cpu": 1 << 18, "cuda": 1 << 26}

# (log-probs [n], entropies [n], slice of the tokens) -> summed loss, a scalar.
LossOf = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """Log-probs and entropies of N tokens, [N] each, in nats, without gradient.

    float32, or float64 for float64 hidden states.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    # KL(student || teacher) over the whole vocabulary, where there is a teacher.
    divergence: torch.Tensor | None = None


@dataclass(frozen=True)
class Head:
    """A linear output layer: logits = (hidden weight^T + bias) / temperature."""

    # [V, d]
    weight: torch.Tensor
    # [V]
    bias: torch.Tensor | None = None
    # A copy of the weight in half precision, for products of that type; None: made where needed.
    half: torch.Tensor | None = None


@dataclass(frozen=True)
class Teacher:
    """A frozen model's distribution at each of N tokens, from which the student's must not
    diverge: the loss has the term sum_t w_t KL(student_t || teacher_t)."""

    # [N, d'], and the layer with at least the student's V outputs; further ones are left out.
    hidden: torch.Tensor
    head: Head
    # [N]: w_t
    weights: torch.Tensor


def linear_scores(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    block: int | None = None,
) -> Scores:
    """Return the log-probs of `targets` (int64 [N]) and entropies, without gradients.

    `hidden`: [N, d]; `temperatures`: [N, 1]; `block`: tokens computed at a time.
    """
    with torch.no_grad():
        work = _Work(hidden, head, targets, temperatures, block)
        for part in work.blocks(0, len(targets)):
            work.score(part)
        return Scores(work.logprobs, work.entropy)


def linear_loss(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    loss_of: LossOf,
    *,
    spans: Sequence[int] | None = None,
    block: int | None = None,
    teacher: Teacher | None = None,
) -> tuple[torch.Tensor, Scores]:
    """Return the sum of `loss_of` over all tokens, differentiable in `hidden`, weight and bias.

    Shapes as in `linear_scores`. `spans`: lengths, which add up to N, of the runs of tokens whose
    losses depend on each other; None: the loss is a sum over tokens. A run longer than `block`
    costs one more product with the weight. `teacher`: adds its term to the loss; its logits are
    computed block by block, too. Double backward is not supported.
    """
    work = _Work(hidden.detach(), head, targets, temperatures, block, teacher)
    loss = _LinearLoss.apply(hidden, head.weight, head.bias, work, loss_of, spans)  # type: ignore[no-untyped-call]
    return loss, Scores(work.logprobs, work.entropy, work.divergence)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        work: _Work,
        loss_of: LossOf,
        spans: Sequence[int] | None,
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad
        total = torch.zeros((), dtype=work.logprobs.dtype, device=hidden.device)
        grads = _Grads(
            torch.empty_like(hidden) if needs[0] else None,
            # Also of a weight in half precision: blocks would each round the sum.
            torch.zeros_like(weight, dtype=total.dtype) if needs[1] else None,
            torch.zeros_like(bias) if bias is not None and needs[2] else None,
        )
        for start, stop in work.runs(spans):
            parts = work.blocks(start, stop)
            if len(parts) == 1:  # the log-probs are still in the buffer
                part = parts[0]
                work.score(part)
                loss, by_logprob, by_entropy = _differentiate(loss_of, work, part)
                work.descend(part, by_logprob, by_entropy, grads)
            else:
                for part in parts:
                    work.score(part)
                loss, by_logprob, by_entropy = _differentiate(loss_of, work, slice(start, stop))
                for part in parts:
                    own = slice(part.start - start, part.stop - start)
                    work.score(part)
                    work.descend(part, _cut(by_logprob, own), _cut(by_entropy, own), grads)
            total += loss
        total += work.divergence_loss()
        work.release()
        ctx.save_for_backward(*grads.all(weight.dtype))
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = [None if g is None else g.mul_(scale.to(g.dtype)) for g in ctx.saved_tensors]
        return (*found, None, None, None)


@dataclass(frozen=True)
class _Grads:
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def all(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; the weight's in `dtype`."""
        weight = None if self.weight is None else self.weight.to(dtype)
        return self.hidden, weight, self.bias


def _differentiate(
    loss_of: LossOf, work: _Work, part: slice
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the loss of the tokens in `part`, and its gradients by their log-probs and
    entropies."""
    with torch.enable_grad():
        logprobs = work.logprobs[part].detach().requires_grad_()
        entropy = work.entropy[part].detach().requires_grad_()
        loss = loss_of(logprobs, entropy, part)
        by_logprob, by_entropy = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    return loss.detach(), by_logprob, by_entropy


def _cut(slope: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if slope is None else slope[part]


class _Work:
    """One pass over all tokens, with a buffer for the logits of one block."""

    def __init__(
        self,
        hidden: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        block: int | None,
        teacher: Teacher | None = None,
    ) -> None:
        if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
            shapes = f"{list(hidden.shape)} and {list(targets.shape)}"
            raise ValueError(f"hidden and targets must be [N, d] and [N], got {shapes}")
        kind = hidden.device.type
        vocabulary = head.weight.shape[0]
        # Cast to the dtype that a linear layer would use under autocast.
        product = hidden.dtype
        if torch.is_autocast_enabled(kind):
            product = torch.get_autocast_dtype(kind)
        self._hidden = hidden.to(product)
        given = head.weight.detach() if head.half is None else head.half
        self._weight = given.to(product)
        self._bias = None if head.bias is None else head.bias.detach()
        self._targets = targets
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Triton kernels, which keep logits in the type of the product.
        plain = self._bias is None and teacher is None
        self._fused = plain and dtype == torch.float32 and serves(hidden.device, product)
        row_bytes = vocabulary * (product if self._fused else dtype).itemsize
        row_bytes *= 1 if teacher is None else 2
        self._size = block or max(16, _BLOCK_BYTES.get(kind, 64 << 20) // row_bytes)
        self._temperatures = temperatures.to(dtype)
        # Checking this on another device would wait for it.
        self._plain = kind == "cpu" and bool((temperatures == 1).all())
        self.logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        self.entropy = torch.empty_like(self.logprobs)
        self._teacher = teacher
        self.divergence = None if teacher is None else torch.empty_like(self.logprobs)
        rows = min(self._size, len(targets))
        if self._fused:
            self._buffer = self._hidden.new_empty(rows, vocabulary)
            # Per row, the log of the sum of exponentials.
            self._scratch = self.logprobs.new_empty(rows)
            return
        self._scratch_rows = max(1, _SCRATCH_ELEMENTS.get(kind, 1 << 22) // vocabulary)
        self._buffer = self.logprobs.new_empty(rows, vocabulary)
        # Log-probs of the teacher for the block in the buffer.
        self._others = self._buffer[:0] if teacher is None else torch.empty_like(self._buffer)
        self._scratch = self.logprobs.new_empty(min(rows, self._scratch_rows), vocabulary)

    def runs(self, spans: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return ranges of tokens whose loss is computed together: whole spans, as many as fit a
        block."""
        total = len(self._targets)
        if spans is None:
            return [(part.start, part.stop) for part in self.blocks(0, total)]
        found: list[tuple[int, int]] = []
        at = 0
        for length in spans:
            if found and at + length - found[-1][0] <= self._size:
                found[-1] = (found[-1][0], at + length)
            elif length:
                found.append((at, at + length))
            at += length
        if at != total:
            raise ValueError(f"spans add up to {at}, there are {total} tokens")
        return found

    def blocks(self, start: int, stop: int) -> list[slice]:
        """Split tokens from `start` to `stop` into blocks of about equal size."""
        count = -(-(stop - start) // self._size)
        edges = [start + (stop - start) * i // max(count, 1) for i in range(count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(edges)]

    def score(self, part: slice) -> None:
        """Fill in the scores of `part`; its log-probs [n, V] stay in the buffer (its logits, where
        kernels are fused)."""
        logits = self._logits(part)
        if self._fused:
            scores = self.logprobs[part], self.entropy[part], self._scratch
            score_rows(logits, self._targets[part], self._temperatures[part], *scores)
            return
        if self._teacher is not None:
            self._compare_with(self._teacher, part)
        rows = self._scratch_rows
        for start in range(0, len(logits), rows):
            stop = min(start + rows, len(logits))
            some = logits[start:stop]
            some.sub_(some.amax(-1, keepdim=True))
            p = torch.exp(some, out=self._scratch[: stop - start])
            mass = p.sum(-1, keepdim=True)
            some.sub_(mass.log())
            if self.divergence is not None:
                away = torch.where(p == 0, p, p * (some - self._others[start:stop]))
                self.divergence[part.start + start : part.start + stop] = away.sum(-1) / mass[:, 0]
            # A masked token (-inf) has probability zero and no share in the entropy.
            share = torch.mul(p, some, out=p).nan_to_num_(nan=0.0)
            self.entropy[part.start + start : part.start + stop] = (
                share.sum(-1) / mass[:, 0]
            ).neg_()
        chosen = logits.gather(-1, self._targets[part, None])
        self.logprobs[part] = chosen[:, 0]

    def descend(
        self,
        part: slice,
        by_logprob: torch.Tensor | None,
        by_entropy: torch.Tensor | None,
        grads: _Grads,
    ) -> None:
        """Add the gradients of `part`, the last scored, given the loss's gradients [n] (see
        `slope_rows`)."""
        slope = self._buffer[: part.stop - part.start]
        if self._fused:
            slopes = (
                torch.zeros_like(self.entropy[part]) if by is None else by.contiguous()
                for by in (by_logprob, by_entropy)
            )
            about = self._targets[part], self._temperatures[part], self.entropy[part], self._scratch
            slope_rows(slope, *about, *slopes)
        else:
            self._slope(slope, part, by_logprob, by_entropy)
        if grads.bias is not None:
            grads.bias.add_(slope.sum(0))
        slope = slope.to(self._weight.dtype)
        hidden = self._hidden[part]
        if grads.hidden is not None:
            grads.hidden[part] = slope @ self._weight
        if grads.weight is not None:
            add_product(grads.weight, slope.T, hidden)

    def _slope(
        self,
        slope: torch.Tensor,
        part: slice,
        by_logprob: torch.Tensor | None,
        by_entropy: torch.Tensor | None,
    ) -> None:
        """Overwrite `slope`, which has the log-probs of `part`, with the gradient by the logits."""
        entropy = self.entropy[part]
        rows = self._scratch_rows
        for start in range(0, len(slope), rows):
            # d log pi(a) / dx_j = [j = a] - p_j;   dH / dx_j = -p_j (log p_j + H)
            stop = min(start + rows, len(slope))
            some, factor = slope[start:stop], torch.zeros_like(entropy[start:stop, None])
            away = self._divergence_slope(some, part, start)
            if by_logprob is not None:
                factor -= by_logprob[start:stop, None]
            if by_entropy is None:
                some.exp_().mul_(factor)
            else:
                p = torch.exp(some, out=self._scratch[: stop - start])
                bonus = by_entropy[start:stop, None]
                some.add_(entropy[start:stop, None]).mul_(-bonus).add_(factor)
                some.mul_(p).nan_to_num_(nan=0.0)
            if away is not None:
                some.add_(away)
        if by_logprob is not None:
            slope.scatter_add_(-1, self._targets[part, None], by_logprob[:, None])
        if not self._plain:
            slope.div_(self._temperatures[part])

    def divergence_loss(self) -> torch.Tensor | float:
        """Return the teacher's term of the loss, once all tokens are scored."""
        if self._teacher is None or self.divergence is None:
            return 0.0
        return (self._teacher.weights.to(self.divergence.dtype) * self.divergence).sum()

    def _compare_with(self, teacher: Teacher, part: slice) -> None:
        """Fill in the teacher's log-probs of the tokens in `part`."""
        weight = teacher.head.weight[: self._buffer.shape[1]].to(self._hidden.dtype)
        hidden = teacher.hidden[part].to(weight.dtype)
        logits = (hidden @ weight.T).to(self.logprobs.dtype)
        if teacher.head.bias is not None:
            logits.add_(teacher.head.bias[: logits.shape[1]])
        logits.div_(self._temperatures[part])
        self._others[: len(logits)] = torch.log_softmax(logits, -1)

    def _divergence_slope(self, some: torch.Tensor, part: slice, start: int) -> torch.Tensor | None:
        """Return the gradient of the teacher's term by the logits of rows from `start` of `part`,
        whose log-probs are `some`; None without a teacher."""
        if self._teacher is None or self.divergence is None:
            return None
        place = slice(part.start + start, part.start + start + len(some))
        # d KL / dx_j = p_j (log p_j - log q_j - KL)
        p, others = some.exp(), self._others[start : start + len(some)]
        slope = p * (some - others - self.divergence[place, None])
        slope = torch.where(p == 0, p, slope)
        return slope.mul_(self._teacher.weights[place, None].to(slope.dtype))

    def release(self) -> None:
        """Free the buffers; the scores stay."""
        del self._buffer, self._scratch
        self._others = self.logprobs[:0]

    def _logits(self, part: slice) -> torch.Tensor:
        hidden = self._hidden[part]
        logits = self._buffer[: len(hidden)]
        if hidden.dtype == logits.dtype:
            torch.mm(hidden, self._weight.T, out=logits)
        else:
            logits.copy_(hidden @ self._weight.T)
        if self._bias is not None:
            logits.add_(self._bias)
        return logits if self._plain or self._fused else logits.div_(self._temperatures[part])
