"""Copies of tensors between GPUs and host memory, through small pinned buffers.

The link reaches its full speed only to pinned memory, but pinning the memory of a whole state costs
more than the copy. So pieces go through pinned buffers, one for each of several threads, which copy
on their own streams while others hash. The device's own work is never delayed.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np
import torch

from troupe.transfer.checksum import PIECE_BYTES, flat_bytes

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS: Final = 8
# Smaller states would be copied before threads have started.
_PARALLEL_BYTES: Final = 64 << 20


def threads_for(num_bytes: int, *, device: bool) -> int:
    """Return the number of threads that copy `num_bytes`: the process's compute threads; for a
    device, at least half of the cores, which are mostly idle on such a host."""
    if num_bytes < _PARALLEL_BYTES:
        return 1
    own = torch.get_num_threads()
    if device:
        own = max(own, len(os.sched_getaffinity(0)) // 2)
    return max(1, min(own, _MOST_THREADS))


def each(call: Callable[[T], R], jobs: Sequence[T], threads: int) -> list[R]:
    """Return the results of `call` for every job, in their order, from `threads` threads."""
    if threads == 1:
        return [call(job) for job in jobs]
    return list(_pool(threads).map(call, jobs))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    # Threads are kept, since a pinned buffer and a stream cost more than one copy through them.
    return ThreadPoolExecutor(threads, thread_name_prefix="transfer-copy")


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


class DeviceBytes:
    """The C-order bytes of a tensor on a device; slices are copies in host memory."""

    on_device = True

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take a view of `tensor` if it is contiguous, else a copy on the device."""
        self._flat = flat_bytes(tensor)
        # The tensor's writes were issued in the caller's stream.
        self._written = torch.cuda.current_stream(tensor.device).record_event()

    def __len__(self) -> int:
        return self._flat.numel()

    def __getitem__(self, where: slice) -> memoryview:
        """Return at most `PIECE_BYTES`, which stay valid until this thread takes another piece."""
        piece = self._flat[where]
        with _copying(self._flat.device, self._written) as (buffer, stream):
            staged = buffer[: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            stream.synchronize()
        return memoryview(staged.numpy().data)


def upload(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair (in host memory) into the first (contiguous, on one
    device, of the same layout). All copies are complete when this returns."""
    flats = [(flat_bytes(target), flat_bytes(source)) for target, source in pairs]
    if not flats:
        return
    device = flats[0][0].device
    # Earlier uses of these targets' memory may not have ended on the device.
    free = torch.cuda.current_stream(device).record_event()

    def copy(job: tuple[torch.Tensor, torch.Tensor]) -> None:
        target, source = job
        with _copying(device, free) as (buffer, stream):
            staged = buffer[: source.numel()]
            # (torch's own copy would occupy all of its compute threads.)
            np.copyto(staged.numpy(), source.numpy())
            target.copy_(staged, non_blocking=True)
            stream.synchronize()

    jobs = [
        (target[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES])
        for target, source in flats
        for at in range(0, target.numel(), PIECE_BYTES)
    ]
    num_bytes = sum(target.numel() for target, _ in flats)
    each(copy, jobs, threads_for(num_bytes, device=True))


def brought(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return copies of `tensors` (in host memory) on `device`; complete when this returns.

    Computation on the device and the copies do not wait for each other: their memory belongs to a
    separate stream, and is reused only when the caller's stream has finished with it.
    """
    user = torch.cuda.current_stream(device)
    with torch.cuda.stream(_arrivals(device)):
        found = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in tensors.items()
        }
        upload((found[name], tensor) for name, tensor in tensors.items())
    for tensor in found.values():
        tensor.record_stream(user)
    return found


@functools.cache
def _arrivals(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_of_thread = threading.local()


@contextmanager
def _copying(device: torch.device, after: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield this thread's pinned buffer, and its stream, which continues after the event
    `after`."""
    kept: dict[torch.device, tuple[torch.Tensor, Any]] = _of_thread.__dict__.setdefault("kept", {})
    if device not in kept:
        buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        kept[device] = buffer, stream
    buffer, stream = kept[device]
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        yield buffer, stream
