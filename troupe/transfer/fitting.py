"""Whether what is stored fills what a reader has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from troupe.transfer.checksum import dtype_name
from troupe.transfer.errors import LayoutMismatch
from troupe.transfer.manifest import Manifest


def check_layout(key: str, manifest: Manifest, into: Mapping[str, torch.Tensor]) -> None:
    """Raise LayoutMismatch unless names, shapes and dtypes are the same."""
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
