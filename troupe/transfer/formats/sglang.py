"""SGLang's encodings of tensors, and its process groups.

SGLang's encoding is a pickle (never used for our own messages). With a handle, another process of
the host opens a tensor: memory is shared, nothing is copied. Handles come from
torch.multiprocessing. A reader of a handle gives back the reference that making it took: each
reader needs a handle of its own, and the maker keeps its tensor until all have read.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.multiprocessing.reductions import reduce_tensor

from troupe.transfer.flat_buckets import BucketFormat, FlatBucket, JoinedGroup, Meeting

# Where the number of the device is among the arguments that rebuild a tensor of a GPU.
_DEVICE: Final = 6

NamedTensors = Sequence[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]


class SglangFormat(BucketFormat):
    """Flat buckets as SGLang's `load_format: flattened_bucket` unpacks them."""

    def handles(self, bucket: FlatBucket) -> bytes:
        """See `BucketFormat.handles`."""
        return handles(flattened(bucket))

    def join(self, meeting: Meeting) -> JoinedGroup:
        """See `BucketFormat.join`. As SGLang's `init_custom_process_group` does: next to the groups
        of a gang, whose default group has other ranks, if there is one."""
        from torch.distributed import distributed_c10d as c10d

        group, _ = c10d._new_process_group_helper(
            meeting.size,
            0,
            [],
            dist.Backend(meeting.backend),
            PrefixStore(meeting.name, meeting.store),
            group_name=meeting.name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=meeting.seconds),
        )
        ranks = {rank: rank for rank in range(meeting.size)}
        c10d._world.pg_group_ranks[group] = ranks  # type: ignore[index]
        return _TorchGroup(group)


class _TorchGroup(JoinedGroup):
    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """See `JoinedGroup.broadcast`."""
        return dist.broadcast(tensor, 0, self._group, async_op=True)

    def end(self) -> None:
        """See `JoinedGroup.end`."""
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            self._group.abort()  # destroying alone would wait for what is being sent
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(self._group)


def flattened(bucket: FlatBucket) -> dict[str, Any]:
    """A bucket as SGLang unpacks it: it reads these attributes, of any class."""
    metadata, start = [], 0
    for name, shape in bucket.shapes.items():
        end = start + shape.numel()
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=shape,
                dtype=bucket.flat.dtype,
                start_idx=start,
                end_idx=end,
                numel=shape.numel(),
            )
        )
        start = end
    return {"flattened_tensor": bucket.flat, "metadata": metadata}


def payloads(named: NamedTensors, ranks: int, *, shared: bool) -> list[str]:
    """`named` encoded for each of a server's ranks: by handles of shared memory if it is `shared`
    with the server, else by value.

    Each rank that reads a handle gives back the reference that encoding it took: one encoding read
    by all would free the memory while later ranks, and this process, still need it."""
    if shared:
        return [as_text(handles(named)) for _ in range(ranks)]
    # A view of a large file would be pickled with all of it.
    pairs = named.items() if isinstance(named, Mapping) else named
    own = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in pairs]
    return [as_text(pickle.dumps(dict(own) if isinstance(named, Mapping) else own))] * ranks


def as_text(content: bytes) -> str:
    """Bytes as they are put into JSON."""
    return base64.b64encode(content).decode()


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
