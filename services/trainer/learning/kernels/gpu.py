"""Fused RMSNorm and rotary embedding for training on a GPU, from Liger Kernel.

Liger Kernel (Hsu et al. 2024, https://arxiv.org/abs/2410.10989) is used where it is installed, as
with the extra `gpu`. Like the CPU's kernels (cpu.py), a kernel replaces a module's or a model's own
function only in this model, and only if a trial on the device shows the same values and gradients.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog
import torch

from services.trainer.learning.kernels.cpu import eps_of, rotated_with, same_function

log = structlog.get_logger("troupe.trainer")
# Trials are made in float32, of values of about 1; Triton sums in another order.
_TOLERANCE: Final = 1e-4
_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LigerKernels:
    """The two functions that are used, as `torch.autograd.Function.apply`."""

    # Of states [..., D], weight [D], epsilon, offset of the weight, casting mode, whether the
    # gradient is written over its input, row mode.
    rms_norm: Callable[..., Any]
    # Of queries and keys [B, H, T, D], cosines and sines [B, T, D].
    rope: Callable[..., Any]


def liger_kernels() -> LigerKernels | None:
    """Return the kernels of the installed package; None if it is missing or cannot be imported
    here."""
    try:
        found = importlib.import_module("liger_kernel.ops")
    except ImportError:
        return None
    except Exception as error:  # Triton raises any kind where it finds no driver
        log.warning("liger-kernel is installed but cannot be imported", error=str(error))
        return None
    return LigerKernels(found.LigerRMSNormFunction.apply, found.LigerRopeFunction.apply)


def serves(device: torch.device) -> bool:
    """Return whether the kernels run on this device."""
    return device.type == "cuda"


def use_liger(model: torch.nn.Module) -> int:
    """Replace RMSNorm and rotary embedding of `model` by Liger's, and return the number of changed
    modules."""
    parameter = next(model.parameters(), None)
    if parameter is None or not serves(parameter.device):
        return 0
    kernels = liger_kernels()
    if kernels is None:
        return 0
    changed = 0
    rotaries: dict[Any, Any] = {}
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if _is_rms_norm(module, kernels, parameter.device):
            module.forward = types.MethodType(_norm_of(kernels), module)
            changed += 1
            continue
        own = type(module).forward
        if own not in rotaries:
            rotaries[own] = _rotated(own, kernels, parameter.device)
        if rotaries[own] is not None:
            module.forward = types.MethodType(rotaries[own], module)
            changed += 1
    log.info("liger kernels", modules=changed)
    return changed


def _agree(
    own: Callable[..., Any], ours: Callable[..., Any], inputs: tuple[torch.Tensor, ...]
) -> bool:
    """Return whether both give the same values and gradients, and can be called here at all."""
    try:
        return same_function(own, ours, inputs, _TOLERANCE)
    except Exception as error:  # compilers raise any kind
        log.warning("a kernel of liger-kernel does not run and is not used", error=str(error))
        return False


def _norm_of(kernels: LigerKernels) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Replacement of `forward` of an RMSNorm."""
        if hidden_states.dtype not in _TYPES or not hidden_states.numel():
            own: torch.Tensor = type(module).forward(module, hidden_states)
            return own
        found: torch.Tensor = _rms_norm(kernels, hidden_states, module.weight, eps_of(module))
        return found

    return norm


def _rms_norm(kernels: LigerKernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    # Not in place: the gradient may belong to a residual stream, too.
    return kernels.rms_norm(x, weight, eps, 0.0, "llama", False, None)


def _is_rms_norm(module: torch.nn.Module, kernels: LigerKernels, device: torch.device) -> bool:
    """Return whether `module` is an RMSNorm that Liger's computes alike, for any weights."""
    named = type(module).__name__.endswith("RMSNorm")
    if not named or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight, eps = module.weight, eps_of(module)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return False

    def own(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": w}, (x,))

    def ours(x: torch.Tensor, w: torch.Tensor) -> Any:
        return _rms_norm(kernels, x, w, eps)

    random = torch.Generator().manual_seed(0)
    for scale in (eps**0.5, 1.0, 100.0):
        drawn = (torch.randn((2, 3, len(weight)), generator=random) * scale).to(device)
        w = torch.randn((len(weight),), generator=random).to(device)
        if not _agree(own, ours, (drawn, w)):
            return False
    return True


class _LigerRotary:
    """Replacement of a model's `apply_rotary_pos_emb`, which it calls for unsupported inputs."""

    def __init__(self, own: Callable[..., Any], kernels: LigerKernels) -> None:
        self._own, self._kernels = own, kernels

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Rotated `q` and `k`, [B, H, T, D] each; `cos`, `sin` [B, T, D] have no gradient."""
        size = q.shape[-1]
        fits = q.ndim == k.ndim == 4 and cos.ndim == 3 and q.dtype == k.dtype and q.numel() > 0
        if args or kwargs or not fits or not size == k.shape[-1] == cos.shape[-1]:
            return self._own(q, k, cos, sin, *args, **kwargs)
        return self._kernels.rope(q, k, cos, sin)


def _rotated(forward: Any, kernels: LigerKernels, device: torch.device) -> Any:
    """Return a copy of `forward` that calls `_LigerRotary`, if that gives the same; else None."""

    def make(own: Callable[..., Any]) -> _LigerRotary | None:
        ours = _LigerRotary(own, kernels)
        random = torch.Generator().manual_seed(0)
        for size in (16, 32):
            q, k = (
                torch.randn((2, heads, 5, size), generator=random).to(device) for heads in (4, 2)
            )
            # As models make them: the angles of both halves are the same.
            half = torch.randn((2, 5, size // 2), generator=random).to(device)
            angles = torch.cat([half, half], -1)

            angled = functools.partial(functools.partial, cos=angles.cos(), sin=angles.sin())
            if not _agree(angled(own), angled(ours), (q, k)):
                return None
        return ours

    return rotated_with(forward, make)
