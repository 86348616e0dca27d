"""What a process does with memory that it has freed."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_MIB: Final = 2**20
# Of malloc.h, in glibc.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Let malloc keep what is freed: messages of some hundred KB come and go by the thousand, and
    each would be asked of the kernel anew, page by page (a tenth of the work).

    Nothing happens where the C library is another.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 64 * _MIB)
        # The highest that glibc takes.
        mallopt(_MMAP_THRESHOLD, 32 * _MIB)
