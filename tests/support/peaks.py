"""Resident memory of this process while something runs, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")
# glibc's `mallopt`: blocks from this size are given back to the kernel as soon as they are freed.
_MMAP_THRESHOLD = -3
_EXACT, _USUAL = 1 << 20, 32 << 20


def growth(work: Callable[[], object]) -> int:
    """By how many bytes the process' memory grew at most while `work` ran."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _EXACT)
    try:
        gc.collect()
        libc.malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")  # the peak begins anew at what is resident now
        before = _field("VmRSS")
        work()
        return _field("VmHWM") - before
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _USUAL)


def _field(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
