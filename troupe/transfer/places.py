"""Where states lie: directories of this host, and peers on others."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from troupe.rpc.errors import TroupeError, Unavailable
from troupe.scratch import memory_root
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound

log = logging.getLogger(__name__)

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}


def default_root() -> Path:
    """`/dev/shm/troupe-<uid>`, or a directory of that name for temporary files without one."""
    return memory_root() / f"troupe-{os.getuid()}"


def in_memory(path: Path) -> bool:
    """Whether `path` (or its nearest existing parent) lies in a memory file system."""
    path = path.absolute()
    while True:
        with contextlib.suppress(OSError):
            return _in_memory(path, path.stat().st_dev)
        path = path.parent


@functools.lru_cache(maxsize=256)
def _in_memory(path: Path, device: int) -> bool:
    """Asked for every state that moves; of one `device` a path has one answer."""
    best, kind = -1, ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    for line in mounts:
        _, mount, fstype, *_ = line.split(" ")
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), fstype
    return kind in _MEMORY_FILESYSTEMS


@dataclass(frozen=True)
class FetchedState:
    """A state that was fetched to this host, all of its bytes verified, and how it came."""

    path: Path
    choice: Choice


@dataclass(frozen=True)
class Wanted:
    """A state of another host that is needed here."""

    key: str
    # Of the monotonic clock.
    deadline: float
    # The checksum it must have; who has another content has not got it.
    expected: str | None = None
    # A key of this host that most of it may equal.
    base: str | None = None


class Source(Protocol):
    """Where states of other hosts come from: `troupe.transfer.remote.Peer`, `HostOwner`."""

    @property
    def address(self) -> str: ...
    @property
    def deadline_seconds(self) -> float: ...
    def fetch(
        self, wanted: Wanted, roots: Sequence[Path], counters: TransferCounters
    ) -> FetchedState:
        """Bring it into the first of `roots` that has room.

        Raises KeyNotFound, Corrupt, StorageFull, TransferTimeout, Unavailable.
        """
        ...


def from_first(
    peers: Sequence[Source], wanted: Wanted, roots: Sequence[Path], counters: TransferCounters
) -> FetchedState:
    """What is `wanted` from the first peer that has it; a deadline of 0 is the peer's own.

    Raises KeyNotFound, or what the last one raised.
    """
    failure: TroupeError | None = None
    for peer in peers:
        until = wanted.deadline or time.monotonic() + peer.deadline_seconds
        try:
            return peer.fetch(replace(wanted, deadline=until), roots, counters)
        except KeyNotFound:
            continue
        except (Unavailable, Corrupt) as error:
            log.warning("%s: %s", wanted.key, error.message)
            failure = error.with_traceback(None)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # a circle otherwise, with the frames of whoever called
    addresses = ", ".join(peer.address for peer in peers)
    raise KeyNotFound(wanted.key, f"neither here nor at {addresses}")


def near(path: Path, roots: Sequence[Path]) -> tuple[str, str]:
    """Transport of what lies at `path`, one of `roots`, and why it lies there."""
    if in_memory(path.parent):
        return "shared_memory", "same_host"
    return "file", "shared_memory_full" if in_memory(roots[0]) else "root_on_disk"
