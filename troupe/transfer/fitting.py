"""Whether what is stored fills what a reader has, and filling it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.checksum import dtype_name
from troupe.transfer.errors import LayoutMismatch
from troupe.transfer.manifest import Entry, Manifest, Shard
from troupe.transfer.staging import upload


def check_layout(key: str, manifest: Manifest, into: Mapping[str, torch.Tensor]) -> None:
    """Raise LayoutMismatch unless names, shapes and dtypes are the same, and all can be filled."""
    stored = {entry.name: entry for entry in manifest.entries}
    if stored.keys() != into.keys():
        missing = sorted(into.keys() - stored.keys())[:3]
        extra = sorted(stored.keys() - into.keys())[:3]
        raise LayoutMismatch(key, f"names differ: missing {missing}, unexpected {extra}")
    for name, target in into.items():
        entry = stored[name]
        if entry.shape != tuple(target.shape) or entry.dtype != dtype_name(target.dtype):
            have = f"{entry.dtype}{list(entry.shape)}"
            want = f"{dtype_name(target.dtype)}{list(target.shape)}"
            raise LayoutMismatch(key, f"'{name}' is stored as {have}, wanted {want}")
        if why := _why_not_filled(target):
            raise LayoutMismatch(key, f"'{name}' cannot be filled: {why}")
    _check_apart(key, stored, into)


def check_shards(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> None:
    """Raise InvalidArgument for a shard of no tensor, or one that lies beyond its whole."""
    for name, shard in shards.items() if isinstance(shards, Mapping) else [("", shards)]:
        if not isinstance(shard, Shard) or not all(map(_numbers, vars(shard).values())):
            raise InvalidArgument(
                f"of '{name}' is no Shard of whole numbers: {shard!r}",
                kind="transfer_shard_invalid",
                field="shards",
                value=name,
                remedy="Give a mapping from names to Shard(global_shape, offsets).",
            )
        shape = tuple(tensors[name].shape) if name in tensors else None
        ends = tuple(at + size for at, size in zip(shard.offsets, shape or (), strict=False))
        whole, sizes = shard.global_shape, {len(shard.global_shape), len(shard.offsets)}
        fits = shape is not None and sizes == {len(shape)} and min(shard.offsets, default=0) >= 0
        if not fits or any(end > size for end, size in zip(ends, whole, strict=True)):
            have = "no tensor" if shape is None else list(shape)
            raise InvalidArgument(
                f"'{name}' is {have}, no part of {list(whole)} at {list(shard.offsets)}",
                kind="transfer_shard_beyond",
                field="shards",
                value=name,
                remedy="Give each tensor that is a part its whole's shape and where it begins.",
            )


def fill(into: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into those of the same name and layout (`check_layout`)."""
    on_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for name, target in into.items():
            # Detached: who is a view of another parameter is filled like any other.
            target = target.detach()
            if target.device.type == "cuda" and target.is_contiguous():
                on_device.setdefault(target.device, []).append((target, tensors[name]))
            else:
                target.copy_(tensors[name])
    for pairs in on_device.values():
        upload(pairs)


def _why_not_filled(target: torch.Tensor) -> str:
    """Found before anything is copied: half of a state is worse than none."""
    if target.is_meta:
        return "it has no memory (device meta)"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode"
    steps = zip(target.shape, target.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    if target.numel() > extent or torch._debug_has_internal_overlap(target) == 1:
        return "its elements share memory"
    if not _can_be_copied(target.dtype):
        return f"this torch copies no {dtype_name(target.dtype)}"
    return ""


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


def _check_apart(key: str, stored: Mapping[str, Entry], into: Mapping[str, torch.Tensor]) -> None:
    """Raise LayoutMismatch when one target would be overwritten by another's content: those that
    are tied (the very same memory) must be stored with the same bytes."""
    by_storage: dict[tuple[str, int], list[str]] = {}
    for name, target in into.items():
        if target.numel() and target.is_contiguous():
            place = (str(target.device), target.untyped_storage().data_ptr())
            by_storage.setdefault(place, []).append(name)
    for names in by_storage.values():
        names.sort(key=lambda name: into[name].data_ptr())
        for before, after in itertools.pairwise(names):
            first, second = into[before], into[after]
            if second.data_ptr() >= first.data_ptr() + first.nbytes:
                continue
            tied = first.data_ptr() == second.data_ptr() and first.nbytes == second.nbytes
            if not tied or stored[before].checksum != stored[after].checksum:
                raise LayoutMismatch(
                    key, f"'{before}' and '{after}' share memory, and are stored with other bytes"
                )


def _numbers(sizes: object) -> bool:
    return isinstance(sizes, tuple | list) and all(type(size) is int for size in sizes)
