"""The learner of a policy that a gang trains.

`RankLearner` is a `Learner` with one rank's part of the model (FSDP2). `GangLearner` is what the
worker uses: every call is an order to all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from services.chassis.transfer import HostTransfer
from services.trainer.compute import gpu_memory
from services.trainer.gang.gang import ALONE, Frame, GangHosts, Gangs, Loaded, encode_rows
from services.trainer.gang.gathering import gathered, nbytes_of, whole
from services.trainer.gang.group import GangGroup, LoadProgress, together
from services.trainer.gang.loading import (
    ShardedBase,
    adapt,
    adapted_outline,
    load_sharded,
    on_device,
    shared_base,
)
from services.trainer.gang.payloads import RankPayloads, StepPayloads
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
from services.trainer.learning.interface import Applied, PolicyLearner
from services.trainer.learning.learner import Learner
from services.trainer.learning.lora import AdaptedBase, Adapter, begin_with
from services.trainer.learning.model import (
    check_teacher,
    load_base,
    load_model,
    outline,
    outline_to_save,
    positions_of,
    with_dtype,
)
from services.trainer.learning.optimizer import Moments
from services.trainer.learning.passes import configure_model
from services.trainer.learning.samples import GroupBuffer, Load, Row, columns_of, parse_rows
from services.trainer.state.parts import PARTS, Box, StoredParts, store_part
from services.trainer.state.suspension import PooledParameters, split_fields, state_keys, under
from services.trainer.state.training_state import (
    KeptState,
    Snapshot,
    WriteParts,
    in_memory,
    reported,
)
from troupe.algorithms.statistics import TokenStatistics
from troupe.checkpoints.adapters import Tensors
from troupe.checkpoints.format import CheckpointFormat, Conversion, Read
from troupe.checkpoints.proof import Proof, Proven
from troupe.checkpoints.writing import safetensors_file
from troupe.functions.shipped import opened
from troupe.job import JobSpec
from troupe.job.sections.policy import Offload
from troupe.mixtures import Routers, RoutingShape
from troupe.rpc import DataLoss, ResourceExhausted, from_status, new_id, to_status
from troupe.scheduling.defaults import defaults_of
from troupe.transfer.checksum import dtype_name, dtype_of
from troupe.transfer.deferred import Layout
from troupe.v1 import experience_store_pb2 as store_pb

# File of a state that rank 0 writes for all.
_WHOLE = "whole.safetensors"
# Seconds between checks whether all ranks have written their copies of a state.
_WRITTEN_SECONDS = 0.2
# Seconds between checks whether all hosts have a job's models and code.
_PREPARE_SECONDS = 0.2
# Orders after which the weights may be others.
_CHANGING: Final = frozenset({"apply", "receive", "load", "resume", "open"})
# Orders after which ranks have no rows of earlier ones.
_ENDING: Final = _CHANGING | {"discard"}
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
        """Create the rank's learner. `double`: in float64, for proofs; `replicas`: hosts of
        which each has all weights; `options`: those of `Learner`."""
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
        hosts do not share a disk, rank 0 writes the whole state on the lead's disk.

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
        """Return this rank's shards of the state in `directory`, on the lead's host."""
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
        sums = self._step.sums
        mine = sums.tokens = self._group.merged(sums.tokens)
        self._fill_payloads()
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
            progress.total = payloads.missing_bytes(itertools.chain(*several))
            filled = payloads.filled(several, progress.add)
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
    def payloads(self) -> RankPayloads:
        """Contents of the payloads of the step's rows."""
        return self._group.payloads

    def discard(self) -> None:
        """Discard the current step: gradients, statistics, rows, contents of payloads."""
        super().discard()
        self.forget_payloads()

    def forget_payloads(self) -> None:
        """Forget contents of payloads; the lead deletes those of its host."""
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
    """A `TrainedModel` of which this rank holds a shard of every parameter."""

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
        super().__init__({}, [], offload)
        parts = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
        found = [
            p for part in parts for group in part._fsdp_param_groups for p in group.fsdp_params
        ]
        self._shards = [one for one in found if one.sharded_param.requires_grad]
        self._memory: list[torch.Tensor] = []

    def leave(self) -> None:
        """Move the shards to host memory until `arrive`: a step has ended."""
        if not self._leaves or self._away:
            return
        here = [one._sharded_param_data for one in self._shards]
        if not self._memory:
            self._memory = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in here]
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
        """Return the weights, none of which become memory of parameters."""
        return dict(weights)

    def release(self) -> list[torch.Tensor]:
        """Return nothing, since the memory is freed with the model."""
        return []


