"""Sums of gradients that do not depend on the order of their terms: fixed-point numbers.

Floating-point addition rounds after every term, so another order gives other bits. Here each
term is rounded once, to a multiple of 2^-40, and then integers are added, which is exact and
commutes (Demmel and Nguyen 2013, "Fast reproducible floating-point summation", with one fixed
bin instead of several). Only the finished sum is rounded again.

*Range*: every element of a sum lies within -2^23 .. 2^23; it is a step's sum over tokens, not
their mean. Guarded by adding up the largest magnitude of each term, which is free of order
too: a sum that might wrap around is refused, whatever comes first.
*Precision*: n terms are off by at most n * 2^-41 together (4.5e-13 each), before the division
by the step's tokens or sequences and one rounding to the gradient's type.
*Cost*: 8 bytes per parameter, and a pass over all parameters per term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Binary digits behind the point.
FRACTION_BITS = 40
_SCALE = float(1 << FRACTION_BITS)
_LIMIT = 1 << 63
# Elements converted at once: on a CPU what stays in its caches.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}


class NotSummable(ArithmeticError):
    """A term is not finite, or the sum may leave the range."""


class ExactSum:
    """Element-wise sums of lists of tensors, all lists of the same shapes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        """Zeros in the shapes and on the devices of `like`."""
        self._sums = [torch.zeros(t.numel(), dtype=torch.int64, device=t.device) for t in like]
        # By tensor: what no element's magnitude exceeds, in quanta. Python's integers are exact.
        self._bounds = [0] * len(self._sums)

    def add(self, term: Sequence[torch.Tensor | None]) -> None:
        """Add one tensor (or nothing) to each sum.

        Raises NotSummable, which depends on the terms but not on their order; then the sums
        are of no more use before `clear`.
        """
        present = [i for i, t in enumerate(term) if t is not None and t.numel()]
        tensors = [t.detach() for i in present if (t := term[i]) is not None]
        if not tensors:
            return
        for i, peak in zip(present, _peaks(tensors), strict=True):
            if not math.isfinite(peak):
                raise NotSummable(f"a gradient is {peak}")
            self._bounds[i] += int(peak * _SCALE) + 1
            if self._bounds[i] >= _LIMIT:
                raise NotSummable(
                    f"the summed gradient may exceed 2^{63 - FRACTION_BITS}, which deterministic "
                    "mode cannot add exactly"
                )
        for i, tensor in zip(present, tensors, strict=True):
            flat, total = tensor.reshape(-1), self._sums[i]
            # Multiplied by a power of two nothing is rounded, in single precision neither.
            size = _BLOCK.get(flat.device.type, len(flat))
            for start in range(0, len(flat), size):
                part = flat[start : start + size] * _SCALE
                total[start : start + size] += part.round_().to(torch.int64)

    def write(self, into: Sequence[torch.Tensor], divisor: float) -> None:
        """Store every sum, divided by `divisor`, in the tensor of `into` at its place."""
        for total, tensor in zip(self._sums, into, strict=True):
            quotient = total.to(torch.float64).div_(_SCALE * divisor)
            tensor.copy_(quotient.view_as(tensor))

    def state(self) -> tuple[list[torch.Tensor], list[int]]:
        """The sums in quanta (int64), not copied, and their bounds."""
        return self._sums, list(self._bounds)

    @staticmethod
    def resumed(sums: Sequence[torch.Tensor], bounds: Sequence[int]) -> ExactSum:
        """Goes on from what `state` gave, without copying it."""
        found = ExactSum([])
        found._sums, found._bounds = list(sums), list(bounds)
        return found

    def clear(self) -> None:
        """Back to zero."""
        for total in self._sums:
            total.zero_()
        self._bounds = [0] * len(self._sums)


def _peaks(tensors: list[torch.Tensor]) -> list[float]:
    """Largest magnitude of each tensor; NaN where it has one. Waits for the device once."""
    extremes = [torch.stack(torch.aminmax(t)).abs().amax().to(torch.float64) for t in tensors]
    return [float(value) for value in torch.stack(extremes).tolist()]
