"""Loading of a model into the shards of a gang's ranks, none of which holds the whole model.

The model is made on the meta device, without memory, and sharded; then each rank reads the rows of
each tensor that its shard consists of. A tensor with different forms in checkpoint and model (a
mixture's experts, which are one tensor in memory) is converted by transformers' own operations,
from these rows alone if possible, else whole, one group at a time.

Weights without safetensors files (random ones, other formats) are made whole only by rank 0, and
sent to the others one tensor at a time.

LoRA adapters in gangs are PEFT's layers over a frozen base (`ShardedBase`), both sharded over the
ranks. The base has the published type and gets no gradient. Its shards on a rank are shared by all
policies of that rank that adapt the same model, by their frozen references and by their critics.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from services.trainer.gang.experts import ExpertDivision, check_divisible
from services.trainer.gang.gathering import gathered, in_lockstep, nbytes_of, whole
from services.trainer.gang.group import GangGroup
from services.trainer.gang.loads import LoadProgress, together
from services.trainer.gang.sharded_state import as_shard
from services.trainer.learning.critic import ValueHead
from services.trainer.learning.frozen_base import base_source
from services.trainer.learning.lora import Adapter, described_adapter, inject
from services.trainer.learning.model import load_problem, outline, policy_seed
from troupe.checkpoints.adapters import AdapterContent, Tensors
from troupe.checkpoints.format import (
    CheckpointFormat,
    Conversion,
    ModelArrangement,
    cast,
    is_transformers,
    unchanged,
)
from troupe.checkpoints.reading import StoredTensors, checkpoint_folder, weight_files
from troupe.checkpoints.reference import compute_buffers
from troupe.checkpoints.tensors import claims_tied, fitted, untied
from troupe.checkpoints.verifying import verify
from troupe.job import LoraSpec, ModelSpec, PolicySpec
from troupe.rpc import TroupeError
from troupe.transfer import DeferredTensors
from troupe.transfer.checksum import bytes_checksum, combine, dtype_name, host_bytes


def shard(
    module: Any,
    mesh: DeviceMesh,
    *,
    half: bool = False,
    division: ExpertDivision | None = None,
) -> Any:
    """Shard `module`, which is equal on all ranks, over the devices of `mesh` (FSDP2).

    Layers are gathered one at a time. Gradients are sums over ranks, not means: the step divides
    once, by the tokens of all of them. `half`: gather in bfloat16; sums are float32 all the same.
    `division`: of the experts, which are not gathered with their layer then.
    """
    how: dict[str, Any] = {"mesh": mesh}
    if half and mesh.device_type == "cuda":
        how["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if division is not None:
        division.shard(module, how)
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    for part in list(module.modules()):
        if type(part).__name__ in kinds:
            fully_shard(part, **how)
        elif isinstance(part, ValueHead):
            fully_shard(part, mesh=mesh)  # in float32 in any case
    # The root too, so that its weights are sharded between passes, also after a forward pass only.
    fully_shard(module, **how, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # Gloo can only sum, and a sum is bitwise the same without pre-division.
            part.set_force_sum_reduction_for_comms(True)
    return module


class MetaTensor:
    """A tensor of a model on the meta device, and the modules that have it (several, if tied)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._places: list[tuple[Any, str]] = []
        self._part: tuple[torch.Size, range] | None = None

    def add(self, name: str, module: Any, leaf: str) -> None:
        """Add a name of the tensor: attribute `leaf` of `module`."""
        self.names.append(name)
        self._places.append((module, leaf))

    @property
    def tensor(self) -> Any:
        """The parameter or buffer that the modules have in its place now."""
        module, leaf = self._places[0]
        return getattr(module, leaf)

    def within(self, modules: set[int]) -> bool:
        """Drop places in modules of other ids; return whether any are left."""
        self._places = [one for one in self._places if id(one[0]) in modules]
        return bool(self._places)

    def part(self) -> tuple[torch.Size, range]:
        """Return the shape of this rank's shard, and its rows (indices in the tensor's first
        dimension). Call it after the model is sharded."""
        if self._part is None:
            own = self.tensor
            if isinstance(own, DTensor):
                found, offset = compute_local_shape_and_global_offset(
                    own.shape, own.device_mesh, own.placements
                )
                self._part = torch.Size(found), range(offset[0], offset[0] + found[0])
            else:
                self._part = own.shape, range(own.shape[0] if own.ndim else 1)
        return self._part

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.part()[0].numel() * int(self.tensor.element_size())

    def put(self, shard: torch.Tensor, device: torch.device) -> None:
        """Give the modules this rank's shard, cast and on `device`."""
        own = self.tensor
        shard = shard.to(device=device, dtype=own.dtype).contiguous()
        made: Any = shard
        if isinstance(own, DTensor):
            made = as_shard(shard, own)
        if isinstance(own, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=own.requires_grad)
        for module, leaf in self._places:
            setattr(module, leaf, made)


