"""Puts published weights in the place of a model's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.rollout.engines.errors import UpdateFailed, WeightsRefused
from troupe.checkpoints.format import FormatMismatch, ModelArrangement
from troupe.transfer import checksum_of
from troupe.transfer.checksum import bytes_checksum, dtype_of, host_bytes
from troupe.transfer.manifest import Manifest
from troupe.v1 import common_pb2 as pb

_REMEDY = "Publish from the same model configuration and dtype that the policy's engine uses."


def layout(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of what is published, as tensors without storage."""
    return {
        entry.name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
        for entry in manifest.entries
    }


def arrangement(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, key: str
) -> ModelArrangement:
    """How `published`, which has the format of checkpoints, becomes the tensors of `model`.

    Raises `WeightsRefused` for what `model` has no use for.
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


def verify(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: pb.WeightsRef
) -> None:
    """See that `published`, which fits, is what `ref.checksum` names, while `model` still serves.

    Raises `WeightsRefused`.
    """
    found = checksum_of(published)
    if found != ref.checksum:
        raise WeightsRefused(
            f"what is published has checksum {found}, version {ref.version} has {ref.checksum}",
            field="weights",
            value=ref.key,
            remedy="Publish the version again and repeat the update.",
        )
    slots = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, source in arrangement(published, model, ref.key).renamed.items():
        other = first.setdefault(id(slots[name]), source)
        # Whatever was copied last would be served.
        if other != source and _bytes(published[other]) != _bytes(published[source]):
            raise WeightsRefused(
                f"'{other}' and '{source}' are one tensor of the model and published with "
                "different contents",
                field="weights",
                value=ref.key,
                remedy="Publish one of the two names.",
            )


def arranged(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: pb.WeightsRef
) -> dict[str, torch.Tensor]:
    """The tensors of `model` by its own names, of `published`, which fits: the very same ones where
    the model holds them as checkpoints do, else new ones (stacked experts)."""
    return dict(arrangement(published, model, ref.key).arranged(published))


def adopt(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: pb.WeightsRef
) -> list[torch.Tensor]:
    """Serve `published`, which is verified and `arranged`, from where it lies: no byte of host
    memory is copied, since nothing is served meanwhile. A model on a device is filled.

    Returns what was served before. To unmap it takes milliseconds: let go of it when the model
    serves again. Raises as `fill`.
    """
    slots = model.state_dict(keep_vars=True)
    there = {
        name: tensor
        for name, tensor in published.items()
        if tensor.device == slots[name].device and tensor.is_contiguous()
    }
    before = [slots[name].data for name in there]
    for name, tensor in there.items():
        slots[name].data = tensor
    if len(there) < len(published):
        fill({name: t for name, t in published.items() if name not in there}, model, ref)
    return before


def fill(published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: pb.WeightsRef) -> None:
    """Copy `published`, which is verified and `arranged`, into `model`, whose memory others see or
    a device has: one pass over it and no more, since nothing is served meanwhile.

    Raises `UpdateFailed` when that breaks: the model then holds neither version.
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
    """`published`, which fits, with each tensor of `model` once: of a tied one under the name that
    the model has first."""
    slots = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, slot in slots.items():
        first.setdefault(id(slot), name)
    return {
        first[id(slots[name])] if name in slots else name: tensor
        for name, tensor in published.items()
    }


def _bytes(tensor: torch.Tensor) -> str:
    return bytes_checksum(host_bytes(tensor))
