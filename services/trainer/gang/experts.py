"""Expert parallelism: the experts of a mixture divided over ranks, to which tokens travel.

Without it, FSDP gathers all experts of a layer on every rank, for each pass. With
`trainer.expert_parallel: n`, each of n neighbouring ranks keeps every n-th part of a layer's
experts, and all-to-all exchanges bring tokens to the ranks of their experts and back, as in GShard
(Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, section 3.1), but without a capacity: no
token is dropped. Where a gang has more ranks than n, the ranks with the same experts shard them
among themselves, and FSDP gathers these alone.

Routers are not divided, and choose as ever. What a rank computes for its experts is transformers'
own forward pass of the module (`torch.nn.functional.grouped_mm` where the device has it), each row
with the one expert that it came for; gate values are applied where the token came from.

To everything but a pass, experts are DTensors of the whole shape whose first dimension is sharded
over all ranks of the gang, so that states, checkpoints and weight updates are the same as
without expert parallelism.

torchtitan and prime-rl divide experts in the same way, for models of their own; transformers' EP
has no way to end a pass that one rank gave up (`PassCollectives`).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from services.trainer.gang.group import GangGroup, PassCollectives
from troupe.job import PolicySpec
from troupe.mixtures import shape_in
from troupe.rpc import FailedPrecondition
from troupe.scheduling.defaults import division_problem, expert_ranks

_DIVISION: Final = "_troupe_division"
_COUNTS: Final = "_troupe_counts"
_DIMENSIONS: Final = ("block", "expert", "shard")


def stacked_experts(model: Any) -> list[Any]:
    """Return the modules that hold a layer's experts stacked, and compute with them through
    transformers' interface of experts: `forward(states [T, D], indices [T, k], weights [T, k])`."""
    return [
        part
        for part in model.modules()
        if hasattr(part, "is_transposed")
        and isinstance(getattr(part, "num_experts", None), int)
        and all(p.shape[:1] == (part.num_experts,) for p in part.parameters())
    ]


def check_divisible(policy: str, spec: PolicySpec, model: Any, gang: int) -> int:
    """Return the number of ranks that divide the experts of `model` (`trainer.expert_parallel`);
    `gang`: the ranks over which its weights are sharded.

    Raises FailedPrecondition of kind "model_unsupported" if they cannot.
    """
    wanted = spec.trainer.expert_parallel
    if wanted == 1:
        return 1
    routing = shape_in(model.config)
    experts = 0 if routing is None else routing.experts
    found = stacked_experts(model)
    ranks = expert_ranks(wanted, gang, experts)
    problem, remedy = division_problem(ranks, gang, experts)
    if experts and (not found or any(part.num_experts != experts for part in found)):
        problem = f"{type(model).__name__} does not compute its experts as one stacked module"
        remedy = "Leave it at its default of 1."
    if not problem:
        return ranks
    if wanted == "auto":
        return 1
    raise FailedPrecondition(
        problem,
        kind="model_unsupported",
        field=f"policies.{policy}.trainer.expert_parallel",
        value=wanted,
        remedy=remedy,
    )


