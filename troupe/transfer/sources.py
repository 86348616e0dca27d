"""Sources of states: directories of this host, and owners on other hosts."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from troupe.disks import memory_root
from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer.counters import Choice, TransferCounters
from troupe.transfer.errors import Corrupt, KeyNotFound

log = logging.getLogger(__name__)

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}


def default_root() -> Path:
    """Return `/dev/shm/troupe-<uid>`, or, without `/dev/shm`, a directory of that name for
    temporary files."""
    return memory_root() / f"troupe-{os.getuid()}"


def in_memory(path: Path) -> bool:
    """Return whether `path` (or its nearest existing parent) lies in a memory file system."""
    path = path.absolute()
    while True:
        with contextlib.suppress(OSError):
            return _in_memory(path, path.stat().st_dev)
        path = path.parent


@functools.lru_cache(maxsize=256)
def _in_memory(path: Path, device: int) -> bool:
    """Return `in_memory` for a path on `device`; cached, because every transfer needs it."""
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
    """A state that was fetched to this host and fully verified, and its transport."""

    path: Path
    choice: Choice


@dataclass(frozen=True)
class StateRequest:
    """A request to fetch a state from another host."""

    key: str
    # On the monotonic clock; 0: the source's own deadline.
    deadline: float
    # The required checksum; an owner with different content counts as not having it.
    expected: str | None = None
    # A key of this host with mostly equal content, whose common pieces are not sent.
    base: str | None = None


class FetchSource(Protocol):
    """A source that fetches states from other hosts: `troupe.transfer.remote.Peer`, `HostOwner`."""

    @property
    def address(self) -> str: ...
    @property
    def deadline_seconds(self) -> float: ...
    def fetch(
        self, wanted: StateRequest, roots: Sequence[Path], counters: TransferCounters
    ) -> FetchedState:
        """Fetch it into the first of `roots` that has room.

        Raises KeyNotFound, Corrupt, StorageFull, TransferTimeout, Unavailable.
        """
        ...


def from_first(
    peers: Sequence[FetchSource],
    wanted: StateRequest,
    roots: Sequence[Path],
    counters: TransferCounters,
) -> FetchedState:
    """Fetch from the first peer that has the state.

    Raises KeyNotFound, or the error of the last peer.
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
            del failure  # else a reference cycle that keeps the callers' frames
    addresses = ", ".join(peer.address for peer in peers)
    raise KeyNotFound(wanted.key, f"neither here nor at {addresses}")


def described_room(root: Path) -> str:
    """Return size and free space of a memory file system, for warnings; in a container it may be
    far smaller than the machine's memory."""
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return f"{root} had no room"
    return (
        f"{root} had no room ({usage.total >> 20} MiB in all, {usage.free >> 20} free now); a "
        "container has 64 MiB unless it is given more (shm_size, a volume of medium Memory)"
    )


def near(path: Path, roots: Sequence[Path]) -> tuple[str, str]:
    """Return transport and reason (`Choice`) of a state at `path`, in one of `roots`.

    They follow from its root: a state in the first root has found room there.
    """
    root = next((one for one in roots if path.is_relative_to(one)), path.parent)
    if in_memory(root):
        return "shared_memory", "same_host"
    full = root != roots[0] and in_memory(roots[0])
    return "file", "shared_memory_full" if full else "root_on_disk"
