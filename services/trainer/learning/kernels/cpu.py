"""Fused RMSNorm and rotary embedding for training on a CPU.

transformers computes them in many operators, whose results all go to memory and are read again in
the backward pass: a sixth of an update of a small model. Here each is one autograd function. It
replaces a model's own function if a trial shows the same values and gradients, and only for float32
on a CPU and its autocast types; else the model's own is called. Under autocast it computes in
float32, and rounds where a matrix product would round its operand.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

_ROTARY: Final = "apply_rotary_pos_emb"
# Tolerance for values of about 1 in float32; a different formula differs by far more.
_TOLERANCE: Final = 1e-5
_PROBE_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)

_Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of `model` that transformers can checkpoint."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def use_kernels(model: torch.nn.Module) -> int:
    """Replace RMSNorm and rotary embedding of `model` by fused versions, if they give the same
    results.

    Other models of the same classes are not changed. Returns the number of modules replaced now.
    """
    changed = 0
    if not any(_is_plain(parameter) for parameter in model.parameters()):
        return changed
    within = {part for layer in layers_of(model) for part in layer.modules()}
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if _is_rms_norm(module):
            norm = _norm_within if module in within else _norm
            module.forward = types.MethodType(norm, module)
            changed += 1
        elif (forward := _rotated(type(module).forward)) is not None:
            module.forward = types.MethodType(forward, module)
            changed += 1
    return changed


# RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).


class _RMSNorm(torch.autograd.Function):
    """y = x * r * w with r = 1 / sqrt(mean(x^2) + eps), over the last dimension D, as `kind`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, kind: torch.dtype
    ) -> torch.Tensor:
        whole = x.float()
        norm = torch.linalg.vector_norm(whole, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return torch.mul(whole, r).mul_(weight).to(kind)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The backward of layer norm with mean zero, which also subtracts mean(grad * w) * r.
        x, weight, r = ctx.saved_tensors
        size, grad = x.shape[-1], grad.float()
        by_x, by_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            x.float(),
            [size],
            torch.zeros_like(r),
            r,
            weight,
            None,
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False],
        )
        if ctx.needs_input_grad[0]:
            taken = torch.mv(grad.reshape(-1, size), weight).view_as(r)
            by_x = by_x.add_(taken.mul_(r).div_(size)).to(x.dtype)
        return by_x, by_weight, None, None


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Replacement of `forward` of an RMSNorm outside of layers."""
    return _normed(module, hidden_states, torch.float32)


def _norm_within(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Replacement of `forward` of an RMSNorm within a layer.

    Under autocast the norm of the residual stream (float32) is an operand of matrix products only,
    which would each round it: it is rounded once. A norm of a product's result is rotated or added
    in float32.
    """
    kind = torch.float32
    if torch.is_autocast_enabled("cpu") and hidden_states.dtype == torch.float32:
        kind = torch.get_autocast_dtype("cpu")
    return _normed(module, hidden_states, kind)


