"""A pool of the files of deleted states, for refilling.

Allocating a page of shared memory takes several times as long as copying into it, and mapping it
takes about as long again. Therefore a process that publishes version after version, or suspends
policy after policy, refills the same few files through mappings that stay open.

A pooled file has a second name in `.spare/` of its root. It is free once its key's name is gone and
no reader holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

log = logging.getLogger(__name__)

# Reusing smaller files gains nothing.
MIN_BYTES: Final = 4 << 20
# Maximum number of free files that one process keeps under one root.
_MOST_FREE: Final = 2
# A free file that is not reused for this time is removed.
_IDLE_SECONDS: Final = 120.0
# Maximum ratio between a file's size and the needed size: its pages occupy memory even if unused.
_FIT: Final = 2.0
_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(eq=False)
class PooledSegment:
    """An open file with its second name, and the mapping through which it was filled, if any."""

    file: BinaryIO
    link: Path
    mapping: mmap.mmap | None = None

    def map(self, nbytes: int) -> memoryview:
        """Map at least `nbytes` of it for writing. Raises OSError if there is no room."""
        size = os.fstat(self.file.fileno()).st_size
        if size < nbytes:
            # Writing through a mapping without room behind it would kill the process.
            os.posix_fallocate(self.file.fileno(), size, nbytes - size)
        if self.mapping is None or len(self.mapping) < nbytes:
            self.mapping = mmap.mmap(self.file.fileno(), nbytes, flags=mmap.MAP_SHARED | _POPULATE)
        return memoryview(self.mapping)

    def close(self) -> None:
        """Release the file; its memory becomes free once no key names it and no process has it
        mapped."""
        if os.fstat(self.file.fileno()).st_nlink == 1 and _locked(self):
            # It has no readers, but an owner process may still have it mapped.
            self.file.truncate(0)
        self.link.unlink(missing_ok=True)
        self.mapping = None
        self.file.close()


class SegmentPool:
    """The pooled files of this process under one root. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._directory = root / ".spare"
        self._lock = threading.Lock()
        self._kept: list[PooledSegment] = []

    def take(self, nbytes: int) -> PooledSegment | None:
        """Return a free file of about `nbytes`, locked against readers; the caller then calls
        `keep` again."""
        if nbytes < MIN_BYTES:
            return None
        with self._lock:
            free = sorted(self._free(), key=lambda s: abs(_size(s) - nbytes))
            for segment in free:
                if nbytes / _FIT <= _size(segment) <= nbytes * _FIT and _locked(segment):
                    self._kept.remove(segment)
                    return segment
        return None

    def keep(self, file: BinaryIO, path: Path, nbytes: int) -> PooledSegment | None:
        """Give `file`, which is at `path`, its second name; return None if it cannot be pooled."""
        if nbytes < MIN_BYTES:
            return None
        link = self._directory / secrets.token_hex(8)
        try:
            self._directory.mkdir(exist_ok=True, mode=0o700)
            os.link(path, link)
        except OSError as error:
            log.debug("%s is not pooled: %s", path, error)
            return None
        return PooledSegment(file, link)

    def put(self, segment: PooledSegment) -> None:
        """Return a published file to the pool; it is reused once its key's name is gone."""
        with self._lock:
            self._kept.append(segment)
        self.trim()
        self.sweep()

    def trim(self) -> None:
        """Remove free files beyond the maximum number."""
        with self._lock:
            for old in self._free()[: -_MOST_FREE or None]:
                self._kept.remove(old)
                old.close()

    def sweep(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        """Remove files of any process that were free for `idle_seconds`."""
        with contextlib.suppress(FileNotFoundError):
            for link in self._directory.iterdir():
                with contextlib.suppress(OSError):
                    status = link.stat()
                    # The change time is when its key's name went away.
                    if status.st_nlink > 1 or time.time() - status.st_ctime < idle_seconds:
                        continue
                    with open(link, "r+b") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        # A process that still has it open finds it without a name and drops it.
                        link.unlink()
                        file.truncate(0)
        with self._lock:
            self._kept = [s for s in self._kept if os.fstat(s.file.fileno()).st_nlink > 0]

    def close(self) -> None:
        """Remove all free files."""
        with self._lock:
            for segment in self._kept:
                segment.close()
            self._kept.clear()

    def _free(self) -> list[PooledSegment]:
        return [s for s in self._kept if os.fstat(s.file.fileno()).st_nlink == 1]


def _size(segment: PooledSegment) -> int:
    return os.fstat(segment.file.fileno()).st_size


def _locked(segment: PooledSegment) -> bool:
    try:
        fcntl.flock(segment.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Another process may have removed it already.
    if os.fstat(segment.file.fileno()).st_nlink == 1:
        return True
    fcntl.flock(segment.file, fcntl.LOCK_UN)
    return False
