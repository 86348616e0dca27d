"""Whether what is stored fills what a reader has, and filling it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from troupe.rpc.errors import InvalidArgument
from troupe.transfer.checksum import dtype_name
from troupe.transfer.errors import LayoutMismatch
from troupe.transfer.manifest import Manifest, Shard


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


def check_shards(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> None:
    """Raise InvalidArgument for a shard of no tensor, or one that lies beyond its whole."""
    for name, shard in shards.items():
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
    with torch.no_grad():
        for name, target in into.items():
            target.copy_(tensors[name], non_blocking=True)
    if any(target.device.type == "cuda" for target in into.values()):
        torch.cuda.synchronize()


def _why_not_filled(target: torch.Tensor) -> str:
    """Found before anything is copied: half of a state is worse than none."""
    if target.is_meta:
        return "it has no memory (device meta)"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode"
    if torch._debug_has_internal_overlap(target) == 1:
        return "its elements share memory"
    return ""
