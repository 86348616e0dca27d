"""Directories in the host's memory, which all users share: whose they are, how long they stay."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")


def memory_root() -> Path:
    """Where files are in memory: `/dev/shm`, or where temporary files go on hosts without it."""
    writable = os.access(_SHARED_MEMORY, os.W_OK)
    return _SHARED_MEMORY if writable else Path(tempfile.gettempdir())


def private_directory(path: Path) -> Path:
    """Make the directory `path`, or take the one that is there, for this user alone; returns it.

    For names that others can foresee, in places where everybody may make directories. Raises
    PermissionError, which says why, where it is a link, another user's, or one that others may
    write to: what lies there may be theirs. Other OSErrors when it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.is_symlink():
        raise PermissionError(errno.EPERM, "it is a link, which another user may have made")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o022:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(errno.EPERM, f"other users may write to it (mode {mode:o})")
        if status.st_mode & 0o055:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def is_foreseeable(path: Path) -> bool:
    """Whether any user of the host could have made `path`: all may write where it is."""
    try:
        return bool(path.parent.stat().st_mode & stat.S_IWOTH) and not path.is_mount()
    except OSError:
        return False


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
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
                log.info("removed %s, which a killed process had left", left)
            finally:
                os.close(descriptor)
