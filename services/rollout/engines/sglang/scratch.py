"""A directory of our own for weights on their way; leftovers of dead processes are cleared."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "troupe-sglang-"
_LOCK: Final = ".lock"


class ScratchDirectory:
    """Lies in shared memory where there is some. Held by a file lock: whoever can take the lock
    of another one knows that its owner is dead, in whatever container that lived.
    """

    def __init__(self, parent: Path | None = None) -> None:
        shared = Path("/dev/shm")
        if parent is None:
            parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete it and all that it holds. Repeatable."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        # Gone meanwhile, somebody else's, or (BlockingIOError) alive.
        with contextlib.suppress(OSError), (path / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
