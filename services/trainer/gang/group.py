"""The rank group of a gang: shares of rows, passes in lockstep, collective operations.

With `trainer.context_parallel` neighbouring ranks compute the same rows, of which each has a slice
of the tokens of a pass (sequences/packing.py). Ranks exchange only attention's keys and values,
which are gathered layer by layer, as in the training of Llama 3 (https://arxiv.org/abs/2407.21783,
section 3.3.2): with grouped queries they are small compared with the activations, heads need not be
divisible, and masks of prefix trees are unchanged.

FSDP gathers layers and scatters gradients in the order of the model's modules, the same in every
pass. A rank that ran out of memory during a pass has made the first k of these collectives, and the
other ranks wait for it in the next one. It gives up its pass, and makes one over a single token
instead: the first k collectives of this pass are skipped (`PassCollectives`), and the rest are the
ones for which the ranks wait. So all ranks reach the end of the pass, whose gradients they drop
together (learning/pass_budget.py).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from services.trainer.compute import give_back_memory
from services.trainer.gang.gang import Frame
from services.trainer.gang.loads import LoadProgress, together
from services.trainer.gang.payloads import RankPayloads
from services.trainer.learning.ranks import (
    ELSEWHERE,
    PassTooLarge,
    RankBatches,
    RankGroup,
    S,
    Stopped,
    T,
)
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.packing import PackedBatch, Slices
from troupe.disks import SLOWEST_BYTES_PER_SECOND

# Bytes per parameter of a policy and its critic: the weight and two moments in float32.
_STATE_BYTES: Final = 24


def spans(lengths: Sequence[int], size: int) -> list[range]:
    """Split `lengths` into `size` consecutive spans of about equal sums."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    # A row belongs to the span that contains its midpoint.
    middles = ends - np.asarray(lengths, np.int64) / 2 if total else ends
    bounds = [total * k / size for k in range(1, size)]
    cuts = [0, *np.searchsorted(middles, bounds).tolist(), len(lengths)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def share_of(rows: Sequence[Row], rank: int, size: int) -> list[int]:
    """Return the indices of the rows that `rank` of `size` computes, with about equally many tokens
    per rank.

    Every row is computed by exactly one rank. Rows with common prefixes stay together, so that most
    prefixes are computed once. The result is independent of the order of rows, except for equal
    rows.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].ids.astype(">i8").tobytes(), i))
    return sorted(order[k] for k in spans([len(rows[i].ids) for i in order], size)[rank])


class GangBatches(RankBatches):
    """Iterator over a rank's batches, in lockstep with the other ranks."""

    def __init__(
        self,
        batches: Sequence[PackedBatch],
        stop: threading.Event | None,
        asked_to_stop: Callable[[], bool],
        control: dist.ProcessGroup,
        collectives: PassCollectives,
    ) -> None:
        super().__init__(batches, stop)
        self._asked_to_stop, self._control = asked_to_stop, control
        self._collectives = collectives
        # Why this rank gave up a pass; empty if it did not.
        self._shortage = ""

    def __next__(self) -> PackedBatch | None:
        self._settle()
        stop = self._asked_to_stop() or (self._stop is not None and self._stop.is_set())
        keeps = bool(self._left) and self._left[-1].keeps
        sees = bool(self._left) and self._left[-1].payloads is not None
        mine = [bool(self._left), stop, bool(self.problem), bool(self._shortage), keeps, sees]
        flags = torch.tensor(mine, dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._control)
        more, stop, broken, short, self.keeping, sees = (bool(flag) for flag in flags.tolist())
        # Pieces have no payloads.
        self.seeing = sees and not self.keeping
        if stop:
            raise Stopped
        if short:
            raise PassTooLarge(self._shortage or "another rank of the gang ran out of memory")
        if broken:
            self.problem = self.problem or ELSEWHERE
            raise StopIteration
        if not more:
            raise StopIteration
        # Passes with gradients and without have other collectives: all ranks make one kind.
        if not self._left or keeps != self.keeping:
            return None
        batch = self._pop()
        return replace(batch, payloads=()) if self.seeing and batch.payloads is None else batch

    def run(self, compute: Callable[[], T], smallest: Callable[[], object]) -> T | None:
        self._collectives.begin()
        return super().run(compute, smallest)

    def _ran_out(self, message: str, smallest: Callable[[], object]) -> None:
        gc.collect()
        give_back_memory()
        self._collectives.finish(smallest)
        self._shortage = message


class GangGroup(RankGroup):
    """The rank group of a gang, with collective operations over gloo."""

    def __init__(
        self,
        mesh: DeviceMesh,
        control: dist.ProcessGroup,
        asked_to_stop: Callable[[], bool],
        data_dir: Path,
        *,
        timeout_seconds: float = 120.0,
        report_load: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Create the group. `mesh`: one device of each rank. `asked_to_stop`: whether the leader
        gave up the step.

        `data_dir`: this host's data directory. `timeout_seconds`: the limit of one operation.
        `report_load` is called with the loaded and total bytes of all ranks.
        """
        self.timeout_seconds, self.report_load = timeout_seconds, report_load
        self.mesh, self.control = mesh, control
        self.rank, self.size = dist.get_rank(control), dist.get_world_size(control)
        places = int(os.environ["LOCAL_WORLD_SIZE"])
        # Number of the host (0: the leader's), and of the rank on it. Not LOCAL_RANK, which is 0 if
        # torchrun gives each rank its own device.
        self.host, self.local = divmod(self.rank, places)
        self.hosts = self.size // places
        self._asked_to_stop = asked_to_stop
        # Seconds that an operation may take now, the last of those that contexts have set; of all
        # copies of this group.
        self._limits = [timeout_seconds]
        # Counter of the collectives of passes; it must follow every sharded model.
        self.collectives = PassCollectives()
        # Divisions of experts (gang/experts.py), by numbers of ranks: of the mesh, of a division.
        self.divisions: dict[tuple[int, int], Any] = {}
        self._slice_group: dist.ProcessGroup | None = None
        # The ranks in blocks, by the number of blocks, for all policies; and the ranks with this
        # one's shards in all blocks, None where weights are sharded over all ranks.
        self._blocks: dict[int, DeviceMesh] = {}
        self._peers: dist.ProcessGroup | None = None
        # Contents of the payloads of the policy's rows.
        self.payloads = RankPayloads()
        # Whether the hosts of all ranks share the data directory of rank 0's.
        self.shares_disk = self._shares_disk(data_dir)

    def share(self, rows: Sequence[Row]) -> list[int]:
        """Return the indices of the rows that this rank computes, or divides with others."""
        n = 1 if self.slices is None else self.slices.size
        return share_of(rows, self.rank // n, self.size // n)

    def divided(self, context_parallel: int) -> GangGroup:
        """Return the same group for a policy whose passes are divided among this number of ranks;
        all ranks call it."""
        if context_parallel == 1:
            return self
        found = copy.copy(self)
        found.slices, found._slice_group = slices_of(
            self.rank, self.size, context_parallel, self.collectives
        )
        return found

    def replicated(self, replicas: int) -> GangGroup:
        """Return the same group for a policy whose weights are replicated: each of `replicas`
        blocks of ranks (one or more hosts) has all of them. All ranks call it.

        Passes then gather weights and scatter gradients within a host, and the hosts' sums of
        gradients are merged once per update (`sum_over_replicas`): hybrid sharding (Zhao et al.
        2023, arXiv 2304.11277, section 3.2.2) with the reduction between hosts deferred.
        """
        if replicas == 1:
            return self
        each = self.size // replicas
        if replicas not in self._blocks:
            kind, names = str(self.mesh.device_type), ("replica", "rank")
            made = init_device_mesh(kind, (replicas, each), mesh_dim_names=names)
            self._blocks[replicas] = made
        found, blocks = copy.copy(self), self._blocks[replicas]
        found.mesh, found._peers = blocks["rank"], blocks.get_group("replica")
        found.replicas, found.replica = replicas, self.rank // each
        return found

    def with_payloads(self) -> GangGroup:
        """Return the same group for a policy with payloads of its own."""
        found = copy.copy(self)
        found.payloads = RankPayloads()
        return found

    def planned(self, make: Callable[[], Sequence[PackedBatch]]) -> Sequence[PackedBatch]:
        """Return the batches that `make` makes for this rank, with the contents of their payloads,
        once all ranks have theirs; all ranks call it.

        A `TroupeError` of one rank is raised on all. Raises DeadlineExceeded as `together`.
        """

        def read(progress: LoadProgress) -> list[PackedBatch]:
            batches = make()
            several = [batch.payloads or () for batch in batches]
            filled = self.payloads.filled(several, progress)
            return [
                replace(batch, payloads=payloads) if payloads else batch
                for batch, payloads in zip(batches, filled, strict=True)
            ]

        return together(self, "reading payloads", read)

    def sum_over_replicas(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each tensor over this rank's peers in all replicas, in place."""
        if self._peers is None:
            return
        works = [
            dist.all_reduce(one, group=self._peers, async_op=True)
            for one in tensors
            if one.numel()  # shards of ranks that have no rows of a tensor
        ]
        for work in works:
            work.wait()

    def agreed(self, value: float) -> float:
        """Return the `value` of the first replica, on all ranks."""
        if self._peers is None:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(found, 0, self.control)
        return float(found)

    def bring_to_replicas(self, whole: torch.Tensor) -> torch.Tensor:
        """Return `whole`, which rank 0 has and the others have room for, on the ranks that
        distribute it: the first of every replica."""
        if self._peers is not None and self.rank % self.mesh.size() == 0:
            dist.broadcast(whole, 0, self._peers)
        return whole

    def summed_over_slices(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values`, [n] on the device, over the ranks that divide this one's
        passes."""
        group = self._slice_group
        if group is not None:
            self.collectives.make(lambda: dist.all_reduce(values, group=group), values)
        return values

    def batches(self, batches: Sequence[PackedBatch], stop: threading.Event | None) -> RankBatches:
        """Iterate over `batches`, as often as the rank with the most batches."""
        return GangBatches(batches, stop, self._asked_to_stop, self.control, self.collectives)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `values`, [n] on the CPU."""
        dist.all_reduce(values, group=self.control)
        return values

    def merged(self, sums: S) -> S:
        """Merge the fields of a dataclass over ranks: numbers and arrays are added, `*_min` and
        `*_max` are minimum and maximum, flags are true if any is true; for other fields, take the
        first value that is not the default.
        """
        fields = dataclasses.fields(sums)  # type: ignore[arg-type]
        values = {field.name: getattr(sums, field.name) for field in fields}
        mine = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        everyone = [json.loads(data) for data in self.gather(json.dumps(mine).encode())]
        merged: dict[str, Any] = {}
        for field in fields:
            found = [one[field.name] for one in everyone]
            if field.name.endswith("_min"):
                merged[field.name] = min(found)
            elif field.name.endswith("_max"):
                merged[field.name] = max(found)
            elif isinstance(found[0], bool):
                merged[field.name] = any(found)
            elif isinstance(found[0], int | float):
                merged[field.name] = sum(found)
            elif any(isinstance(one, list) for one in found):  # a rank without rows has none
                parts = [torch.tensor(one, dtype=torch.float64) for one in found if one]
                merged[field.name] = torch.stack(parts).sum(0)
            else:
                known = [value for value in found if value != field.default]
                merged[field.name] = known[0] if known else found[0]
        return type(sums)(**merged)

    def _shares_disk(self, data_dir: Path) -> bool:
        if self.hosts == 1:
            return True
        mark: Path | None = None
        if self.rank == 0:
            data_dir.mkdir(parents=True, exist_ok=True)
            mark = data_dir / f".gang-{secrets.token_hex(8)}"
            mark.touch()
        try:
            named = self.broadcast(None if mark is None else Frame({"mark": mark.name}))
            there = (data_dir / named.header["mark"]).exists()
            return all(json.loads(one) for one in self.gather(json.dumps(there).encode()))
        finally:
            if mark is not None:
                mark.unlink(missing_ok=True)

    @contextlib.contextmanager
    def waiting_for(self, nbytes: float) -> Iterator[None]:
        """Enter a context of all ranks, in which an operation may take as long as the slowest disk
        or network takes for this number of bytes, in addition to the usual limit."""
        seconds = self.timeout_seconds + nbytes / SLOWEST_BYTES_PER_SECOND
        self._limits.append(max(seconds, self._limits[-1]))
        self._set_limit()
        try:
            yield
        finally:
            self._limits.pop()
            self._set_limit()

    def _set_limit(self) -> None:
        limit = timedelta(seconds=self._limits[-1])
        peers = [] if self._peers is None else [self._peers]
        for group in (self.control, *self.mesh.get_all_groups(), *peers):
            _set_pg_timeout(limit, group)

    def waiting_for_disks(self, parameters: int) -> contextlib.AbstractContextManager[None]:
        """Return a context of all ranks, in which they wait for each other as long as a slow disk
        may take for the state of this number of parameters, or for each rank's part of it if they
        share a disk."""
        part = _STATE_BYTES * parameters / (self.mesh.size() if self.shares_disk else 1)
        return self.waiting_for(part)

    def meet(self) -> None:
        """Wait until all ranks have called this."""
        dist.all_reduce(torch.zeros(1), group=self.control)

    # Bytes between ranks.

    def broadcast(self, frame: Frame | None) -> Frame:
        """Broadcast a frame of rank 0 to all ranks; the others pass None."""
        data = b"" if frame is None else frame.encode()
        length = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(length, 0, self.control)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0, self.control)
        return Frame.decode(buffer.numpy().tobytes())

    def gather(self, data: bytes) -> list[bytes]:
        """Gather bytes of all ranks, in the order of ranks, on all ranks."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), self.control)
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, self.control)
        return [
            one[: int(length)].numpy().tobytes() for one, length in zip(found, lengths, strict=True)
        ]


# Ranks that divide the tokens of each pass.


def slices_of(
    rank: int, size: int, context_parallel: int, collectives: PassCollectives
) -> tuple[Slices, dist.ProcessGroup]:
    """Return the slices that `rank` of a gang of `size` shares in, and the process group of their
    ranks.

    `collectives`: makes the passes' collectives. All ranks call it, in the same order among the
    gang's collectives. Ranks that divide a pass are neighbours: by torchrun's numbering on one
    host, where links are fastest.
    """
    mine: dist.ProcessGroup | None = None
    for first in range(0, size, context_parallel):
        members = list(range(first, first + context_parallel))
        made = dist.new_group(members)
        if rank in members:
            mine = made
    assert mine is not None, "context_parallel divides the gang"
    group = mine

    def gather(
        key: torch.Tensor, value: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat([key, value], -1)
        found: torch.Tensor = _GatheredStates.apply(  # type: ignore[no-untyped-call]
            joined, width, group, collectives
        )
        keys, values = torch.split(found, [key.shape[-1], value.shape[-1]], -1)
        return keys, values

    return Slices(rank % context_parallel, context_parallel, gather), group


class _GatheredStates(torch.autograd.Function):
    """Gathering of the states [1, G, n * w, D] of all n ranks, w tokens each, from this rank's [1,
    G, t, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        width: int,
        group: dist.ProcessGroup,
        collectives: PassCollectives,
    ) -> torch.Tensor:
        _, heads, tokens, size = states.shape
        ctx.tokens, ctx.group, ctx.collectives = tokens, group, collectives
        # Tokens first, so that the ranks' parts are adjacent.
        mine = states.new_zeros(width, heads, size)
        mine[:tokens] = states[0].transpose(0, 1)
        found = mine.new_empty(dist.get_world_size(group) * width, heads, size)
        collectives.make(lambda: dist.all_gather_into_tensor(found, mine, group), found)
        return found.transpose(0, 1).unsqueeze(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Each rank's queries contribute to the gradient of all keys and values: sum the parts in
        # float32, for any number of ranks.
        kind = torch.promote_types(grad.dtype, torch.float32)
        whole = grad[0].transpose(0, 1).to(kind).contiguous()
        mine = whole.new_empty(len(whole) // dist.get_world_size(ctx.group), *whole.shape[1:])
        ctx.collectives.make(lambda: dist.reduce_scatter_tensor(mine, whole, group=ctx.group), mine)
        own = mine[: ctx.tokens].transpose(0, 1).unsqueeze(0)
        return own.to(grad.dtype), None, None, None


class PassCollectives:
    """A counter of the collectives that this rank makes in a pass over its models."""

    def __init__(self) -> None:
        self._made = 0
        # Number of next collectives to skip.
        self._skipped: float = 0
        # Whether the present pass stands for one that was given up, after this number of them.
        self.gave_up = False
        self._made_before = 0
        # Outputs of collectives, by their number in the pass.
        self._kept: dict[float, torch.Tensor] = {}
        # Weak references: models are freed with their policies.
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow(self, module: Any) -> Any:
        """Count the collectives of a sharded model from now on, and return the model."""
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
        self._kept.clear()

    def finish(self, smallest: Callable[[], object]) -> None:
        """Make the rest of the collectives of a pass that was given up. `smallest`: makes a pass
        over one token through the same models."""
        self._made_before, self._skipped = self._made, math.inf
        for model in self._models:
            _end_pass(model)
        self._skipped, self.gave_up = self._made_before, True
        try:
            smallest()
        finally:
            self._skipped, self.gave_up = 0, False

    def make(
        self, collective: Callable[[], Any], output: torch.Tensor, *, kept: bool = False
    ) -> Any:
        """Make a collective and count it once it is under way; or skip it, with an `output` of
        zeros.

        `kept`: later collectives depend on the output, such as sizes that ranks have announced to
        each other; where the collective is skipped, the output is what it was in the pass that was
        given up.
        """
        if self._skipped:
            before = self._kept.get(self._made_before - self._skipped)
            self._skipped -= 1
            if before is None:
                output.zero_()
            else:
                output.copy_(before)
            return None
        work = collective()
        if kept:
            self._kept[self._made] = output
        self._made += 1
        return work


class _AllGather(DefaultAllGather):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        gather = functools.partial(super().__call__, output_tensor, *args, **options)
        return self._collectives.make(gather, output_tensor)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, collectives: PassCollectives) -> None:
        self._collectives = collectives

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        scatter = functools.partial(super().__call__, output_tensor, *args, **options)
        return self._collectives.make(scatter, output_tensor)


def _end_pass(model: Any) -> None:
    """Let FSDP end a pass that stopped at any point: reshard layers, and forget pending
    operations."""
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
