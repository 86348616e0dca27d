"""Published weights of an embedded or served model: built, checked, loaded, with LoRA adapters."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from services.rollout.engines.errors import EngineStartFailed, UpdateFailed, WeightsRefused
from troupe.checkpoints.adapters import (
    CONFIG,
    PREFIX,
    AdapterContent,
    NotAnAdapter,
    base_key,
    is_adapter,
    linear_layers,
)
from troupe.checkpoints.format import FormatMismatch, ModelArrangement, in_float32, keep_float32
from troupe.checkpoints.proof import proof_in
from troupe.job import LoraSpec, ModelSpec, no_directory
from troupe.transfer import Transfer, checksum_of
from troupe.transfer.blob import Manifest
from troupe.transfer.checksum import bytes_checksum, dtype_of, host_bytes
from troupe.v1 import common_pb2 as common_pb

_REMEDY: Final = (
    "Publish from the same model configuration and dtype that the policy's engine uses."
)
_ADAPTER_REMEDY: Final = "Give trainer and engine the same job: its model and its `lora` section."
_BROKEN_REMEDY: Final = "Resume the job from an earlier checkpoint, with a lower learning rate."
# Building a model sets process-wide defaults of torch and transformers for a moment.
_BUILDING: Final = threading.Lock()


def load_config(model: ModelSpec, policy: str) -> PretrainedConfig:
    """The transformers configuration of `model`. Raises `EngineStartFailed` naming the field."""
    if model.path is None:
        raw = dict(model.config or {})
        try:
            return AutoConfig.for_model(**raw)
        except (TypeError, ValueError, KeyError) as error:
            raise EngineStartFailed(
                f"not a transformers configuration: {error}",
                field=f"policies.{policy}.model.config",
                value=raw.get("model_type"),
                remedy="Give `model_type` and the fields of that configuration class.",
            ) from error
    if no_directory(model.path):
        raise EngineStartFailed(
            "there is no such directory",
            field=f"policies.{policy}.model.path",
            value=model.path,
            remedy="Give a directory with a Hugging Face model, or a hub id.",
        )
    try:
        return AutoConfig.from_pretrained(model.path, revision=model.revision)
    except (OSError, ValueError) as error:
        raise EngineStartFailed(
            f"no model configuration can be loaded: {error}",
            field=f"policies.{policy}.model.path",
            value=model.path,
            remedy="Give a directory with a config.json, or a hub id that can be reached.",
        ) from error


def skeleton(config: PretrainedConfig, dtype: str, policy: str) -> PreTrainedModel:
    """A causal LM of `config` with uninitialized weights, in evaluation mode."""
    try:
        try:
            model = _build(config, dtype, "sdpa")
        except ValueError:  # some architectures know nothing faster
            model = _build(config, dtype, "eager")
    except (ValueError, TypeError) as error:
        raise EngineStartFailed(
            f"not a causal language model that can be served: {error}",
            field=f"policies.{policy}.model",
            value=config.model_type,
            remedy="Choose an architecture that AutoModelForCausalLM knows.",
        ) from error
    # Building without initial weights skips this too.
    model.tie_weights()
    # As trainers publish them.
    keep_float32(model, in_float32(model, getattr(torch, dtype)))
    model.eval().requires_grad_(False)
    return model


def _build(config: PretrainedConfig, dtype: str, attention: str) -> PreTrainedModel:
    with _BUILDING, no_init_weights():
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )


def layout(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of published tensors, as tensors without storage."""
    return {
        entry.name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
        for entry in manifest.entries
    }


def arrangement(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, key: str
) -> ModelArrangement:
    """How `published`, in the format of checkpoints, becomes the tensors of `model`.

    Raises `WeightsRefused` for tensors that `model` does not have.
    """
    try:
        return ModelArrangement.of(model, published)
    except FormatMismatch as error:
        raise WeightsRefused(str(error), field="weights", value=key, remedy=_REMEDY) from error


