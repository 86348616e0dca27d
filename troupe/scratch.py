"""`Scratch`: a directory in host memory for as long as its process lives."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")


def memory_root() -> Path:
    """Where files are in memory: `/dev/shm`, or where temporary files go on hosts without it."""
    writable = os.access(_SHARED_MEMORY, os.W_OK)
    return _SHARED_MEMORY if writable else Path(tempfile.gettempdir())


class Scratch:
    """`path` is this process's; what others of its `prefix` left that were killed goes first.

    A process holds a lock on its directory, of which the kernel lets go however it ends: so owners
    in other containers are told from dead ones, too, which process ids would not do.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        """Below `root`; None: in host memory. Raises OSError."""
        root = root or memory_root()
        _sweep(root, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            # Somebody else's sweep may find it before it is locked: then another is made.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.is_dir():
                    return
                os.close(self._lock)

    def close(self) -> None:
        """It goes, with what is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _sweep(root: Path, prefix: str) -> None:
    for left in root.glob(f"{prefix}*"):
        # Gone meanwhile, somebody else's, or (BlockingIOError) alive.
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
                log.info("removed %s, which a killed process had left", left)
            finally:
                os.close(descriptor)
