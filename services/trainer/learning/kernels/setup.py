"""How a model is set up for its device: kernels, compilation and activation checkpointing."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from services.trainer.learning.kernels.cpu import layers_of, use_kernels
from services.trainer.learning.kernels.flash import use_flash_attention
from services.trainer.learning.kernels.gpu import use_liger
from services.trainer.learning.sequences.attention import PACKED, packed_attention
from troupe.job import TrainerSpec
from troupe.mixtures import is_mixture, mixed_blocks
from troupe.rpc import FailedPrecondition
from troupe.scheduling.defaults import CPU, DeviceDefaults

_CONFIGURED = "_troupe_configured"
_CHECKPOINTED = "_troupe_checkpointed"


def configure_model(policy: str, model: Any, spec: TrainerSpec, own: DeviceDefaults = CPU) -> None:
    """Set up kernels, compilation and activation checkpointing of `model`; call once per model.

    `own`: the defaults of its device. Raises FailedPrecondition of kind "model_unsupported" or
    "no_compiler", naming the field.
    """
    if getattr(model, _CONFIGURED, False):
        return
    field = f"policies.{policy}.trainer"
    choose_kernels(model, spec)
    if spec.compile == "on":
        _check_compiler(next(model.parameters()).device, f"{field}.compile")
        # Attention is not compiled: it has its own kernels, and would recompile for every packing.
        eager = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
        AttentionInterface.register(PACKED, eager)
        _keep_experts_eager(model, f"{field}.compile")
        for layer in _layers(model, f"{field}.compile"):
            layer.forward = _CompiledForward(layer.forward)
    layers: list[torch.nn.Module] = []
    wish = spec.activation_checkpointing
    if wish == "auto":
        layers = layers_of(model) if own.activation_checkpointing else []
    elif wish is not False:
        layers = _layers(model, f"{field}.activation_checkpointing")
        # The last layers are differentiated first, and free their activations then.
        layers = layers if wish is True else layers[:wish]
    for layer in layers:
        # transformers' own switch works in training mode only, where dropout is active. Wraps
        # `forward`, so that hooks of wrappers (FSDP) stay outside.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    setattr(model, _CHECKPOINTED, len(layers))
    setattr(model, _CONFIGURED, True)


def checkpointed_layers(model: Any) -> int:
    """Return how many layers of a configured model compute their activations twice."""
    return int(getattr(model, _CHECKPOINTED, 0))


def choose_kernels(model: Any, spec: TrainerSpec) -> None:
    """Use the fused kernels of the device if `spec` allows it.

    Also called for reference models, so that they round like the policy.
    """
    if spec.kernels == "auto" and spec.compile != "on":  # the compiler fuses operators itself
        use_kernels(model)
        use_liger(model)
        use_flash_attention(model)


class _CompiledForward:
    """The compiled `forward` of a layer; a deep copy compiles the copied layer's own.

    `Module.compile` would have no effect under activation checkpointing: it gives up at the first
    frame of torch itself.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        # Dynamic shapes: packed batches vary in size, and one kernel must serve all of them.
        self._compiled = torch.compile(forward, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CompiledForward:
        return _CompiledForward(copy.deepcopy(self._forward, memo))


def _keep_experts_eager(model: Any, field: str) -> None:
    """Leave routers and experts of a mixture out of compilation: how many tokens an expert has
    differs from pass to pass, and each number of experts in use would be compiled for itself."""
    if not is_mixture(model.config):
        return
    blocks = mixed_blocks(model)
    if not blocks:
        raise FailedPrecondition(
            f"the experts of {type(model).__name__} are in no modules of their own, which "
            "torch.compile would leave out",
            kind="model_unsupported",
            field=field,
            value="on",
            remedy="Leave it at its default.",
        )
    for block in blocks:
        block.forward = types.MethodType(_eager, block)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `forward` of a module that is not compiled."""
    return type(module).forward(module, *args, **kwargs)


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
