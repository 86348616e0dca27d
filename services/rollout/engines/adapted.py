"""Published adapters in an engine: the base that they belong to, whether they fit, how they serve.

Trainers publish an adapter per version and its base once per job. An engine holds on to the base
that it has seen: tensors over this host's shared memory, no copy.

A float32 base serves with its adapter merged, which costs a copy per version and nothing per token.
In a half-precision base it stays beside the weights, in float32, as trainers and PEFT compute it:
merged, an update below half a unit in the last place of a weight would be rounded away, and the
engine would serve the base while the trainer trains the adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from services.rollout.engines.errors import WeightsRefused
from services.rollout.engines.weights import arranged, arrangement, check_fit
from troupe.adapters import (
    AdapterContent,
    MergeMismatch,
    NotAnAdapter,
    base_key,
    is_adapter,
    linear_layers,
    merged,
)
from troupe.adapters.content import CONFIG, PREFIX
from troupe.job import LoraSpec
from troupe.transfer import DeferredTensors, TensorGroup, Transfer, checksum_of
from troupe.v1 import common_pb2 as pb

# Of an adapted layer, beside its weight: A [rank, in] and alpha / rank * B [out, rank].
_SIDES: Final = ("adapter_a", "adapter_b")
_REMEDY = "Give trainer and engine the same job: its model and its `lora` section."


@dataclass(frozen=True)
class Base:
    """Weights under adapters, as they are published."""

    ref: pb.WeightsRef
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Adapted:
    """One version of a policy: an adapter over its base."""

    adapter: AdapterContent
    base: Base

    def parts(self, model: torch.nn.Module, key: str) -> DeferredTensors:
        """Tensors of `model`, by its names, that compute the same without an adapter; made when
        they are read. Raises `WeightsRefused` when the adapter does not fit its base."""
        found = arrangement(self.base.tensors, model, key)
        adapted = {f"{module}.weight" for module in self.adapter.modules}
        if lacking := sorted(adapted - set(found.renamed)):
            raise _refused(f"the base has no '{lacking[0]}' for an adapter", key)
        plain = found.arranged(self.base.tensors)
        groups = [
            TensorGroup(group.layout, functools.partial(self._merged, group.make))
            if adapted & set(group.layout)
            else group
            for group in plain.groups
        ]
        return DeferredTensors(groups)

    def _merged(self, make: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """One adapted weight."""
        ((name, weight),) = make().items()
        return merged({name: weight}, self.adapter.only(name.removesuffix(".weight")))

    def in_model(self, model: torch.nn.Module, ref: pb.WeightsRef) -> Adapted:
        """The same with the base by the names of `model`, whose tensors are stacked where it holds
        them so. Blocking."""
        tensors = arranged(self.base.tensors, model, ref)
        return replace(self, base=replace(self.base, tensors=tensors))

    def merged(self, ref: pb.WeightsRef) -> tuple[dict[str, torch.Tensor], pb.WeightsRef]:
        """Plain weights that compute the same, and `ref` with their checksum.

        Raises `WeightsRefused` when the adapter does not fit its base.
        """
        try:
            tensors = merged(self.base.tensors, self.adapter)
        except MergeMismatch as error:
            raise _refused(str(error), ref.key) from error
        return tensors, _as(ref, tensors)

    def beside(self, ref: pb.WeightsRef) -> tuple[dict[str, torch.Tensor], pb.WeightsRef]:
        """The base and what `add_adapter` put beside its layers, and `ref` with their checksum."""
        tensors = dict(self.base.tensors)
        for module in self.adapter.modules:
            a, b = self.adapter.pair(module)
            sides = a.to(torch.float32), b.to(torch.float32) * self.adapter.scale
            for side, tensor in zip(_SIDES, sides, strict=True):
                tensors[f"{module}.{side}"] = tensor
        return tensors, _as(ref, tensors)


def add_adapter(model: torch.nn.Module, lora: LoraSpec | None) -> None:
    """Have the adapted layers of a half-precision `model` add x A^T B^T in float32, rounded once.

    Nothing is done without `lora`, or to a model whose adapters are merged.
    """
    if lora is None or not served_beside(model):
        return
    layers, _ = linear_layers(model, lora.target_modules)
    for name, (inputs, outputs) in layers.items():
        layer = model.get_submodule(name)
        device = next(layer.parameters()).device
        for side, shape in zip(_SIDES, ((lora.rank, inputs), (outputs, lora.rank)), strict=True):
            values = torch.zeros(shape, dtype=torch.float32, device=device)
            layer.register_parameter(side, torch.nn.Parameter(values, requires_grad=False))
        layer.register_forward_hook(_add)


def served_beside(model: torch.nn.Module) -> bool:
    """Whether adapters of `model` stay beside its weights."""
    return next(model.parameters()).dtype.itemsize < 4


def _add(layer: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    inner = args[0].to(torch.float32) @ layer.adapter_a.T
    added: torch.Tensor = inner @ layer.adapter_b.T
    return (output + added).to(output.dtype)


def _as(ref: pb.WeightsRef, tensors: Mapping[str, torch.Tensor]) -> pb.WeightsRef:
    own = pb.WeightsRef()
    own.CopyFrom(ref)
    own.checksum = checksum_of(tensors)
    return own


def with_base(
    tensors: Mapping[str, torch.Tensor], ref: pb.WeightsRef, transfer: Transfer, known: Base | None
) -> Adapted | None:
    """What `ref` is, if it is an adapter; its base is got unless it is `known`. Blocking.

    Raises `WeightsRefused`, and what `transfer.get` raises when the base is not there.
    """
    if not is_adapter(tensors):
        return None
    try:
        adapter = AdapterContent.of(tensors)
    except NotAnAdapter as error:
        raise _refused(str(error), ref.key) from error
    if known is not None and known.ref.checksum == adapter.base:
        return Adapted(adapter, known)
    key = base_key(ref.job_id, adapter.base)
    hint = getattr(transfer, "hint", None)  # of services that reach other hosts
    if hint is not None:
        hint(key, ref.holders)
    base, manifest = transfer.get(key, expected_checksum=adapter.base)
    own = pb.WeightsRef(
        job_id=ref.job_id,
        policy=ref.policy,
        version=0,
        key=key,
        checksum=adapter.base,
        num_bytes=manifest.num_bytes,
    )
    return Adapted(adapter, Base(own, base))


def check_published(
    published: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    lora: LoraSpec | None,
    key: str,
) -> None:
    """Raise `WeightsRefused` unless `published` (or its layout) is what the engine serves: all of
    `model`, or an adapter of the shape that `lora` says."""
    if lora is None and not is_adapter(published):
        check_fit(published, model, key)
        return
    if lora is None:
        raise _refused("an adapter is published, the policy has no `lora`", key)
    if not is_adapter(published):
        raise _refused("whole weights are published, the policy has `lora`", key)
    layers, _ = linear_layers(model, lora.target_modules)
    expected = {}
    for name, (inputs, outputs) in layers.items():
        expected[f"{PREFIX}{name}.lora_A.weight"] = [lora.rank, inputs]
        expected[f"{PREFIX}{name}.lora_B.weight"] = [outputs, lora.rank]
    found = {name: list(t.shape) for name, t in published.items() if name != CONFIG}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise _refused(
                f"'{name}' is published as {found.get(name, 'nothing')}, the engine's adapter has "
                f"{expected.get(name, 'nothing')}",
                key,
            )


def check_base(adapted: Adapted, model: torch.nn.Module) -> None:
    """Raise `WeightsRefused` unless the base fills `model`, but for what an adapter fills."""
    adapter = {
        name: slot
        for name, slot in model.state_dict(keep_vars=True).items()
        if name.rpartition(".")[2] in _SIDES
    }
    check_fit({**adapter, **adapted.base.tensors}, model, adapted.base.ref.key)


def _refused(message: str, key: str) -> WeightsRefused:
    return WeightsRefused(message, field="weights", value=key, remedy=_REMEDY)
