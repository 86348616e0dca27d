"""Tensors of one dtype as one flat tensor: few large handles or broadcasts in place of many small.

The layout is that of SGLang's `flattened_bucket`: tensors one after another, in C order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class FlatBucket:
    """`flat`: the elements of all tensors; `shapes`: theirs by name, in this order."""

    flat: torch.Tensor
    shapes: dict[str, torch.Size]

    @property
    def dtype(self) -> str:
        """torch's name of the dtype: "bfloat16"."""
        return str(self.flat.dtype).removeprefix("torch.")

    def for_server(self) -> dict[str, Any]:
        """What SGLang's `load_format: flattened_bucket` unpacks: it reads these attributes, of any
        class."""
        metadata, start = [], 0
        for name, shape in self.shapes.items():
            end = start + shape.numel()
            metadata.append(
                SimpleNamespace(
                    name=name,
                    shape=shape,
                    dtype=self.flat.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=shape.numel(),
                )
            )
            start = end
        return {"flattened_tensor": self.flat, "metadata": metadata}


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
