"""How a model's layers compute: activations kept or computed again, kernels fused or not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from services.trainer.attention import PACKED, packed_attention
from services.trainer.kernels import layers_of, use_kernels
from troupe.job import TrainerSpec
from troupe.rpc import FailedPrecondition

_ARRANGED = "_troupe_arranged"


def arrange(policy: str, model: Any, spec: TrainerSpec) -> None:
    """Have the layers of `model` compute as `spec` says; once for a model.

    Raises FailedPrecondition of kind "model_unsupported" or "no_compiler", naming the field.
    """
    if getattr(model, _ARRANGED, False):
        return
    field = f"policies.{policy}.trainer"
    choose_kernels(model, spec)
    if spec.compile == "on":
        _check_compiler(next(model.parameters()).device, f"{field}.compile")
        # Attention has kernels of its own; what rows it is given would be compiled in.
        eager = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
        AttentionInterface.register(PACKED, eager)
        for layer in _layers(model, f"{field}.compile"):
            layer.forward = _Fused(layer.forward)
    if spec.activation_checkpointing:
        for layer in _layers(model, f"{field}.activation_checkpointing"):
            _compute_again(layer)
    setattr(model, _ARRANGED, True)


def choose_kernels(model: Any, spec: TrainerSpec) -> None:
    """What of an arranged model concerns one that is never differentiated too: both shall round
    alike."""
    if spec.kernels == "auto" and spec.compile != "on":  # a compiler fuses by itself
        use_kernels(model)


class _Fused:
    """A compiled `forward`; that of a copy of its layer is compiled for the copy.

    `Module.compile` would compile nothing where `forward` is computed again: it gives up at the
    first frame of torch's own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        # Packed pieces are of all sizes: no kernel for each.
        self._compiled = torch.compile(forward, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fused:
        return _Fused(copy.deepcopy(self._forward, memo))


def _compute_again(layer: torch.nn.Module) -> None:
    # Ours instead of transformers' own switch, which works in training mode only, with dropout.
    # Around `forward`, so that hooks of wrappers (FSDP) stay outside.
    inner = layer.forward
    layer.forward = functools.partial(checkpoint, inner, use_reentrant=False)


def _layers(model: Any, field: str) -> list[torch.nn.Module]:
    found = layers_of(model)
    if not found:
        raise FailedPrecondition(
            f"{type(model).__name__} does not say what its layers are",
            kind="model_unsupported",
            field=field,
            remedy="Leave it at its default, or use an architecture whose layers transformers can "
            "checkpoint.",
        )
    return found


def _check_compiler(device: torch.device, field: str) -> None:
    problem = ""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            problem = str(error).strip() or "there is no C++ compiler"
    else:
        from torch.utils._triton import has_triton

        problem = "" if has_triton() else "triton is not installed"
    if problem:
        raise FailedPrecondition(
            f"torch.compile cannot work on this worker: {problem}",
            kind="no_compiler",
            field=field,
            value="on",
            remedy="Use `auto` or `off`, or install a C++ compiler (CPU) or triton (GPU) there.",
        )
