"""AdamW and its schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from troupe.job import OptimizerSpec

Moments = dict[str, torch.Tensor]


def learning_rate(spec: OptimizerSpec, applied: int, total: int) -> float:
    """The rate of the step after `applied` steps of at most `total`.

    A function of the version alone, so a resumed job needs no scheduler state.
    """
    if applied < spec.warmup_steps:
        return spec.lr * (applied + 1) / spec.warmup_steps
    span = max(1, total - 1 - spec.warmup_steps)
    progress = min(1.0, (applied - spec.warmup_steps) / span)
    floor = spec.final_lr_fraction
    if spec.schedule == "linear":
        return spec.lr * (1.0 - (1.0 - floor) * progress)
    if spec.schedule == "cosine":
        return spec.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return spec.lr


def make_optimizer(model: torch.nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over what is trained; matrices decay, norms and biases do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )


def export_moments(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> Moments:
    """The optimizer's state by `{slot}/{parameter}`; empty before the first step. Not a copy."""
    moments: Moments = {}
    for name, parameter in model.named_parameters():
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        for slot, value in state.items():
            moments[f"{slot}/{name}"] = value
    return moments


def import_moments(
    model: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    moments: Mapping[str, torch.Tensor],
    *,
    copy: bool = True,
) -> None:
    """Inverse of `export_moments`; forgets what the optimizer had before.

    Without `copy` the optimizer goes on in the tensors themselves, where they are on its device.
    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in moments.items():
        slot, _, name = key.partition("/")
        parameter = parameters[name]
        # AdamW keeps `step` in float32, the moments in the parameter's type.
        device = parameter.device
        optimizer.state.setdefault(parameter, {})[slot] = value.to(device, copy=copy)
