"""The learner on each rank of a gang: a `Learner` with this rank's shards of the model (FSDP2).

All ranks get the same calls in the same order (rank.py): they load, gather, save and suspend a
model that none of them holds as a whole. `GangLearner` (learner.py), in the worker, gives the
orders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from services.chassis.transfer import HostTransfer
from services.trainer.compute import gpu_memory
from services.trainer.gang.gang import Frame
from services.trainer.gang.gathering import gathered, nbytes_of, whole
from services.trainer.gang.group import GangGroup
from services.trainer.gang.loading import ShardedBase, adapt, load_sharded, on_device, shared_base
from services.trainer.gang.loads import LoadProgress, together
from services.trainer.gang.payloads import RankPayloads
from services.trainer.gang.sharded_state import (
    described,
    empty_state,
    file_checksum,
    read_shards,
    scatter_state,
    split,
    write_shards,
)
from services.trainer.gang.suspended_shards import bring_shards, store_shards
from services.trainer.learning.critic import with_value_head
from services.trainer.learning.forward import TrainedModel
from services.trainer.learning.kernels.setup import configure_model
from services.trainer.learning.learner import Learner
from services.trainer.learning.lora import Adapter, begin_with
from services.trainer.learning.model import check_teacher, load_base, load_model, with_dtype
from services.trainer.learning.samples import GroupBuffer, Row
from services.trainer.state.parameter_memory import PooledParameters, can_pin
from services.trainer.state.parts import StoredParts
from services.trainer.state.suspension import split_fields, under
from services.trainer.state.training_state import in_memory, reported
from troupe.algorithms.statistics import TokenStatistics
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.format import CheckpointFormat, Conversion, Read
from troupe.checkpoints.proof import Proof
from troupe.checkpoints.writing import safetensors_file
from troupe.job import JobSpec
from troupe.job.sections.policy import Offload
from troupe.rpc import ResourceExhausted, from_status, to_status
from troupe.scheduling.defaults import defaults_of
from troupe.transfer.checksum import dtype_name, dtype_of
from troupe.transfer.deferred import Layout

# File of a state that rank 0 writes for all.
_WHOLE = "whole.safetensors"
# Tensors that ranks gather.
What: TypeAlias = Literal["published", "weights", "moments", "base"]


def gather(group: GangGroup, tensors: Mapping[str, torch.Tensor], path: Path | None) -> None:
    """Gather sharded tensors, called by all ranks; the rank with a `path` writes them there.

    Raises ResourceExhausted of kind "storage_full" there, once the others are through.
    """
    as_they_are = [Conversion.unchanged(name, tensors[name]) for name in sorted(tensors)]
    _gather(group, as_they_are, tensors.__getitem__, tensors, path)


def gather_checkpoint(
    group: GangGroup,
    form: CheckpointFormat,
    weights: Mapping[str, torch.Tensor],
    path: Path | None,
) -> None:
    """Like `gather`, for the tensors of a checkpoint: each group is converted once it is whole."""
    # Cast to the output dtype before gathering: half as many bytes to move.
    part = functools.partial(form.read, weights)
    _gather(group, form.conversions, part, form.layout, path)


def _gather(
    group: GangGroup,
    conversions: Sequence[Conversion],
    part: Read,
    layout: Layout,
    path: Path | None,
) -> None:
    with gathered(group, conversions, part) as named:
        if path is not None:
            with in_memory(path, "state"), safetensors_file(path, layout) as write:
                for name, tensor in named:
                    write(name, tensor)


class RankLearner(Learner):
    """A `Learner` on one rank. All ranks are given the same calls in the same order."""

    def __init__(
        self,
        spec: JobSpec,
        policy: str,
        group: GangGroup,
        device: torch.device,
        *,
        double: bool = False,
        replicas: int = 1,
        **options: Any,
    ) -> None:
        """Create the rank's learner. `double`: in float64, for proofs; `replicas`: hosts that
        each have all weights; `options`: as for `Learner`."""
        own = spec.policies[policy]
        group = group.replicated(replicas).divided(own.trainer.context_parallel).with_payloads()
        self._group, self._double, self._device = group, double, device
        self._spec, self._policy_name = spec, policy
        self._half = own.language_model.weight_dtype == "bfloat16"
        self._frozen: ShardedBase | None = None
        if own.lora is not None:
            self._frozen = shared_base(group, own, spec.seed, self._load_base)
        published = getattr(torch, own.language_model.weight_dtype)
        module = self._sharded()
        if own.lora is not None and own.lora.path is not None:
            begin_with(policy, own.lora, module)
        trained = ShardedModel(module, device, published, self._sharded)
        super().__init__(trained, spec, policy, device=device, ranks=group, **options)
        self._pooled = ShardedParameters(module, own.trainer.offload)

    def _sharded(
        self, weights: Mapping[str, torch.Tensor] | None = None, *, values: bool = False
    ) -> Any:
        """Return this rank's shards of the policy's model, with its first weights, or with the
        trained `weights`; `values`: with a value function in place of the output layer."""
        spec, name = self._spec, self._policy_name
        own, base = spec.policies[name], self._frozen
        given, found = weights, []

        def prepare(module: Any) -> Any:
            if own.lora is not None:
                found.append(adapt(name, own.lora, module, spec.seed))
            if values:
                module = with_value_head(module, self._device)
            return on_device(module, self._device, torch.float64 if self._double else None)

        module = load_sharded(
            self._group,
            self._device,
            name,
            own,
            lambda: load_model(name, own, spec.seed),
            dtype=self._dtype(torch.float32 if base is None else None),
            half=self._half,
            prepare=prepare,
            weights=given if base is None else base.tensors,
            shared=base is not None,
        )
        if base is not None:
            adapter = Adapter(module, base, found[0])
            if given is not None:
                adapter.load(given)
            if not values:
                module.troupe_adapter = adapter
        return module

    def _load_base(self) -> ShardedBase:
        """Return this rank's shards of the frozen model under an adapter."""
        spec, name = self._spec, self._policy_name
        own, forms = spec.policies[name], []

        def prepare(module: Any) -> Any:
            forms.append(CheckpointFormat(module, module.dtype))
            return module.requires_grad_(False)

        module = load_sharded(
            self._group,
            self._device,
            name,
            own,
            lambda: load_base(name, own, spec.seed),
            dtype=self._dtype(),
            prepare=prepare,
        )
        return ShardedBase(module, forms[0], self._group)

    def _dtype(self, dtype: torch.dtype | None = None) -> torch.dtype:
        """Return `dtype`, by default the published one; float64 in proofs."""
        published = torch.bfloat16 if self._half else torch.float32
        return torch.float64 if self._double else dtype or published

    def _critic_module(self, policy: Any) -> Any:
        """Return this rank's shards of a copy of the model `policy` with a value head."""
        module = self._sharded(self._trained.weights(), values=True)
        own = defaults_of(gpu_memory(self._device))
        configure_model(self._policy_name, module, self._policy.trainer, own)
        return module

    def _load_teacher(self, name: str) -> Any:
        """Return this rank's shard of a teacher."""
        spec = with_dtype(name, self._job)
        own, kept = spec.policies[name], torch.float32
        if own.language_model.weight_dtype == "bfloat16":
            kept = torch.bfloat16

        def checked(module: Any) -> Any:
            check_teacher(name, module, self.vocabulary)
            return module.requires_grad_(False)

        return load_sharded(
            self._group,
            self._device,
            name,
            own,
            lambda: load_model(name, own, spec.seed),
            dtype=torch.float64 if self._double else kept,
            # Its experts may have another number.
            expert_parallel=False,
            prepare=checked,
        )

    def save(self, directory: Path) -> dict[str, str]:
        """Write this rank's part of the training state, and return the checksums of its files. If
        hosts do not share a disk, rank 0 writes the whole state on the leader's disk.

        Raises ResourceExhausted of kind "storage_full" on all ranks.
        """
        if not self._group.shares_disk:
            return self._save_whole(directory / _WHOLE if self._group.rank == 0 else None)
        with reported(directory, "training state"):
            return write_shards(directory, self.weights() | self.moments(), self._group.control)

    def _save_whole(self, path: Path | None) -> dict[str, str]:
        outcome = None
        try:
            gather(self._group, self.weights() | self.moments(), path)
        except ResourceExhausted as error:
            outcome = Frame({"full": True}, to_status(error).SerializeToString())
        if path is not None and outcome is None:
            outcome = Frame({"full": False})
        outcome = self._group.broadcast(outcome)
        if outcome.header["full"]:
            raise from_status(outcome.body)
        return {} if path is None else {path.name: file_checksum(path)}

    def _read(self, directory: Path, *, moments: bool = True) -> Tensors:
        """Return this rank's shards of the state in `directory`, on the leader's host."""
        group, own = self._group, self.weights()
        there = group.shares_disk or group.rank == 0
        known = described(directory) if there else {}
        if not group.shares_disk:
            said = {name: (list(size), dtype_name(dtype)) for name, (size, dtype) in known.items()}
            frame = group.broadcast(Frame({"tensors": said}) if there else None)
            known = {
                name: (torch.Size(size), dtype_of(dtype))
                for name, (size, dtype) in frame.header["tensors"].items()
            }
        room = empty_state(known, own, self._sharded_tensors())
        room = room if moments else split(room)[0]
        if group.shares_disk:
            read_shards(directory, room, group.control)
        else:
            scatter_state(directory if there else None, room, group)
        return room

    def load_shards(self, directory: Path) -> None:
        """Load the state that a gang of any size or a single device wrote.

        Raises ValueError for another model's state.
        """
        self.restore(*split(self._read(directory)))

    def receive(self, transfer: HostTransfer, stored: StoredParts) -> None:
        """Load weights and moments that another process has stored."""
        self.restore(*split(self._brought(transfer, stored)))

    def load_reference_shards(self, directory: Path) -> None:
        """Keep a frozen model with the weights in `directory` for the divergence."""
        self.set_reference(self._read(directory, moments=False))

    def suspend(self, transfer: HostTransfer, key: str) -> tuple[StoredParts, dict[str, Any]]:
        """Store the state in parts below `key` for `resume`, also in the middle of a step, and
        return their description and its plain values.

        Raises StorageFull on all ranks; the step may go on then.
        """
        self._fill_payloads()
        sums = self._step.sums
        mine = sums.tokens = self._group.merged(sums.tokens)
        if self._critic is not None:
            self._critic.leave_statistics(here=self._group.rank == 0)
        tensors, values = self.suspended()
        if self._group.rank:
            sums.tokens = type(mine)()  # rank 0 has the merged sums now
        return store_shards(self._group, transfer, key, tensors), values

    def _fill_payloads(self) -> None:
        """Let rank 0, whose rows are stored, have the contents of the payloads of rows that are
        held back."""
        sums, payloads = self._step.sums, self.payloads
        rows = [*sums.held, *sums.groups.waiting]
        if not any(row.payloads for row in rows):  # as on all ranks
            return

        def read(progress: LoadProgress) -> list[Row]:
            if self._group.rank:
                return rows
            several = [row.payloads for row in rows]
            filled = payloads.filled(several, progress)
            return [replace(row, payloads=some) for row, some in zip(rows, filled, strict=True)]

        found, held = together(self._group, "reading payloads", read), len(sums.held)
        sums.held, sums.groups = found[:held], GroupBuffer()
        sums.groups.add(found[held:])

    def resume(self, transfer: HostTransfer, stored: StoredParts, values: dict[str, Any]) -> None:
        """Continue from the state that a gang or a single device has suspended."""
        found = self._brought(transfer, stored)
        if self._group.rank:
            fresh, counts = split_fields(TokenStatistics())
            found = {n: t for n, t in found.items() if not n.startswith("tokens/")}
            found |= under("tokens", fresh)
            values = {**values, "tokens": counts}
            if self._critic is not None:
                found, values = self._critic.without_statistics(found, values)
        self.adopt(found, values)

    @property
    def payload_kinds(self) -> Collection[str]:
        """The kinds of payloads that the model and its teachers take."""
        return self._passes.payload_kinds

    @property
    def payloads(self) -> RankPayloads:
        """Contents of the payloads of the step's rows."""
        return self._group.payloads

    def discard(self) -> None:
        """Discard the current step: gradients, statistics, rows, contents of payloads."""
        super().discard()
        self.forget_payloads()

    def forget_payloads(self) -> None:
        """Forget payload contents, and delete the copies that this host fetched; the leader deletes
        the originals."""
        self.payloads.forget(fetched=self._group.host > 0)

    def _brought(self, transfer: HostTransfer, stored: StoredParts) -> Tensors:
        """Return this rank's shards of a stored state, whose parts are then deleted."""
        own = self._sharded_tensors()
        return bring_shards(self._group, transfer, stored, own, self._device)

    def _sharded_tensors(self) -> Tensors:
        """Return the parameters whose sharding the tensors of a state follow, by their names
        there."""
        numbered = {str(i): p.detach() for i, p in enumerate(self._trained.parameters)}
        trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        critic = {} if self._critic is None else self._critic.sharded()
        return self.weights() | trained | under("gradients", numbered) | critic

    def gather(self, what: What, path: Path | None) -> None:
        """Gather whole tensors, and write them on the rank that has a `path`."""
        group = self._group
        if what == "base":
            assert self._frozen is not None, "the policy has an adapter"
            gather_checkpoint(group, self._frozen.format, self._frozen.tensors, path)
        elif what == "published" and self.base is not None:
            gather(group, dict(self._trained.published()), path)
        elif what == "published":
            gather_checkpoint(group, self._trained.format, self.weights(), path)
        else:
            gather(group, self.weights() if what == "weights" else self.moments(), path)

    def prove_gathered(self, passage: Sequence[int], path: Path | None) -> Proof | None:
        """Return, on the rank that has a `path`, the proof of the published tensors that were
        gathered there. That rank computes alone, and the others wait."""
        layout = self._trained.format.layout
        # Each tensor is read at most twice.
        with self._group.waiting_for(2 * sum(map(nbytes_of, layout.values()))):
            proof = None
            if path is not None:
                proof = self._trained.proof_of(load_file(path), passage)
            self._group.meet()
            return proof


