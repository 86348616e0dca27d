"""Forms in which SGLang takes tensors from a trainer's devices: flat buckets, and handles.

A flat bucket holds tensors of one dtype one after another in C order (SGLang's `flattened_bucket`):
few large handles or broadcasts in place of many small. By a handle another process of the host
opens a tensor: memory is shared, nothing is copied. Handles are those of torch.multiprocessing in
SGLang's encoding, a pickle (never used for our own messages). A reader of a handle gives back the
reference that making it took: each reader needs a handle of its own, and the maker keeps its tensor
until all have read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import reduce_tensor

from troupe.transfer.checksum import dtype_name

# Where the number of the device is among the arguments that rebuild a tensor of a GPU.
_DEVICE: Final = 6


@dataclass(frozen=True)
class FlatBucket:
    """`flat`: the elements of all tensors; `shapes`: theirs by name, in this order."""

    flat: torch.Tensor
    shapes: dict[str, torch.Size]

    @property
    def dtype(self) -> str:
        """torch's name of the dtype: "bfloat16"."""
        return dtype_name(self.flat.dtype)

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


def handles(named: Any) -> bytes:
    """An encoding of tensors (by name, as pairs or in dicts) by handles, for one reader.

    A GPU is named by its UUID, as SGLang does: its number differs between processes that see
    different GPUs."""
    # The default strategy passes file descriptors, which crashes SGLang's scheduler.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table[torch.Tensor] = _reduced
    pickler.dump(named)
    return buffer.getvalue()


def _reduced(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments
