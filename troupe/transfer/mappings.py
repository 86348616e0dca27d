"""Files that stay mapped, for the next state that fills them.

Whoever publishes version after version, or suspends policy after policy, fills the same few files
(`troupe.transfer.spares`). To map one anew, page by page as it is read, and to unmap it costs as
much as copying it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch

from troupe.transfer import blob
from troupe.transfer.manifest import Manifest

# Of one policy two versions, of a few policies.
_MOST_KEPT: Final = 16
_IDLE_SECONDS: Final = 120.0


@dataclass(eq=False)
class Lease:
    """The data section of a state. Nobody fills its file again while this is referenced."""

    data: memoryview
    file: BinaryIO

    def __del__(self) -> None:
        self.file.close()


@dataclass
class _Kept:
    mapping: mmap.mmap
    # Opened apart from any lease: a mapping keeps what it was made of open, with its lock.
    file: BinaryIO
    used: float


class _Leased(np.ndarray):  # type: ignore[type-arg]
    """Bytes that keep their lease; tensors over them keep them."""

    lease: Lease


class Mappings:
    """Mappings by file. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], _Kept] = OrderedDict()

    def lease(self, opened: tuple[Manifest, int, BinaryIO]) -> tuple[Manifest, Lease]:
        """The state in an open file (`Transfer.opened`), not verified."""
        manifest, start, file = opened
        try:
            mapping = self._mapping(file)
        except BaseException:
            file.close()
            raise
        return manifest, Lease(memoryview(mapping)[start : start + manifest.end], file)

    def read(self, path: Path) -> tuple[Manifest, dict[str, torch.Tensor], tuple[int, int]]:
        """`blob.read` through a mapping that stays: nobody may write to these tensors."""
        self.sweep()
        manifest, lease = self.lease(blob.opened(path))
        data = np.frombuffer(lease.data, np.uint8).view(_Leased)
        data.lease = lease
        tensors = {entry.name: blob.view(data, 0, entry) for entry in manifest.entries}
        return manifest, tensors, blob.identity_in(os.fstat(lease.file.fileno()))

    def sweep(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        """Let go files that have no name any more, and those that nobody read for so long."""
        now = time.monotonic()
        with self._lock:
            for name, kept in list(self._kept.items()):
                gone = os.fstat(kept.file.fileno()).st_nlink == 0
                if gone or now - kept.used > idle_seconds:
                    self._drop(name)

    def _mapping(self, leased: BinaryIO) -> mmap.mmap:
        status = os.fstat(leased.fileno())
        name = (status.st_dev, status.st_ino)
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or len(kept.mapping) != status.st_size:
                if kept is not None:
                    self._drop(name)
                with contextlib.ExitStack() as stack:
                    file = stack.enter_context(open(leased.name, "rb"))
                    if os.fstat(file.fileno()).st_ino != status.st_ino:
                        # Replaced since: of no use to anybody else.
                        return mmap.mmap(leased.fileno(), 0, access=mmap.ACCESS_COPY)
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                    stack.pop_all()
                kept = self._kept[name] = _Kept(mapping, file, 0.0)
            kept.used = time.monotonic()
            self._kept.move_to_end(name)
            while len(self._kept) > _MOST_KEPT:
                self._drop(next(iter(self._kept)))
            return kept.mapping

    def _drop(self, name: tuple[int, int]) -> None:
        # Its memory is unmapped with the last lease.
        self._kept.pop(name).file.close()
