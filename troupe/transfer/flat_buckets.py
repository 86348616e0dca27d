"""Flat buckets: tensors of one dtype one after another in C order, in one tensor.

Inference servers load few large handles or broadcasts faster than many small ones. How a kind of
server takes a bucket is its format (`troupe.transfer.formats`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from troupe.transfer.checksum import dtype_name


@dataclass(frozen=True)
class FlatBucket:
    """`flat`: the elements of all tensors; `shapes`: theirs by name, in this order."""

    flat: torch.Tensor
    shapes: dict[str, torch.Size]

    @property
    def dtype(self) -> str:
        """torch's name of the dtype: "bfloat16"."""
        return dtype_name(self.flat.dtype)


def flat_buckets(named: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[FlatBucket]:
    """Copies of `named` in buckets of at most `limit` bytes, on the tensors' device; a larger
    tensor is a bucket of its own. Read lazily: a few tensors and one bucket are in memory."""
    open_: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        bucket = open_.setdefault(tensor.dtype, [])
        if bucket and sum(one.nbytes for _, one in bucket) + tensor.nbytes > limit:
            yield _joined(bucket)
            bucket.clear()
        bucket.append((name, tensor.detach()))
    for bucket in open_.values():
        yield _joined(bucket)


def _joined(bucket: list[tuple[str, torch.Tensor]]) -> FlatBucket:
    shapes = {name: tensor.shape for name, tensor in bucket}
    return FlatBucket(torch.cat([tensor.reshape(-1) for _, tensor in bucket]), shapes)