def check_fit(published: Mapping[str, torch.Tensor], model: torch.nn.Module, key: str) -> None:
    """Raise `WeightsRefused` unless `published` fills every tensor of `model`, shape and dtype.
    Blocking: large mixtures have tens of thousands of names.

    Tied tensors (an output layer that is the embedding) need to be there under one name only.
    """
    slots = model.state_dict(keep_vars=True)
    found = arrangement(published, model, key)
    for one in found.conversions:
        for name, tensor in one.layout.items():
            slot = slots[name]
            if slot.shape == tensor.shape and slot.dtype == tensor.dtype:
                continue
            one_of = "" if one.renames else f" (with {len(one.sources) - 1} more)"
            raise WeightsRefused(
                f"'{one.sources[0]}' is published{one_of} as {tensor.dtype} {list(tensor.shape)}, "
                f"the model wants {slot.dtype} {list(slot.shape)}",
                field="weights",
                value=key,
                remedy=_REMEDY,
            )
    # Tied names share one parameter object.
    filled = {id(slots[name]) for name in found.layout}
    missing = sorted(name for name, slot in slots.items() if id(slot) not in filled)
    if missing:
        raise WeightsRefused(
            f"{len(missing)} tensors of the model are not published, among them '{missing[0]}'",
            field="weights",
            value=key,
            remedy=_REMEDY,
        )


def require_checksum(published: Mapping[str, torch.Tensor], ref: common_pb.WeightsRef) -> None:
    """Raise `WeightsRefused` unless `published` has the checksum of `ref`. Blocking."""
    found = checksum_of(published)
    if found != ref.checksum:
        raise WeightsRefused(
            f"what is published has checksum {found}, version {ref.version} has {ref.checksum}",
            field="weights",
            value=ref.key,
            remedy="Publish the version again and repeat the update.",
        )


def verify(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: common_pb.WeightsRef
) -> None:
    """Raise `WeightsRefused` unless `published`, which fits, has the checksum of `ref`.

    Blocking; `model` still serves.
    """
    require_checksum(published, ref)
    slots = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, source in arrangement(published, model, ref.key).renamed.items():
        other = first.setdefault(id(slots[name]), source)
        # The one that is copied last would be served.
        if other != source and _bytes(published[other]) != _bytes(published[source]):
            raise WeightsRefused(
                f"'{other}' and '{source}' are one tensor of the model and published with "
                "different contents",
                field="weights",
                value=ref.key,
                remedy="Publish one of the two names.",
            )


def arranged(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: common_pb.WeightsRef
) -> dict[str, torch.Tensor]:
    """The tensors of `model` by its names, from `published`, which fits: the same objects where the
    model holds them as checkpoints do, else new ones (stacked experts)."""
    return dict(arrangement(published, model, ref.key).arranged(published))


def adopt(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: common_pb.WeightsRef
) -> list[torch.Tensor]:
    """Point the parameters of `model` to `published`, which is verified and `arranged`: no host
    memory is copied, since nothing is served meanwhile. A model on a device is filled.

    Returns the former tensors. To unmap them takes milliseconds: drop them when the model serves
    again. Raises as `fill`.
    """
    slots = model.state_dict(keep_vars=True)
    mapped = {
        name: tensor
        for name, tensor in published.items()
        if tensor.device == slots[name].device and tensor.is_contiguous()
    }
    before = [slots[name].data for name in mapped]
    for name, tensor in mapped.items():
        slots[name].data = tensor
    if len(mapped) < len(published):
        fill({name: t for name, t in published.items() if name not in mapped}, model, ref)
    return before


def fill(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: common_pb.WeightsRef
) -> None:
    """Copy `published`, which is verified and `arranged`, into `model` on its device: in one pass,
    since nothing is served meanwhile.

    Raises `UpdateFailed` when it fails: the model then holds neither version.
    """
    slots = model.state_dict()
    try:
        with torch.no_grad():
            for name, tensor in published.items():
                slots[name].copy_(tensor)
        for device in {slot.device for slot in slots.values() if slot.is_cuda}:
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise UpdateFailed(
            f"version {ref.version} was not copied: {error}",
            field="weights",
            value=ref.key,
            remedy="Repeat the update.",
        ) from error


def untied(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """`published`, which fits, with each tensor of `model` once: a tied one under the model's first
    name for it."""
    slots = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, slot in slots.items():
        first.setdefault(id(slot), name)
    return {
        first[id(slots[name])] if name in slots else name: tensor
        for name, tensor in published.items()
    }


def first_difference(these: Mapping[str, torch.Tensor], those: Mapping[str, torch.Tensor]) -> str:
    """Return the first name, in order, under which two models have different tensors; empty: they
    are equal. Blocking: reads all weights up to there."""
    for name in sorted(these.keys() | those.keys()):
        one, other = these.get(name), those.get(name)
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other):
            return name
    return ""


