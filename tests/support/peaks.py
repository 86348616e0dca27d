"""How much memory something takes while it runs: of the process, or in tensors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROCESS = Path("/proc/self")
# glibc's `mallopt`: blocks from this size are given back to the kernel as soon as they are freed.
_MMAP_THRESHOLD = -3
_EXACT, _USUAL = 1 << 20, 32 << 20


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`; only its first field is read."""

    _fields_ = (("arena", ctypes.c_size_t), *((f"other{n}", ctypes.c_size_t) for n in range(9)))


def growth(work: Callable[[], object]) -> int:
    """Return the peak growth of the process's memory in bytes while `work` ran."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _EXACT)
    try:
        gc.collect()
        libc.malloc_trim(0)
        with _no_large_free_chunk(libc):
            (_PROCESS / "clear_refs").write_text("5")  # resets the peak to resident memory
            before = _field("VmRSS")
            work()
            return _field("VmHWM") - before
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _USUAL)


def tensor_peak(run: Callable[[], object]) -> int:
    """The most bytes of tensors on the CPU that `run` holds at once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@contextmanager
def _no_large_free_chunk(libc: ctypes.CDLL) -> Iterator[None]:
    """Hold every free chunk of the heap that a large block would fit into.

    malloc prefers one to memory of the block's own, whatever the threshold, and the chunk is not
    given back afterwards: it would count for the rest of `work`. Held chunks are not written to.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    libc.mallinfo2.restype = _Mallinfo2
    held = []
    try:
        before = libc.mallinfo2().arena
        while libc.mallinfo2().arena == before:  # it grows when no chunk is left
            held.append(libc.malloc(_EXACT - (4 << 10)))
        yield
    finally:
        for block in held:
            libc.free(block)


def _field(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
