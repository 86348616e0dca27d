"""Linear layers in bfloat16 of float32 weights, whose copies are kept across passes.

Under autocast torch casts a layer's float32 weight in each forward pass, and again where the
backward pass recomputes the layer; the gradient of the weight is rounded to bfloat16, cast back and
added to the sum. Here a weight is cast once per update where memory allows, layers side by side
share the cast of their input, and the product that makes a gradient is added to the float32 sum, as
in Megatron-LM's fused accumulation of gradients (Shoeybi et al. 2019, arXiv 1909.08053). The
forward pass computes the same values as autocast, bit for bit.
"""

from __future__ import annotations

import copy
import types
import weakref
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from troupe.algorithms.linear_loss import add_product

_HALF: Final = torch.bfloat16


class HalfWeights:
    """The copies of a model's weights in bfloat16. Those that are kept are made at their first use
    after a weight has changed, and freed by `drop`."""

    def __init__(self, model: torch.nn.Module, *, keeps: bool) -> None:
        """Let the linear layers of `model` use copies of their trained float32 weights, which are
        kept across passes if `keeps`, else made for each use. A deep copy of the model leaves casts
        to autocast."""
        self._keeps = keeps
        self._copies: dict[int, tuple[int, torch.Tensor]] = {}
        # The input of the last layer, and its copy: projections side by side read one.
        self._last: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None
        for module in model.modules():
            if type(module) is torch.nn.Linear and "forward" not in vars(module):
                module.forward = _HalfForward(module, self)  # type: ignore[method-assign,assignment]

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of `weight`; None if passes are not in bfloat16 or the weight is not a
        trained one in float32."""
        kind = weight.device.type
        rounds = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == _HALF
        fits = weight.dtype == torch.float32 and weight.requires_grad
        if not rounds or not fits or isinstance(weight, DTensor):
            return None
        version, known = self._copies.get(id(weight), (-1, None))
        if known is None or version != weight._version:
            known = weight.detach().to(_HALF)
            if self._keeps:
                self._copies[id(weight)] = weight._version, known
        return known

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` in bfloat16, without gradient."""
        if states.dtype == _HALF:
            return states.detach()
        if self._last is not None:
            before, version, found = self._last
            if before() is states and version == states._version:
                return found
        found = states.detach().to(_HALF)
        self._last = weakref.ref(states, self._forget), states._version, found
        return found

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        """Free the copy of an input, which is gone."""
        if self._last is not None and self._last[0] is gone:
            self._last = None

    def drop(self) -> None:
        """Free the copies: the weights are about to change, or to leave the device."""
        self._copies.clear()
        self._last = None


class _HalfForward:
    """The `forward` of a linear layer with a copy of its weight."""

    def __init__(self, module: torch.nn.Linear, weights: HalfWeights) -> None:
        self._module, self._weights = module, weights

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        module = self._module
        if not states.numel():  # an output layer whose loss was computed before it
            return states.new_zeros((*states.shape[:-1], module.out_features))
        half = self._weights.of(module.weight)
        if half is None:
            return linear(states, module.weight, module.bias)
        rounded = self._weights.rounded(states)
        if not torch.is_grad_enabled():
            return linear(rounded, half, module.bias)
        found: torch.Tensor = _HalfLinear.apply(states, module.weight, module.bias, rounded, half)  # type: ignore[no-untyped-call]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(torch.nn.Linear.forward, copy.deepcopy(self._module, memo))


class _HalfLinear(torch.autograd.Function):
    """y = x W^T + b of copies of x and W in bfloat16; adds the gradient of W to its `.grad`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rounded: torch.Tensor,
        half: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(rounded, half)
        ctx.weight, ctx.kind = weight, states.dtype
        return linear(rounded, half, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, half = ctx.saved_tensors
        weight: torch.Tensor = ctx.weight
        rows, by_states, by_bias = grad.reshape(-1, grad.shape[-1]), None, None
        if ctx.needs_input_grad[0]:
            by_states = (rows @ half).view(rounded.shape).to(ctx.kind)
        if ctx.needs_input_grad[1]:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            add_product(weight.grad, rows.T, rounded.reshape(-1, rounded.shape[-1]))
        if ctx.needs_input_grad[2]:
            by_bias = rows.sum(0, dtype=weight.dtype)
        return by_states, None, by_bias, None, None