def _bytes(tensor: torch.Tensor) -> str:
    return bytes_checksum(host_bytes(tensor))


@dataclass(frozen=True)
class BaseWeights:
    """Published weights under adapters."""

    ref: common_pb.WeightsRef
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Adapted:
    """A version of a policy that is a LoRA adapter over base weights."""

    adapter: AdapterContent
    base: BaseWeights


def other_base(known: BaseWeights, wanted: BaseWeights, policy: str, others: str) -> WeightsRefused:
    """The error of a `policy` whose base is not the one that the engines of `others` share.
    Blocking: looks for the first tensor that differs."""
    name = first_difference(known.tensors, wanted.tensors)
    return WeightsRefused(
        f"its base differs from the base of the policies on the same engines ({others}): '{name}' "
        "differs",
        field=f"policies.{policy}.engine.share",
        value=wanted.ref.key,
        remedy="Set `engine.share: never`, or train adapters over the same base.",
    )


def with_base(
    tensors: Mapping[str, torch.Tensor],
    ref: common_pb.WeightsRef,
    transfer: Transfer,
    known: BaseWeights | None,
) -> Adapted | None:
    """The adapter in `tensors`, published as `ref`, with its base, which is fetched unless it is
    `known`; None for plain weights. Blocking.

    Raises `WeightsRefused`, and what `transfer.get` raises for a missing base.
    """
    if not is_adapter(tensors):
        return None
    try:
        adapter = AdapterContent.of(tensors)
    except NotAnAdapter as error:
        raise refused_adapter(str(error), ref.key) from error
    for name, tensor in adapter.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise refused_adapter(
                f"'{name}' has numbers that are not finite", ref.key, _BROKEN_REMEDY
            )
    if known is not None and known.ref.checksum == adapter.base:
        return Adapted(adapter, known)
    key = base_key(ref.job_id, adapter.base)
    hint = getattr(transfer, "hint", None)  # of services that reach other hosts
    if hint is not None:
        hint(key, ref.holders)
    base, manifest = transfer.get(key, expected_checksum=adapter.base)
    own = common_pb.WeightsRef(
        job_id=ref.job_id,
        policy=ref.policy,
        version=0,
        key=key,
        checksum=adapter.base,
        num_bytes=manifest.num_bytes,
        proof=proof_in(manifest.metadata),
    )
    return Adapted(adapter, BaseWeights(own, base))


def check_published(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, lora: LoraSpec | None, key: str
) -> None:
    """Raise `WeightsRefused` unless `published` (or its layout) fits: all of `model`, or with
    `lora` an adapter of that shape."""
    if lora is None and not is_adapter(published):
        check_fit(published, model, key)
        return
    if lora is None:
        raise refused_adapter("an adapter is published, the policy has no `lora`", key)
    if not is_adapter(published):
        raise refused_adapter("whole weights are published, the policy has `lora`", key)
    layers, _ = linear_layers(model, lora.target_modules)
    expected = {}
    for name, (inputs, outputs) in layers.items():
        expected[f"{PREFIX}{name}.lora_A.weight"] = [lora.rank, inputs]
        expected[f"{PREFIX}{name}.lora_B.weight"] = [outputs, lora.rank]
    found = {name: list(t.shape) for name, t in published.items() if name != CONFIG}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise refused_adapter(
                f"'{name}' is published as {found.get(name, 'nothing')}, the engine's adapter has "
                f"{expected.get(name, 'nothing')}",
                key,
            )


def check_base(adapted: Adapted, model: torch.nn.Module) -> None:
    """Raise `WeightsRefused` unless the base fills `model`."""
    check_fit(adapted.base.tensors, model, adapted.base.ref.key)


def refused_adapter(message: str, key: str, remedy: str = _ADAPTER_REMEDY) -> WeightsRefused:
    """The error of an adapter at `key` that the engine's model cannot have."""
    return WeightsRefused(message, field="weights", value=key, remedy=remedy)
