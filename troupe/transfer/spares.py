"""Files of states that nobody needs any more, kept to be filled again.

A fresh page of shared memory costs several times what copying into it does, and mapping one in
costs about as much. Whoever publishes version after version, or suspends policy after policy, so
fills the same few files over and over, through mappings that stay.

A file that may become a spare has a second name in `.spare/` of its root. Its key's name being
gone, and no reader holding its lock, it is free.
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

# Below it, nothing is gained.
MIN_BYTES: Final = 4 << 20
# Free files that one process keeps under one root.
_MOST_FREE: Final = 2
# A file that nobody used again for so long gives its memory back.
_IDLE_SECONDS: Final = 120.0
# How far the size of a spare may be off: its pages are memory whether they are used or not.
_FIT: Final = 2.0
_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(eq=False)
class Spare:
    """An open file with its second name, and its mapping once it was filled through one."""

    file: BinaryIO
    link: Path
    mapping: mmap.mmap | None = None

    def map(self, nbytes: int) -> memoryview:
        """At least `nbytes` of it, writable. Raises OSError when there is no room."""
        size = os.fstat(self.file.fileno()).st_size
        if size < nbytes:
            # A store through a mapping without room behind it would kill the process.
            os.posix_fallocate(self.file.fileno(), size, nbytes - size)
        if self.mapping is None or len(self.mapping) < nbytes:
            self.mapping = mmap.mmap(self.file.fileno(), nbytes, flags=mmap.MAP_SHARED | _POPULATE)
        return memoryview(self.mapping)

    def close(self) -> None:
        """Forget it; its memory is free once no key names it and nobody has it mapped."""
        if os.fstat(self.file.fileno()).st_nlink == 1 and _locked(self):
            # Nobody reads it, but an owner may still have it mapped.
            self.file.truncate(0)
        self.link.unlink(missing_ok=True)
        self.mapping = None
        self.file.close()


class Spares:
    """This process' files under one root. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self._directory = root / ".spare"
        self._lock = threading.Lock()
        self._kept: list[Spare] = []

    def take(self, nbytes: int) -> Spare | None:
        """A free file of about `nbytes`, locked against readers; the caller `keep`s it again."""
        if nbytes < MIN_BYTES:
            return None
        with self._lock:
            free = sorted(self._free(), key=lambda s: abs(_size(s) - nbytes))
            for spare in free:
                if nbytes / _FIT <= _size(spare) <= nbytes * _FIT and _locked(spare):
                    self._kept.remove(spare)
                    return spare
        return None

    def keep(self, file: BinaryIO, path: Path, nbytes: int) -> Spare | None:
        """Give `file`, which is at `path`, its second name; None where that is of no use."""
        if nbytes < MIN_BYTES:
            return None
        link = self._directory / secrets.token_hex(8)
        try:
            self._directory.mkdir(exist_ok=True, mode=0o700)
            os.link(path, link)
        except OSError as error:
            log.debug("%s is not kept for later: %s", path, error)
            return None
        return Spare(file, link)

    def put(self, spare: Spare) -> None:
        """It is filled and has its key's name: use it again when it has lost that."""
        with self._lock:
            self._kept.append(spare)
        self.trim()
        self.sweep()

    def trim(self) -> None:
        """Keep no more free files than may be of use."""
        with self._lock:
            for old in self._free()[: -_MOST_FREE or None]:
                self._kept.remove(old)
                old.close()

    def sweep(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        """Free what nobody has used for so long, whichever process kept it."""
        with contextlib.suppress(FileNotFoundError):
            for link in self._directory.iterdir():
                with contextlib.suppress(OSError):
                    status = link.stat()
                    # The change time is when its key's name went away.
                    if status.st_nlink > 1 or time.time() - status.st_ctime < idle_seconds:
                        continue
                    with open(link, "r+b") as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        # Who still has it open finds it without a name, and drops it.
                        link.unlink()
                        file.truncate(0)
        with self._lock:
            self._kept = [s for s in self._kept if os.fstat(s.file.fileno()).st_nlink > 0]

    def close(self) -> None:
        """Give back all memory that is free."""
        with self._lock:
            for spare in self._kept:
                spare.close()
            self._kept.clear()

    def _free(self) -> list[Spare]:
        return [s for s in self._kept if os.fstat(s.file.fileno()).st_nlink == 1]


def _size(spare: Spare) -> int:
    return os.fstat(spare.file.fileno()).st_size


def _locked(spare: Spare) -> bool:
    try:
        fcntl.flock(spare.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Somebody may have given its memory back before.
    if os.fstat(spare.file.fileno()).st_nlink == 1:
        return True
    fcntl.flock(spare.file, fcntl.LOCK_UN)
    return False
