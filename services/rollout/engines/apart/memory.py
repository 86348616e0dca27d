"""Weights that two processes see: who loads them writes, who computes reads."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator

import torch

# Kernels load whole vectors.
_ALIGNMENT = 64


def reserve(model: torch.nn.Module) -> int:
    """A file descriptor of memory for all weights of `model`; it has no name, so nothing stays."""
    size = max((end for _, _, end in _places(model)), default=0)
    descriptor = os.memfd_create("troupe-weights")
    os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
    return descriptor


def settle(model: torch.nn.Module, descriptor: int) -> None:
    """Move the weights of `model` into that memory. What they held is not kept: where another
    process has settled a model of the same configuration they are that one's."""
    pages = mmap.mmap(descriptor, 0)
    for slot, start, _ in _places(model):
        if slot.numel():
            flat = torch.frombuffer(pages, dtype=slot.dtype, count=slot.numel(), offset=start)
            slot.data = flat.view(slot.shape)


def _places(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Every tensor that weights are loaded into, once, with its first byte and the one after."""
    seen: set[int] = set()
    at = 0
    for slot in model.state_dict(keep_vars=True).values():
        if id(slot) in seen:  # tied to one before it
            continue
        seen.add(id(slot))
        end = at + slot.numel() * slot.dtype.itemsize
        yield slot, at, end
        at = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