class ShardedModel(TrainedModel):
    """A `TrainedModel` whose parameters are sharded: this rank holds one shard of each."""

    def __init__(
        self,
        module: Any,
        device: torch.device,
        published_type: torch.dtype,
        make: Callable[[Mapping[str, torch.Tensor]], Any],
    ) -> None:
        """`make`: makes another model like `module` with other weights; called by all ranks."""
        super().__init__(module, device, published_type)
        self._make = make

    def weights(self) -> Tensors:
        """Return this rank's shards of parameters and buffers, or of an adapter; not copies."""
        if self.base is not None:
            return super().weights()
        named: Tensors = {name: p.detach() for name, p in self.module.named_parameters()}
        for name, tensor in self.module.state_dict().items():
            # A tensor tied to a parameter is sharded like it.
            if name not in named and not isinstance(tensor, DTensor):
                named[name] = tensor.detach()
        return named

    @staticmethod
    def _whole(tensor: torch.Tensor) -> torch.Tensor:
        """Gather the full tensor, which all ranks must do."""
        return whole(tensor)

    def frozen_copy(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Return a second sharded module with these weights, which no gradient reaches."""
        return self._make(weights).requires_grad_(False)


class ShardedParameters(PooledParameters):
    """A rank's shards of the trained parameters. FSDP owns their memory: it is not released, and
    weights are copied into it. With `offload: all`, FSDP gets host memory instead between steps."""

    def __init__(self, module: Any, offload: Offload) -> None:
        """`module`: a model that FSDP shards."""
        super().__init__({}, offload)
        parts = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
        found = [
            p for part in parts for group in part._fsdp_param_groups for p in group.fsdp_params
        ]
        self._shards = [one for one in found if one.sharded_param.requires_grad]
        self._memory: list[torch.Tensor] = []
        self._away = False

    def leave(self) -> None:
        """Move the shards to host memory until `arrive`: a step has ended."""
        if not self._leaves or self._away:
            return
        here = [one._sharded_param_data for one in self._shards]
        if not self._memory:
            self._memory = [
                torch.empty_like(t, device="cpu", pin_memory=can_pin(t.device)) for t in here
            ]
        for there, data in zip(self._memory, here, strict=True):
            there.copy_(data, non_blocking=True)
        self._devices = [data.device for data in here]
        for device in {device for device in self._devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        for shard, there in zip(self._shards, self._memory, strict=True):
            _use_memory(shard, there)
        self._away = True

    def arrive(self) -> None:
        """Move the shards back to the device; FSDP's gathers wait for the copies."""
        if self._away:
            for shard, device in zip(self._shards, self._devices, strict=True):
                data = shard._sharded_param_data.to(device, copy=True, non_blocking=True)
                _use_memory(shard, data)
            self._away = False

    def attach(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the weights unchanged; parameters do not take over their memory."""
        return dict(weights)

    def release(self) -> list[torch.Tensor]:
        """Return nothing, since the memory is freed with the model."""
        return []


def _use_memory(shard: Any, data: torch.Tensor) -> None:
    """Let FSDP keep a shard in `data` [padded elements], as in `FSDPParam.reset_sharded_param`."""
    local = shard.sharded_param._local_tensor
    shard._sharded_param_data = data
    shard.sharded_param._local_tensor = data.as_strided(local.size(), local.stride())
