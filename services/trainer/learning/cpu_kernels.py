"""What lies between a layer's products, computed in fewer passes over memory on a CPU.

transformers spells RMSNorm and rotary embedding out in operators of a few hundred microseconds
each, whose results all go to memory and are read again in the backward pass: a sixth of an update
of a small model. Here each is one function with a backward pass of its own. It takes the place of
what a model has where it was tried out to give the same, value and gradient, and only for what it
was measured with: float32 on a CPU, and what autocast makes of it there; else the model's own is
called. Under autocast all is still computed in float32, and rounded where a product would round it.
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
# Of values of about 1 in float32; a formula that differs does so by far more.
_TOLERANCE: Final = 1e-5
_PROBE_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)

_Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What transformers takes for its layers."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def use_kernels(model: torch.nn.Module) -> int:
    """Have what `model` consists of computed by the functions here where they are the same.

    Other models of the same classes are left as they are. Returns how many modules compute
    otherwise now; those that do already are not counted.
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
        # Layer norm around a mean of zero, which takes mean(grad * w) * r off besides.
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
    """`forward` of a module of which `_is_rms_norm`."""
    return _normed(module, hidden_states, torch.float32)


def _norm_within(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The same of a module of a layer.

    A layer's norm of the residual stream, which autocast leaves in float32, is an operand of
    products alone, each of which would round it by itself. A norm of what a product gave is turned
    or added in float32.
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
    found: torch.Tensor = _RMSNorm.apply(x, module.weight, _eps(module), kind)  # type: ignore[no-untyped-call]
    return found


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Whether `_norm` gives what `module` gives, for other weights as for these."""
    named = type(module).__name__.endswith("RMSNorm")
    if not named or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight, eps = module.weight, _eps(module)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not _is_plain(weight):
        return False
    return isinstance(eps, float) and _same_norm(module, len(weight), eps)


def _same_norm(module: torch.nn.Module, size: int, eps: float) -> bool:
    random = torch.Generator().manual_seed(0)

    def own(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    def ours(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return _RMSNorm.apply(x, weight, eps, torch.float32)  # type: ignore[no-untyped-call]

    # Where eps is all, where it is nothing, and between.
    for scale in (eps, eps**0.5, 1.0, 100.0):
        x = torch.randn((2, 3, size), generator=random) * scale
        weight = torch.randn((size,), generator=random)
        if not _alike(own, ours, (x, weight)):
            return False
    return True


# Rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), halves of a head turned.


class _Turn(torch.autograd.Function):
    """(x1 c1 - x2 s1, x2 c2 + x1 s2) of the halves of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        # Laid out as `x`, of which only the view has heads before tokens.
        turned = torch.mul(x, cos, out=torch.empty_like(x))
        turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return turned

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
    """In the place of a model's `apply_rotary_pos_emb`."""

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
        """`q`, `k` [B, H, T, D]; `cos`, `sin` [B, T, D], which no gradient reaches."""
        if _is_rounded(q) and _is_rounded(k):  # the model's own would promote them
            q, k = q.float(), k.float()
        if args or kwargs or not self._fits(q, k, cos, sin):
            return self._own(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _Turn.apply(q, cos, sin), _Turn.apply(k, cos, sin)  # type: ignore[no-untyped-call]

    @staticmethod
    def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        plain = _is_plain(q, k, cos, sin) and not (cos.requires_grad or sin.requires_grad)
        shaped = q.ndim == k.ndim == 4 and cos.ndim == sin.ndim == 3
        return plain and shaped and q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]


@functools.cache
def _rotated(forward: Any) -> Any:
    """The same `forward` with another rotary embedding, where that is the same; else None.

    A copy that finds another function by the name: everybody who imports the model's module goes
    on with the module's own.
    """
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_ROTARY)
    if own is None or not _same_rotary(own):
        return None
    copy = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: _Rotary(own)},
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
    """Whether these come from a product under autocast."""
    autocast = torch.is_autocast_enabled("cpu")
    return autocast and _is_plain(states, kind=torch.get_autocast_dtype("cpu"))


def _alike(
    own: Callable[..., Any], ours: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> bool:
    """Whether both give the same values and gradients."""
    try:
        return all(
            a.dtype == b.dtype and torch.allclose(a, b, rtol=_TOLERANCE, atol=_size(a) * _TOLERANCE)
            for a, b in zip(_traced(own, inputs), _traced(ours, inputs), strict=True)
        )
    except _PROBE_ERRORS:
        return False


def _size(values: torch.Tensor) -> float:
    return float(values.abs().max())


@torch.enable_grad()
def _traced(call: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What `call` returns, and the gradients of a sum of it, of other weights for each value."""
    own = [t.clone().requires_grad_() for t in inputs]
    found = call(*own)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    random = torch.Generator().manual_seed(1)
    slopes = [torch.randn(t.shape, generator=random) for t in outputs]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, own, slopes)]