class ExpertDivision:
    """The division of experts over the ranks of a gang: which ranks have which, and the exchange of
    tokens between them."""

    def __init__(self, group: GangGroup, ranks: int) -> None:
        """Divide over `ranks` neighbouring ranks; all ranks of the gang call it, in the same order
        among its collectives."""
        self.ranks = ranks
        self.collectives: PassCollectives = group.collectives
        # Of each block of ranks that has all weights, row e: those that have the e-th part of the
        # experts. Neighbours are on one host, where links are fastest: tokens travel between them,
        # parameters between the ranks of a row.
        sharded = group.mesh.size()
        order = torch.arange(group.size).view(-1, sharded // ranks, ranks).transpose(1, 2)
        mesh = DeviceMesh(group.mesh.device_type, order, mesh_dim_names=_DIMENSIONS)
        self.group: dist.ProcessGroup = mesh.get_group("expert")
        self._shards = mesh["shard"]
        limit = timedelta(seconds=group.timeout_seconds)
        for one in (self.group, mesh.get_group("shard")):
            _set_pg_timeout(limit, one)
        # For everything but passes; with one rank per part, the mesh of all other parameters.
        self._mesh = mesh["expert", "shard"] if ranks < sharded else group.mesh
        self._placements: list[Placement] = [Shard(0)] * self._mesh.ndim

    @classmethod
    def of(cls, group: GangGroup, ranks: int) -> ExpertDivision | None:
        """Return the division of a gang's experts over `ranks`, one for all of its policies; None
        for one rank."""
        if ranks == 1:
            return None
        key = group.mesh.size(), ranks
        if key not in group.divisions:
            group.divisions[key] = cls(group, ranks)
        found: ExpertDivision = group.divisions[key]
        return found

    def shard(self, model: Any, how: dict[str, Any]) -> None:
        """Shard the experts of `model`, which is on the meta device. `how`: arguments of
        `fully_shard`; the mesh is the division's own."""
        if (policy := how.get("mp_policy")) is not None:
            # Rows are cast on their way, gate values stay as the router made them.
            how = {**how, "mp_policy": replace(policy, cast_forward_inputs=False)}
        for experts in stacked_experts(model):
            whole = dict(experts.named_parameters(recurse=False))
            for name, parameter in whole.items():
                part = parameter.new_empty(len(parameter) // self.ranks, *parameter.shape[1:])
                setattr(experts, name, torch.nn.Parameter(part, parameter.requires_grad))
            experts.num_experts //= self.ranks
            fully_shard(experts, **{**how, "mesh": self._shards})
            for name, parameter in whole.items():
                # FSDP takes over how the parameter is described (`FSDPParam.reset_sharded_param`).
                spread = distribute_tensor(
                    parameter, self._mesh, self._placements, src_data_rank=None
                )
                setattr(experts, name, torch.nn.Parameter(spread, parameter.requires_grad))
            experts.__dict__[_DIVISION] = self
            experts.forward = types.MethodType(_computed_elsewhere, experts)

    def routes(self, experts: Any, indices: torch.Tensor) -> _Routes:
        """Return the way of each (token, expert) pair of `indices` [T, k] to a module of experts.

        The ranks tell each other how many rows each has for each expert of the other. A layer that
        is recomputed for its backward pass (activation checkpointing) has the numbers of its
        forward pass: a rank that gave up the pass meanwhile has other tokens.
        """
        local, chosen = experts.num_experts, indices.reshape(-1)
        if torch._C._current_graph_task_id() != -1:
            counts, sizes = experts.__dict__[_COUNTS]
        else:
            # Sent and received rows, by rank and expert.
            counts = chosen.new_zeros(2, self.ranks, local)
            counts[0].view(-1).scatter_add_(0, chosen, torch.ones_like(chosen))
            self.collectives.make(
                lambda: dist.all_to_all_single(counts[1], counts[0], group=self.group),
                counts,
                kept=True,
            )
            # The one wait for the device in a layer: an exchange needs its sizes on the host.
            sizes = counts.sum(-1).tolist()
            experts.__dict__[_COUNTS] = counts, sizes
        sent, received = sizes
        order = torch.argsort(chosen, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        kinds = torch.arange(local, device=chosen.device).repeat(self.ranks)
        of_rows = kinds.repeat_interleave(counts[1].reshape(-1), output_size=sum(received))
        return _Routes(self, order, place, sent, received, of_rows, indices.shape[-1])


@dataclass(frozen=True)
class _Routes:
    """The way of n = T * k (token, expert) pairs to the ranks of their experts, and back."""

    division: ExpertDivision
    # [n]: the pairs by expert; and for each pair its place in that order.
    order: torch.Tensor
    place: torch.Tensor
    # Rows to and from each rank. Of a pass that this rank gave up, they are what it had announced.
    sent: Sequence[int]
    received: Sequence[int]
    # Of each received row its expert, among those of this rank.
    experts: torch.Tensor
    top_k: int

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [m, D] of other ranks' pairs for this rank's experts; `rows` [n, D]: of
        this rank's pairs, by expert."""
        return self._exchanged(rows, self.sent, self.received)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [n, D] of this rank's pairs, by expert; `rows` [m, D]: of other ranks'
        pairs."""
        return _fitted(self._exchanged(rows, self.received, self.sent), len(self.order))

    def _exchanged(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        rows = _fitted(rows, sum(sent)).contiguous()
        found = rows.new_empty(sum(received), rows.shape[-1])
        self.division.collectives.make(
            lambda: dist.all_to_all_single(
                found, rows, list(received), list(sent), group=self.division.group
            ),
            found,
        )
        return found


def _fitted(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` rows: these, without the last ones or with zeros behind them. The number
    differs only in the pass over one token that stands for one that was given up."""
    if len(rows) >= count:
        return rows[:count]
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[-1])])