def _use_memory(shard: Any, data: torch.Tensor) -> None:
    """Let FSDP keep a shard in `data` [padded elements], as in `FSDPParam.reset_sharded_param`."""
    local = shard.sharded_param._local_tensor
    shard._sharded_param_data = data
    shard.sharded_param._local_tensor = data.as_strided(local.size(), local.stride())


class _Published(dict[str, torch.Tensor]):
    """Gathered tensors, and the file that they are mapped from."""

    def __init__(self, tensors: Tensors, path: Path) -> None:
        super().__init__(tensors)
        self.path = path


class GangLearner(PolicyLearner[Row]):
    """A learner whose model is held by the ranks of a gang.

    Raises the errors of `Learner`, and Aborted of kind "gang_lost" if a rank has ended. Then it is
    `lost` until `restore`, `load` or `adopt` start another gang.
    """

    def __init__(
        self,
        gangs: Gangs,
        key: str,
        spec: JobSpec,
        policy: str,
        options: Mapping[str, Any],
        hosts: GangHosts = ALONE,
        submitted: str = "",
        loaded: Loaded = lambda done, total: None,
        replicas_on: Callable[[int], int] = lambda hosts: 1,
    ) -> None:
        """`key`: id of the policy among those of a gang; `options`: those of `Learner`; `hosts`:
        hosts of the ranks, also in later gangs; `submitted`: the specification that other hosts
        read, since in `spec` this host's copies have replaced models; `loaded`: called with the
        loaded bytes of the model; `replicas_on`: returns how many of so many hosts have all
        weights."""
        self._loaded, self._replicas_on = loaded, replicas_on
        self._gangs, self._key = gangs, key
        self._job, self._policy, self._options = spec, policy, dict(options)
        self._size = spec.policies[policy].trainer.ranks
        self._submitted = submitted or spec.model_dump_json()
        self._reference: Path | None = None
        # The last result of `published`, unless the weights have changed since.
        self._published: weakref.ref[_Published] | None = None
        self._hosts = hosts
        self._payloads = StepPayloads(lambda: gangs.transfer, key)
        gangs.check(policy, self._size, hosts)
        self._open()

    @property
    def lost(self) -> bool:
        """Whether the ranks have ended, so that the state is lost."""
        return self._gang.lost

    @property
    def gathers(self) -> bool:
        """See `PolicyLearner`."""
        return True

    @property
    def copies(self) -> bool:
        """Whether the hosts of all ranks have this host's data directory, to which each writes."""
        return self._shares_disk

    @property
    def needs_reference(self) -> bool:
        """See `PolicyLearner`."""
        return self._job.needs_reference

    @property
    def num_parameters(self) -> int:
        """See `PolicyLearner`."""
        return self._num_parameters

    @property
    def base(self) -> AdaptedBase | None:
        """The frozen weights under an adapter; None where all weights are trained."""
        return None if self._job.policies[self._policy].lora is None else self._adapted[1]

    @property
    def model(self) -> Any:
        """The Hugging Face model without weights, for checkpoints; made at every access."""
        own = self._job.policies[self._policy]
        return outline_to_save(self._policy, own) if own.lora is None else self._adapted[0]

    @functools.cached_property
    def _adapted(self) -> tuple[Any, AdaptedBase]:
        own = self._job.policies[self._policy]
        gather = functools.partial(self._gathered, "base")
        return adapted_outline(self._policy, own, self._base_checksum, gather)

    @functools.cached_property
    def _longest(self) -> int:
        """Longest sequence of the model (`positions_of`)."""
        return positions_of(self._outline)

    @functools.cached_property
    def _routing(self) -> RoutingShape | None:
        """How the routers of a mixture of experts choose; None for dense models."""
        return Routers.shape_of(self._outline)

    @functools.cached_property
    def _outline(self) -> Any:
        """The model without memory."""
        return outline(self._policy, self._job.policies[self._policy])

    def read(self, claimed: Iterable[store_pb.ClaimedSample], load: Load) -> list[Row]:
        """Parse the samples of a claim for `accumulate`. Raises the errors of `parse_rows`."""
        columns = columns_of(self._job.algorithm)
        return parse_rows(
            claimed,
            self.vocabulary,
            load,
            columns,
            longest=self._longest,
            routing=self._routing,
            user_columns=self._job.algorithm.user_columns,
            payload_kinds=self._payload_kinds,
        )

    def accumulate(self, rows: Sequence[Row], stop: threading.Event | None = None) -> None:
        """Add the gradient of these rows' summed loss. Raises `Stopped` between passes."""
        rows, found_at = self._payloads.store(rows)
        described, data = encode_rows(rows)
        self._order("accumulate", data, stop, rows=described, **found_at)

    def complete(self, stop: threading.Event | None = None) -> None:
        """Add the gradients of rows that were held back. Raises `Stopped`."""
        self._order("complete", stop=stop)

    def pair_sums(self) -> store_pb.PairSums:
        """See `PolicyLearner`. Every rank has the sums of all."""
        return store_pb.PairSums.FromString(self._order("pair_sums").body)

    def join_pairs(self, sums: store_pb.PairSums) -> None:
        """See `PolicyLearner`."""
        self._order("join_pairs", sums.SerializeToString())

    def apply(
        self,
        version: int,
        stop: threading.Event | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> Applied:
        """See `PolicyLearner`. No tokens are kept for the panel, since each rank has only a part of
        them."""
        return Applied(**self._order("apply", stop=stop, version=version, rates=rates).header)

    def discard(self) -> None:
        """Discard the current step."""
        self._order("discard")

    # State.

    def published(self) -> Tensors:
        """Return the tensors that engines load, whole, in shared memory."""
        with contextlib.ExitStack() as files:
            path = files.enter_context(self._gang.file())
            self._order("gather", what="published", path=str(path))
            found = _Published(load_file(path), path)
            # Ranks read the file for the proof as long as there are these tensors.
            weakref.finalize(found, files.pop_all().close)
        self._published = weakref.ref(found)
        return found

    def proof(self, passage: Sequence[int], what: Proven = "published") -> Proof | None:
        """See `PolicyLearner`. While the caller keeps the last result of `published`, and the
        weights are the same, rank 0 computes by these tensors. Otherwise, and for adapters, all
        ranks make the same pass, and gather each layer once more."""
        known = None if self._published is None else self._published()
        where: dict[str, Any] = {}
        if what == "published" and self.base is None and known is not None:
            where["path"] = str(known.path)
        answer = self._order("prove", passage=list(passage), what=what, **where)
        found = answer.header["proof"]
        return None if found is None else Proof.of_text(found)

    def weights(self) -> Tensors:
        """Return parameters and persistent buffers in full precision, whole."""
        return self._gathered("weights")

    def moments(self) -> Moments:
        """Return the state of optimizer and baselines, whole."""
        return self._gathered("moments")

    def restore(self, weights: Mapping[str, torch.Tensor], moments: Moments) -> None:
        """Take over whole weights and moments; forgets accumulated gradients."""
        self._revive()
        self._hand_over("receive", {**weights, **moments})

    def snapshot(self) -> Snapshot:
        """See `PolicyLearner`. Every rank writes its part."""
        return Snapshot(write_parts=self._write, copy_parts=self._copy)

    def _write(self, directory: Path) -> dict[str, str]:
        """Let every rank write its part of weights and moments, and return the files' checksums."""
        where = self._gangs.below_data_dir(directory)
        files: dict[str, str] = self._order("save", directory=where).header["files"]
        return files

    def _copy(self) -> WriteParts | None:
        """Let every rank copy its part of weights and moments to host memory. Return a function
        that lets the copies be written while steps continue, or None if a rank lacks the memory."""
        return self._write_copy if self._order("copy").header["copied"] else None

    def _write_copy(self, directory: Path) -> dict[str, str]:
        """Like `_write`, for the copies; in any thread, since other orders may come in between."""
        self._order("write_copy", directory=self._gangs.below_data_dir(directory))
        while True:
            files: dict[str, str] | None = self._order("copy_written").header["files"]
            if files is not None:
                return files
            time.sleep(_WRITTEN_SECONDS)

    def load(self, state: KeptState) -> None:
        """Let every rank read its part of a state that a gang or a single device has written."""
        self._revive()
        try:
            self._order("load", directory=self._gangs.below_data_dir(state.path))
        except ValueError as error:
            raise DataLoss(
                f"training state {state.path} is not of this model: {error}",
                kind="state_corrupt",
                remedy="Restore the directory from a copy and resume the job; or begin a new one "
                "with the newest checkpoint as its policy's `model.path`.",
            ) from error

    def load_reference(self, state: KeptState) -> None:
        """See `PolicyLearner`."""
        self._reference = state.path  # kept, as another gang has to read it again
        self._read_reference(state.path)

    def _read_reference(self, directory: Path) -> None:
        self._order("reference", directory=self._gangs.below_data_dir(directory))

    # Suspension, in the middle of a step too.

    def suspended(self) -> tuple[Tensors, dict[str, Any]]:
        """Let every rank store its part of the state. Return the parts' description (`PARTS`) and
        plain values (JSON) from which `adopt` continues."""
        state = f"{state_keys(self._key)}{new_id('parts')}"
        try:
            answer = self._order("suspend", state=state)
        except BaseException:
            self._gangs.transfer.clear(state)  # of ranks that have ended since
            raise
        stored = StoredParts.decode(answer.body)
        return {PARTS: stored.as_tensor()}, answer.header["values"]

    def adopt(self, tensors: Tensors, values: Mapping[str, Any]) -> None:
        """Continue from the result of `suspended`, here or where a single device trained the
        policy: every rank reads its part."""
        self._revive()
        if (stored := StoredParts.in_state(tensors)) is not None:
            self._order("resume", stored.encode(), values=dict(values))
        else:
            self._hand_over("resume", tensors, values=dict(values))

    def release(self) -> list[torch.Tensor]:
        """Remove the policy from its ranks; `restore`, `load` and `adopt` bring it back."""
        self._left = True
        self._gangs.forget(self._gang, self._key)
        self._payloads.drop()
        return []

    # Ranks.

    def move_to(self, hosts: GangHosts) -> None:
        """Let the next ranks run on these hosts; the policy was removed from the earlier ranks."""
        self._gangs.check(self._policy, self._size, hosts)
        self._hosts = hosts

    def close(self) -> None:
        """Remove the policy from its ranks."""
        self.release()

    def _open(self) -> None:
        self._left = False
        self._gang = self._gangs.of(self._size, self._key, self._hosts)
        code = opened(self._job.code.sha256) if self._job.code else None
        replicas = self._replicas_on(self._gangs.hosts_of(self._hosts))
        try:
            if self._gang.nodes > 1:
                self._prepare_hosts()
            answer = self._order(
                "open",
                spec=self._job.model_dump_json(),
                policy=self._policy,
                options={**self._options, "replicas": replicas},
                loaded=self._loaded,
                code="" if code is None else str(code.folder),
            )
            self.vocabulary: int = answer.header["vocabulary"]
            self._num_parameters: int = answer.header["parameters"]
            self._payload_kinds: list[str] = answer.header["payload_kinds"]
            self._base_checksum: str = answer.header["base"]
            self._shares_disk: bool = answer.header["shares_disk"]
            if self._reference is not None:
                self._read_reference(self._reference)
        except BaseException:
            self.release()  # here, since the caller gets no learner that it could release
            raise

    def _prepare_hosts(self) -> None:
        """Let the other hosts fetch models and code; orders of other policies may come in
        between."""
        while True:
            answer = self._order("prepare", policy=self._policy, spec=self._submitted)
            if answer.header["ready"]:
                return
            time.sleep(_PREPARE_SECONDS)

    def _revive(self) -> None:
        """Open the policy on ranks again, if it was released or its ranks have ended."""
        if self._left or self.lost:
            self._open()

    def _order(
        self, name: str, body: bytes = b"", stop: threading.Event | None = None, **header: Any
    ) -> Any:
        if name in _CHANGING:
            self._published = None
        answer = self._gang.order(name, body, stop, key=self._key, **header)
        if name in _ENDING:
            self._payloads.drop()
        return answer

    def _hand_over(self, name: str, tensors: Mapping[str, torch.Tensor], **header: Any) -> None:
        """Give whole tensors to the ranks, each of which reads its part."""
        transfer, key = self._gangs.transfer, f"{state_keys(self._key)}{new_id('whole')}"
        boxes = {name: Box.whole(tensor.shape) for name, tensor in tensors.items()}
        try:
            part = store_part(transfer, key, tensors, boxes)
            self._order(name, StoredParts.of(tensors, [part]).encode(), **header)
        finally:
            transfer.delete(key)

    def _gathered(self, what: What) -> Tensors:
        with self._gang.file() as path:
            self._order("gather", what=what, path=str(path))
            # Memory-mapped: the memory is freed with the last of these tensors.
            found: Tensors = load_file(path)
            return found
