"""A model whose parameters, gradients and optimizer lie on the ranks of a gang in parts (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(module: Any, mesh: DeviceMesh, *, half: bool = False) -> Any:
    """Keep one part of every parameter of `module`, which all ranks give alike, on each device.

    Layers are gathered one at a time. Gradients are sums over ranks, not means: the step divides
    once, by the tokens of all of them. `half`: gather in bfloat16; sums are float32 all the same.
    """
    how: dict[str, Any] = {"mesh": mesh}
    if half and mesh.device_type == "cuda":
        how["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    for part in list(module.modules()):
        if type(part).__name__ in kinds:
            fully_shard(part, **how)
    # The root too: its weights are parts between passes, also after one without a backward.
    fully_shard(module, **how, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # Gloo has no other reduction, and the bits of a sum need none.
            part.set_force_sum_reduction_for_comms(True)
    return module