def _normed(module: Any, x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    fits = _is_plain(module.weight) and (_is_plain(x) or _is_rounded(x))
    if not fits or not x.numel():
        own: torch.Tensor = type(module).forward(module, x)
        return own
    found: torch.Tensor = _RMSNorm.apply(x, module.weight, eps_of(module), kind)  # type: ignore[no-untyped-call]
    return found


def eps_of(module: Any) -> Any:
    """Return the epsilon of an RMSNorm, by whichever name."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Return whether `module` is an RMSNorm that `_norm` computes alike, for any weights."""
    named = type(module).__name__.endswith("RMSNorm")
    if not named or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight, eps = module.weight, eps_of(module)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not _is_plain(weight):
        return False
    return isinstance(eps, float) and _same_norm(module, len(weight), eps)


def _same_norm(module: torch.nn.Module, size: int, eps: float) -> bool:
    random = torch.Generator().manual_seed(0)

    def own(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    def ours(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return _RMSNorm.apply(x, weight, eps, torch.float32)  # type: ignore[no-untyped-call]

    # From inputs where eps dominates to inputs where it does not matter.
    for scale in (eps, eps**0.5, 1.0, 100.0):
        x = torch.randn((2, 3, size), generator=random) * scale
        weight = torch.randn((size,), generator=random)
        if not _alike(own, ours, (x, weight)):
            return False
    return True


# Rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), rotating halves of a head.


class _Rotation(torch.autograd.Function):
    """Rotation (x1 c1 - x2 s1, x2 c2 + x1 s2) of the halves of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        # In the memory layout of `x`, whose view has heads before tokens.
        rotated = torch.mul(x, cos, out=torch.empty_like(x))
        rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return rotated

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        by_x = torch.mul(grad, cos, out=torch.empty_like(grad))
        by_x[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        by_x[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return by_x, None, None


class _Rotary:
    """Replacement of a model's `apply_rotary_pos_emb`, which it calls for unsupported inputs."""

    def __init__(self, own: _Rotate) -> None:
        self._own = own

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated `q` and `k`, [B, H, T, D] each; `cos`, `sin` [B, T, D] have no gradient."""
        if _is_rounded(q) and _is_rounded(k):  # the model's own would promote them
            q, k = q.float(), k.float()
        if args or kwargs or not self._fits(q, k, cos, sin):
            return self._own(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)  # type: ignore[no-untyped-call]

    @staticmethod
    def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        plain = _is_plain(q, k, cos, sin) and not (cos.requires_grad or sin.requires_grad)
        shaped = q.ndim == k.ndim == 4 and cos.ndim == sin.ndim == 3
        return plain and shaped and q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]


@functools.cache
def _rotated(forward: Any) -> Any:
    """Return a copy of `forward` that calls `_Rotary`, if that gives the same; else None.

    The copy has other globals, so that the model's module itself is not changed.
    """
    return rotated_with(forward, lambda own: _Rotary(own) if _same_rotary(own) else None)


def rotated_with(forward: Any, make: Callable[[_Rotate], _Rotate | None]) -> Any:
    """Return a copy of `forward` that calls `make(rotary)` instead of its rotary embedding; None if
    it has none, or if `make` returns None."""
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_ROTARY)
    made = None if own is None else make(own)
    if made is None:
        return None
    copy = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: made},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(copy, forward)


@functools.cache
def _same_rotary(own: _Rotate) -> bool:
    random = torch.Generator().manual_seed(0)
    for size in (16, 32):
        shapes = (2, 4, 5, size), (2, 2, 5, size)
        q, k = (torch.randn(shape, generator=random) for shape in shapes)
        cos, sin = (torch.randn((2, 5, size), generator=random) for _ in range(2))
        ours = functools.partial(_Rotary(own), cos=cos, sin=sin)
        if not _alike(functools.partial(own, cos=cos, sin=sin), ours, (q, k)):
            return False
    return True


def _is_plain(*tensors: torch.Tensor, kind: torch.dtype = torch.float32) -> bool:
    return all(
        t.dtype == kind and t.device.type == "cpu" and not isinstance(t, DTensor) for t in tensors
    )


def _is_rounded(states: torch.Tensor) -> bool:
    """Return whether these states come from a matrix product under autocast."""
    autocast = torch.is_autocast_enabled("cpu")
    return autocast and _is_plain(states, kind=torch.get_autocast_dtype("cpu"))


def _alike(
    own: Callable[..., Any], ours: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> bool:
    return same_function(own, ours, inputs, _TOLERANCE)


def same_function(
    own: Callable[..., Any],
    ours: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    tolerance: float,
) -> bool:
    """Return whether both give the same values and gradients."""
    try:
        return all(
            a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=_size(a) * tolerance)
            for a, b in zip(_traced(own, inputs), _traced(ours, inputs), strict=True)
        )
    except _PROBE_ERRORS:
        return False


def _size(values: torch.Tensor) -> float:
    return float(values.abs().max())


@torch.enable_grad()
def _traced(call: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the outputs of `call`, and its input gradients for random output gradients."""
    own = [t.clone().requires_grad_() for t in inputs]
    found = call(*own)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    random = torch.Generator().manual_seed(1)
    slopes = [torch.randn(t.shape, generator=random).to(t.device) for t in outputs]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, own, slopes)]