class _RowsOfExperts(torch.autograd.Function):
    """The states [m, D] of all ranks' tokens for this rank's experts, from those [T, D] of this
    rank's tokens."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, routes: _Routes, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.routes, ctx.dtype = routes, states.dtype
        return routes.there(states.to(dtype).index_select(0, routes.order // routes.top_k))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        routes = ctx.routes
        pairs = routes.back(grad).index_select(0, routes.place)
        kind = torch.promote_types(grad.dtype, torch.float32)
        sums = pairs.view(-1, routes.top_k, grad.shape[-1]).sum(1, dtype=kind)
        return sums.to(ctx.dtype), None, None


class _RowsOfTokens(torch.autograd.Function):
    """Outputs of all ranks' experts for this rank's tokens, [T, k, D], exchanged for the outputs of
    this rank's experts for all ranks' tokens, [m, D]."""

    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, routes: _Routes) -> torch.Tensor:
        ctx.routes, ctx.count = routes, len(results)
        pairs = routes.back(results).index_select(0, routes.place)
        return pairs.view(-1, routes.top_k, results.shape[-1])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        routes = ctx.routes
        rows = grad.reshape(-1, grad.shape[-1]).index_select(0, routes.order)
        return _fitted(routes.there(rows), ctx.count), None


def _computed_elsewhere(
    experts: Any, states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Replacement of `forward` of a module of experts: tokens travel to the ranks of their experts,
    and what these make of them comes back."""
    division: ExpertDivision = experts.__dict__[_DIVISION]
    flat = states.reshape(-1, states.shape[-1])
    with torch.no_grad():
        routes = division.routes(experts, indices)
    dtype = next(experts.parameters()).dtype
    rows = _RowsOfExperts.apply(flat, routes, dtype)  # type: ignore[no-untyped-call]
    made = _RowsOfTokens.apply(_made(experts, rows, routes), routes)  # type: ignore[no-untyped-call]
    weighted = (made * weights.view(*made.shape[:2], 1)).view(*states.shape[:-1], *made.shape[1:])
    # No view: FSDP's hook would be lost where a model adds to it in place.
    found: torch.Tensor = weighted.sum(-2).to(states.dtype)
    return found


def _made(experts: Any, rows: torch.Tensor, routes: _Routes) -> torch.Tensor:
    """Return what this rank's experts make of `rows` [m, D]; of none, where it gave up the pass."""
    own, chosen = type(experts).forward, routes.experts
    used = slice(None)
    if not len(rows) or routes.division.collectives.gave_up:
        # One row of zeros, so that FSDP finds gradients of this rank's experts, which are zero, and
        # takes part in their reduction.
        used = slice(0, 0)
        rows = torch.cat([rows[:0], rows.new_zeros(1, rows.shape[-1])])
        chosen = chosen.new_zeros(1)
    ones = torch.ones_like(chosen, dtype=rows.dtype)
    results: torch.Tensor = own(experts, rows, chosen[:, None], ones[:, None])
    return results[used]
