"""Fits published weights into a model's own tensors, in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.rollout.engines.errors import UpdateFailed, WeightsRefused
from troupe.transfer import checksum_of
from troupe.transfer.checksum import dtype_of
from troupe.transfer.manifest import Manifest
from troupe.v1 import common_pb2 as pb

_REMEDY = "Publish from the same model configuration and dtype that the policy's engine uses."


def layout(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of what is published, as tensors without storage."""
    return {
        entry.name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
        for entry in manifest.entries
    }


def check_fit(published: Mapping[str, torch.Tensor], model: torch.nn.Module, key: str) -> None:
    """Raise `WeightsRefused` unless `published` fills every tensor of `model`, shape and dtype.

    Tied tensors (an output layer that is the embedding) need to be there under one name only.
    """
    slots = model.state_dict(keep_vars=True)
    for name, tensor in published.items():
        slot = slots.get(name)
        if slot is None:
            raise WeightsRefused(
                f"'{name}' is published, but the model has no such tensor",
                field="weights",
                value=key,
                remedy=_REMEDY,
            )
        if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
            raise WeightsRefused(
                f"'{name}' is published as {tensor.dtype} {list(tensor.shape)}, the model wants "
                f"{slot.dtype} {list(slot.shape)}",
                field="weights",
                value=key,
                remedy=_REMEDY,
            )
    # Tied names share one parameter object.
    filled = {id(slots[name]) for name in published}
    missing = sorted(name for name, slot in slots.items() if id(slot) not in filled)
    if missing:
        raise WeightsRefused(
            f"{len(missing)} tensors of the model are not published, among them '{missing[0]}'",
            field="weights",
            value=key,
            remedy=_REMEDY,
        )


def fill(published: Mapping[str, torch.Tensor], model: torch.nn.Module, ref: pb.WeightsRef) -> None:
    """Copy `published` into `model` and verify that it now holds `ref.checksum`.

    Raises `UpdateFailed` when it does not: the model then holds neither version.
    """
    slots = model.state_dict()
    with torch.no_grad():
        for name, tensor in published.items():
            slots[name].copy_(tensor)
    found = checksum_of({name: slots[name] for name in published})
    if found != ref.checksum:
        raise UpdateFailed(
            f"the model holds checksum {found} after the copy, version {ref.version} has "
            f"{ref.checksum}",
            field="weights",
            value=ref.key,
            remedy="Publish the version again and repeat the update.",
        )


def untied(
    published: Mapping[str, torch.Tensor], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """`published`, which fits, with each tensor of `model` once, under its first name."""
    first: dict[int, str] = {}
    for name, slot in model.state_dict(keep_vars=True).items():
        first.setdefault(id(slot), name)
    slots = model.state_dict(keep_vars=True)
    return {first[id(slots[name])]: tensor for name, tensor in published.items()}