class MetaTensors:
    """The parameters and persistent buffers of a model on the meta device, by name.

    Made before the model is sharded: names and modules are a checkpoint's, even if adapters or
    another output layer are added afterwards.
    """

    def __init__(self, module: Any) -> None:
        together: dict[int, MetaTensor] = {}
        self._by_name: dict[str, MetaTensor] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            path, _, leaf = name.rpartition(".")
            meta = self._by_name[name] = together.setdefault(id(tensor), MetaTensor())
            meta.add(name, module.get_submodule(path), leaf)

    def of(self, module: Any) -> dict[str, MetaTensor]:
        """Return the tensors of `module` in its present form, by every name."""
        modules = {id(one) for one in module.modules()}
        return {name: meta for name, meta in self._by_name.items() if meta.within(modules)}


class StoredModel:
    """A checkpoint in safetensors files, in the form that the model needs."""

    def __init__(self, policy: str, source: ModelSpec, outline: Any) -> None:
        """Read the files' headers. Raises the InvalidArgument of `load_model`."""
        assert source.path is not None, "it has files"
        self._policy, self._source = policy, source
        try:
            self._folder = checkpoint_folder(source.path, source.revision)
            self._stored = StoredTensors.of_checkpoint(self._folder)
            self._arrangement: ModelArrangement = fitted(outline, self._stored.layout)
        except Exception as error:
            raise self._explained(error) from error
        # By the conversions, as `from_pretrained` does.
        self._arrangement.note_in(outline)
        self._ties = claims_tied(outline)
        self._outline = outline

    def verify(self, number: int, count: int) -> None:
        """Compare every `count`th file, beginning with `number`, with its checksum, if it has one.

        Raises InvalidArgument.
        """
        try:
            for file in weight_files(self._folder)[number::count]:
                verify(self._folder, file.name)
        except Exception as error:
            raise self._explained(error) from error

    def fill(
        self, metas: Mapping[str, MetaTensor], device: torch.device, progress: LoadProgress
    ) -> None:
        """Read this rank's shards of `metas` to `device`. Raises InvalidArgument."""
        filled: dict[int, torch.Tensor] = {}
        try:
            for one in self._arrangement.conversions:
                for name, shard in self._shards(one, metas):
                    meta = metas[name]
                    before = filled.setdefault(id(meta), shard)
                    if before is not shard:  # a tied tensor that the files have twice
                        if self._ties and not torch.equal(before, shard):
                            raise untied(self._outline)
                        continue
                    meta.put(shard, device)
                    filled[id(meta)] = shard if len(meta.names) > 1 else shard.new_empty(0)
                    progress.add(meta.nbytes)
        except TimeoutError:
            raise
        except Exception as error:
            raise self._explained(error) from error

    def _shards(
        self, one: Conversion, metas: Mapping[str, MetaTensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """Return this rank's shards of a conversion's results, by names in the model."""
        wanted = {name: metas[name] for name in one.layout if name in metas}
        if not wanted:
            return []
        stored = self._stored
        if one.renames is not None:
            source, target = one.renames
            meta = wanted[target]
            rows = meta.part()[1] if stored.layout[source].ndim else None
            return [(target, stored.read(source, meta.tensor.dtype, rows))]
        if len(wanted) == len(one.layout) == 1:
            ((name, meta),) = wanted.items()
            shape, rows = meta.part()
            if not rows:
                return [(name, torch.empty(shape))]
            if (part := one.rows(rows)) is not None:
                return [(name, part.convert(stored.read)[name])]
        whole = one.convert(stored.read)
        return [(name, whole[name][_slice(meta.part()[1])]) for name, meta in wanted.items()]

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, TroupeError):
            return error
        path = self._source.path
        assert path is not None, "it has files"
        return load_problem(self._policy, path, error, self._source.revision)


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def load_sharded(
    group: GangGroup,
    device: torch.device,
    policy: str,
    spec: PolicySpec,
    whole: Callable[[], Any],
    *,
    dtype: torch.dtype = torch.float32,
    half: bool = False,
    expert_parallel: bool = True,
    prepare: Callable[[Any], Any] = lambda module: module,
    weights: Mapping[str, torch.Tensor] | None = None,
    shared: bool = False,
) -> Any:
    """This rank's shards of a policy's model, in evaluation mode; all ranks must call it.

    `whole`: makes the model where it has no safetensors files. `dtype`: of its parameters;
    `half`: see `shard`. `expert_parallel`: whether its experts are divided as `spec` says.
    `prepare`: puts further modules into the model (on the meta device) before it is sharded.
    `weights`: shards to copy, in place of those in the files; `shared`: to use themselves. Raises
    as `load_model` and `together`.
    """
    module = cast(outline(policy, spec), dtype).eval()
    metas = MetaTensors(module)
    source = spec.language_model
    stored = None if weights is not None else _stored_model(group, policy, source, module)
    module = prepare(module)
    # Its own modules are not on the meta device.
    ranks = check_divisible(policy, spec, module, group.mesh.size()) if expert_parallel else 1
    division = ExpertDivision.of(group, ranks)
    module = group.collectives.follow(shard(module, group.mesh, half=half, division=division))
    wanted = metas.of(module)

    def read(progress: LoadProgress) -> None:
        assert stored is not None
        progress.total = sum(meta.nbytes for meta in {id(s): s for s in wanted.values()}.values())
        stored.verify(group.local, group.size // group.hosts)
        stored.fill(wanted, device, progress)

    def make(progress: LoadProgress) -> Any:
        progress.total = sum(t.numel() * t.element_size() for t in module.parameters())
        progress.total //= group.mesh.size()
        return whole() if group.rank == 0 else None

    what = f"loading policy {policy}"
    if weights is not None:
        fill_from(weights, wanted, shared=shared)
    elif stored is not None:
        together(group, what, read)
    else:
        scatter_model(wanted, together(group, what, make), device, group)
    finish(module, device)
    return module


def _stored_model(
    group: GangGroup, policy: str, source: ModelSpec, outline: Any
) -> StoredModel | None:
    """Return the safetensors files of a policy's model; None where it has to be loaded as a whole:
    random weights, other formats, and what transformers loads through more than the files.

    All ranks must call it. Raises InvalidArgument as `load_model`.
    """
    config, path = outline.config, source.path
    through_more = getattr(config, "transformers_weights", None) is not None or bool(
        getattr(type(config), "extra_files", ())
    )
    if path is None or through_more or not is_transformers(outline):
        return None

    def fetched(progress: LoadProgress) -> bool:
        """Return whether this host has the files; a hub's are downloaded by one rank of each
        host."""
        if group.local and not Path(path).is_dir():
            return True
        try:
            folder = checkpoint_folder(path, source.revision)
            return all(file.is_file() for file in weight_files(folder)[:1])
        except Exception as error:
            raise load_problem(policy, path, error, source.revision) from error

    what = f"looking for the files of policy {policy}"
    there = json.dumps(together(group, what, fetched)).encode()
    if not all(json.loads(one) for one in group.gather(there)):
        return None
    return together(group, what, lambda progress: StoredModel(policy, source, outline))


def fill_from(
    tensors: Mapping[str, torch.Tensor], metas: Mapping[str, MetaTensor], *, shared: bool
) -> None:
    """Fill `metas` with this rank's shards of `tensors`, sharded alike: copies, unless `shared`."""
    for meta in metas.values():
        own = next((tensors[one] for one in meta.names if one in tensors), None)
        if own is None or not meta.tensor.is_meta:
            continue
        local = (own.to_local() if isinstance(own, DTensor) else own).detach()
        meta.put(local if shared else local.clone(), local.device)


def scatter_model(
    metas: Mapping[str, MetaTensor], model: Any, device: torch.device, group: GangGroup
) -> None:
    """Fill `metas` with the tensors of a whole `model`, which rank 0 has and the others have not.

    All ranks must call it. One tensor at a time is whole on the others.
    """
    whole = {} if model is None else model.state_dict()
    with in_lockstep(group, sorted(metas), lambda name: nbytes_of(metas[name].tensor)) as names:
        for name in names:
            meta = metas[name]
            own = meta.tensor
            if not own.is_meta:  # tied to one before
                continue
            full = torch.empty(own.shape, dtype=own.dtype, device=device)
            if model is not None:
                full.copy_(whole[name])
            if isinstance(own, DTensor):
                full = group.bring_to_replicas(full)
                spread = distribute_tensor(full, own.device_mesh, own.placements)
                meta.put(spread.to_local(), device)
            else:
                cpu = full.cpu()
                dist.broadcast(cpu, 0, group.control)
                meta.put(cpu, device)


@torch.no_grad()
def finish(module: Any, device: torch.device) -> None:
    """Make the tensors that checkpoints lack, and let FSDP take over all of them."""
    compute_buffers(module, device)
    left = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    assert not left, f"nothing was loaded into {left[:3]}"
    # FSDP takes over the tensors of its modules after this.
    module.load_state_dict({}, strict=False)


# The bases in use on this rank; weak, so that unused ones are freed.
_BASES: Final = weakref.WeakValueDictionary[tuple[str, ...], "ShardedBase"]()


class ShardedBase:
    """This rank's shards of the frozen weights under adapters."""

    def __init__(self, module: Any, form: CheckpointFormat, group: GangGroup) -> None:
        """The shards of `module`, whose checkpoint has the format `form`. All ranks must call it.

        Gathers one group of tensors at a time on all ranks; one of them takes the checksum.
        """
        self.module, self.format = module, form
        # By name in the model; those that are tied under each.
        self.tensors: Tensors = {n: t.detach() for n, t in module.state_dict().items()}
        parts: dict[str, tuple[str, tuple[int, ...], str]] = {}
        read = functools.partial(form.read, self.tensors)
        with gathered(group, form.conversions, read) as named:
            for name, tensor in named if group.rank == 0 else ():
                digest = bytes_checksum(host_bytes(tensor))
                parts[name] = dtype_name(tensor.dtype), tuple(tensor.shape), digest
        self.checksum = group.gather(combine(parts).encode())[0].decode()

    def weights(self) -> DeferredTensors:
        """Not available on one rank: all ranks gather the tensors together
        (`RankLearner.gather`)."""
        raise AssertionError("a rank has shards only")

    def rounded(self) -> DeferredTensors:
        """Return the tensors that engines load by the names of the model. They are gathered when
        they are read, which all ranks must do in the same order."""
        return self.format.rounded(self.tensors, whole)


def shared_base(
    group: GangGroup, spec: PolicySpec, seed: int, make: Callable[[], ShardedBase]
) -> ShardedBase:
    """Return the base of a policy, made by `make` unless all ranks have it; all ranks must call
    it."""
    source = (
        *base_source(spec.language_model, seed, str(group.mesh.device_type)),
        str(group.mesh.size()),  # ranks that it is sharded over
        str(spec.trainer.expert_parallel),
    )
    known = _BASES.get(source)
    everyone = group.gather(json.dumps(known is not None).encode())
    if known is None or not all(json.loads(one) for one in everyone):
        known = _BASES[source] = make()
    return known


def adapt(policy: str, lora: LoraSpec, module: Any, seed: int) -> AdapterContent:
    """Put an adapter into `module`, which is on the meta device: the numbers of one device.

    Its A and B are whole on the CPU until the module is sharded. Raises InvalidArgument of kind
    "lora_invalid".
    """
    about = described_adapter(policy, lora, module)
    module.requires_grad_(False)
    # PEFT makes adapters where the layers are, and looks at shapes and types: while it does, the
    # weights are zeros that take no memory.
    frozen = [
        (part, leaf, parameter)
        for part in module.modules()
        for leaf, parameter in part.named_parameters(recurse=False)
    ]
    for part, leaf, parameter in frozen:
        zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        setattr(part, leaf, torch.nn.Parameter(zeros, requires_grad=False))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(policy_seed(seed, policy))
        inject(module, about, lora.dropout)
    for part, leaf, parameter in frozen:
        setattr(part, leaf, parameter)
    return about


class GatheredBase:
    """The frozen weights under an adapter, for the leader of a gang, which has none of them."""

    def __init__(self, module: Any, checksum: str, gather: Callable[[], Tensors]) -> None:
        """`module`: the model on the meta device; `gather`: has the ranks bring the tensors, in
        checkpoint format."""
        self.module, self.checksum, self._gather = module, checksum, gather

    def weights(self) -> DeferredTensors:
        """Return the tensors that engines load, in shared memory."""
        return unchanged(self._gather())

    def rounded(self) -> DeferredTensors:
        """Not available without the ranks, which compute with them (`GangLearner.proof`)."""
        raise AssertionError("the leader has no weights")


def adapted_outline(
    policy: str, spec: PolicySpec, checksum: str, gather: Callable[[], Tensors]
) -> tuple[Any, GatheredBase]:
    """Return the model of a policy with its adapter, on the meta device, for checkpoints, and its
    base, whose weights `gather` brings."""
    lora = spec.lora
    assert lora is not None, "the policy has an adapter"
    dtype = getattr(torch, spec.language_model.weight_dtype)
    module = cast(outline(policy, spec), dtype)
    base = GatheredBase(cast(outline(policy, spec), dtype), checksum, gather)
    about = adapt(policy, lora, module, 0)
    module.troupe_adapter = Adapter(module, base, about)
    return module, base


def on_device(module: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move what is not on the meta device, such as an adapter, to `device`, also cast."""
    for part in module.modules():
        for leaf, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.is_meta:
                moved = parameter.detach().to(device, dtype)
                setattr(part, leaf, torch.nn.Parameter(moved, parameter.requires_grad))
    return module
