"""LoRA adapters in gangs: PEFT's layers over a frozen base, both sharded over the ranks.

The base has the published type and gets no gradient. Its shards on a rank are shared by all
policies of that rank that adapt the same model, by their frozen references and by their critics.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from services.trainer.gang.group import GangGroup
from services.trainer.gang.sharded_state import whole
from services.trainer.learning.lora import Adapter, base_source, described_adapter, inject
from services.trainer.learning.model import outline, policy_seed
from troupe.checkpoints.adapters import AdapterContent, Tensors
from troupe.checkpoints.format import CheckpointFormat, cast, unchanged
from troupe.job import LoraSpec, PolicySpec
from troupe.transfer import DeferredTensors
from troupe.transfer.checksum import bytes_checksum, combine, dtype_name, host_bytes

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
        for one in form.conversions:
            sources = {name: whole(read(name)) for name in one.sources}
            if group.rank == 0:
                for name, tensor in one.convert(sources.__getitem__).items():
                    digest = bytes_checksum(host_bytes(tensor))
                    parts[name] = dtype_name(tensor.dtype), tuple(tensor.shape), digest
        self.checksum = group.gather(combine(parts).encode())[0].decode()

    def weights(self) -> DeferredTensors:
        """Not to be asked of one rank: all of them gather the tensors (`RankLearner.gather`)."""
        raise AssertionError("a rank has shards only")


def shared_base(
    group: GangGroup, spec: PolicySpec, seed: int, make: Callable[[], ShardedBase]
) -> ShardedBase:
    """The base of a policy, made by `make` unless all ranks have it; all ranks must call it."""
    source = base_source(spec.language_model, seed, str(group.mesh.device_type))
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
    """The frozen weights under an adapter, for the lead of a gang, which has none of them."""

    def __init__(self, module: Any, checksum: str, gather: Callable[[], Tensors]) -> None:
        """`module`: the model on the meta device; `gather`: has the ranks bring the tensors, in
        checkpoint format."""
        self.module, self.checksum, self._gather = module, checksum, gather

    def weights(self) -> DeferredTensors:
        """The tensors that engines load, in shared memory."""
        return unchanged(self._gather())


def adapted_outline(
    policy: str, spec: PolicySpec, checksum: str, gather: Callable[[], Tensors]
) -> tuple[Any, GatheredBase]:
    """The model of a policy with its adapter, on the meta device, for checkpoints, and its base,
    whose weights `gather` brings."""
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
