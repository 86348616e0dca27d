"""A folder in host memory for as long as its process lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger("troupe.reward")

_SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "troupe-models-"


class Folder:
    """`path` is this process's; what others left that were killed is removed first.

    A process holds a lock on its folder, of which the kernel lets go however it ends.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Below `root`; None: in shared memory where there is any, else where temporary files go.
        Raises OSError."""
        if root is None:
            root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        sweep(root)
        # Not found by others before it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.removeprefix(".")))

    def close(self) -> None:
        """It goes, with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(root: Path) -> None:
    """Remove the folders of processes that are gone."""
    for left in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or being removed
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
                log.info("removed what a killed process left", folder=str(left))
            finally:
                os.close(descriptor)
