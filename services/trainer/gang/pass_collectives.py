"""Collectives of a gang's passes, and how a rank that ran out of memory gets through the rest.

FSDP gathers layers and scatters gradients in the order of the model's modules, the same in every
pass; ranks that divide a pass gather keys and values in each layer besides (group.py). A rank that
ran out in the middle of a pass has made the first k of these collectives, and the others wait for
it in the next one. It gives up its pass, and makes one over a single token in its place: the first
k collectives of that are skipped, the others are those that the ranks wait for. So all ranks reach
the end of the pass, whose gradients they drop together (memory/pass_budget.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


class PassCollectives:
    """Counts the collectives that this rank makes in a pass over its models."""

    def __init__(self) -> None:
        self._made = 0
        # How many of the next ones are not made.
        self._skipped: float = 0
        # Weak: models leave with their policies.
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow(self, module: Any) -> Any:
        """Count the collectives of a sharded model from now on; returns it."""
        gather, scatter = _AllGather(self), _ReduceScatter(self)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(gather)
                part.set_custom_reduce_scatter(scatter)
        self._models.add(module)
        return module

    def begin(self) -> None:
        """A pass begins."""
        self._made = 0

    def finish(self, smallest: Callable[[], object]) -> None:
        """Make the rest of the collectives of a pass that was given up. `smallest`: makes a pass
        over one token through the same models."""
        made, self._skipped = self._made, math.inf
        for model in self._models:
            _end_pass(model)
        self._skipped = made
        smallest()
        self._skipped = 0

    def make(self, collective: Callable[[], Any], output: torch.Tensor) -> Any:
        """Make a collective and count it once it is under way; or skip it, with an `output` of
        zeros."""
        if self._skipped:
            self._skipped -= 1
            output.zero_()
            return None
        work = collective()
        self._made += 1
        return work


class _AllGather(DefaultAllGather):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        gather = super().__call__
        work: dist.Work | None = self._collectives.make(
            lambda: gather(output_tensor, input_tensor, group, async_op), output_tensor
        )
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        scatter = super().__call__
        return self._collectives.make(
            lambda: scatter(output_tensor, input_tensor, group, op, async_op), output_tensor
        )


def _end_pass(model: Any) -> None:
    """Have FSDP end a pass that stopped anywhere: reshard layers, forget what is on its way."""
    state = model._get_fsdp_state()
    if state._is_root is None:
        return  # it has made no pass
    for part in state._state_ctx.all_states:
        for group in part._fsdp_param_groups:
            for parameter in group.fsdp_params:
                # What autograd has added of this pass.
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
    state._root_post_backward_final_callback()
    state._comm_ctx.all_gather_state = None
