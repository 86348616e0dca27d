"""Errors and checks of full disks; ownership and cleanup of directories in shared memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

SLOWEST_BYTES_PER_SECOND: Final = 20e6  # deadlines assume at least this rate of disk and network
# The system error in the texts of safetensors' and tokenizers' exceptions.
_NUMBER: Final = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def system_error(error: BaseException) -> OSError | None:
    """Return the OSError that `error` is or quotes; None for any other error."""
    if isinstance(error, OSError):
        return error
    match = _NUMBER.search(str(error))
    if match is None:
        return None
    number = int(match[1] or match[2])
    return OSError(number, os.strerror(number))


def is_full(error: OSError) -> bool:
    """Return whether an error means that the disk, or the quota of the writing user, is full."""
    return error.errno in _NO_ROOM


_MIB: Final = 1 << 20
# Free bytes that a service needs: more than one of its writes, and a tenth of a small disk.
_NEEDED_BYTES: Final = 64 * _MIB
_NEEDED_PART: Final = 10
_PROBE_BYTES: Final = 1 << 16
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def shortage(directory: Path) -> str | None:
    """Return why `directory` is about to become unwritable, naming its disk; None if it has room.

    Blocks while it writes and removes a small file, which detects a quota.
    """
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    total = disk.f_blocks * disk.f_frsize
    # Part of a disk may be kept for root.
    free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
    if total and free < min(_NEEDED_BYTES, total // _NEEDED_PART):
        return f"the disk of {directory} is full ({free // _MIB} of {total // _MIB} MiB are free)"
    if disk.f_files and not disk.f_ffree:
        return f"the disk of {directory} is full (it has no inodes left)"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".room-") as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno in _FULL:
            return f"the disk of {directory} is full ({error.strerror})"
        if error.errno == errno.EROFS:  # as the kernel makes it after an error of the disk
            return f"the disk of {directory} is read-only"
    return None


log = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")
# Maximum number of links in one path that Linux follows.
_MOST_LINKS: Final = 40


def memory_root() -> Path:
    """Return `/dev/shm`, or the directory for temporary files on hosts without it."""
    writable = os.access(_SHARED_MEMORY, os.W_OK)
    return _SHARED_MEMORY if writable else Path(tempfile.gettempdir())


def own_directory(path: Path) -> Path:
    """Make the directory `path`, or check the existing one; return it.

    For directories that an operator may name, perhaps a link or a mount. Raises PermissionError
    with the reason if all users share it, if another user owns it or may write to it, or may have
    made or redirected it; other OSErrors if it cannot be made.
    """
    if is_common(path):
        raise PermissionError(errno.EPERM, "it is shared by all users: name a directory in it")
    if (found := strangers_part(path)) is not None:
        part, owner = found
        what = "it" if part == path else f"'{part}'"
        raise PermissionError(errno.EPERM, f"{what} belongs to another user (uid {owner})")
    # `os.path.ismount` does not follow links. Only root can mount.
    if writable_by_all(path.parent) and not os.path.ismount(path):
        return private_directory(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()  # of what a link leads to
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})")
    # Volumes of pods are open to all, and there is no other user.
    if status.st_mode & stat.S_IWOTH and not os.path.ismount(os.path.realpath(path)):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(errno.EPERM, f"other users may write to it (mode {mode:o})")
    return path


def is_common(path: Path) -> bool:
    """Return whether `path` is the root directory or one where all users keep their temporary
    files."""
    common = ("/", "/tmp", "/var/tmp", str(_SHARED_MEMORY), tempfile.gettempdir())
    return os.path.realpath(path) in {os.path.realpath(one) for one in common}


def private_directory(path: Path) -> Path:
    """Make the directory `path` for this user alone, or check the existing one; return it.

    For predictable names in directories where every user may write. Raises PermissionError with the
    reason if it is a link, belongs to another user, or is writable by others; other OSErrors if it
    cannot be made.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
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


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk (fsync)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace the content of `path` atomically; with `sync`, it is on the disk when this returns.
    Raises OSError.

    The draft in the same directory has a random name and is never an existing file, so that nobody
    can plant a link in its place where every user may write.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        if sync:
            sync_file(draft)
        draft.replace(path)
        if sync:
            sync_directory(path.parent)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def strangers_part(path: Path) -> tuple[Path, int] | None:
    """Return the first part of `path` that belongs to another user, and the uid; None if there is
    none.

    This includes files, directories, mounts and links where every user may write, because their
    owner can redirect the path. Links are followed and their targets checked. Parts that do not
    exist yet have no owner. Raises OSError for a circle of links.
    """
    return _strangers_part(path.absolute(), _MOST_LINKS)


def _strangers_part(path: Path, links: int) -> tuple[Path, int] | None:
    if links == 0:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    for part in (*reversed(path.parents), path):
        try:
            status = part.lstat()
        except FileNotFoundError:
            return None
        if status.st_uid not in (0, os.geteuid()) and writable_by_all(part.parent):
            return part, status.st_uid
        if stat.S_ISLNK(status.st_mode):
            found = _strangers_part(part.parent / part.readlink(), links - 1)
            if found is not None:
                return found
    return None


def writable_by_all(directory: Path) -> bool:
    """Return whether every user of the host may write into `directory`."""
    try:
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def replaceable_part(path: Path) -> Path | None:
    """Return the first directory above `path` in which every user may rename and remove the entries
    of others, as its sticky bit is not set; None if there is none."""
    for part in reversed(Path(os.path.realpath(path)).parents):
        with contextlib.suppress(OSError):
            if part.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                return part
    return None


def private_cache(name: str) -> Path:
    """Return a directory for files that are trusted when they are found again: `name` among the
    temporary files if it is this user's alone, else one that ends with this process. Raises
    OSError."""
    root = Path(tempfile.gettempdir())
    try:
        return private_directory(root / name)
    except OSError as error:
        log.warning("%s is not used: %s", root / name, error.strerror)
        return Scratch(f"{name}-", root).path


class Scratch:
    """A directory of this process; directories that killed processes left under its `prefix` are
    removed.

    A process holds a lock on its directory, which the kernel frees however the process ends: unlike
    process ids, this also tells live owners in other containers from dead ones.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        """Make the directory below `root` (None: in host memory). Raises OSError."""
        root = root or memory_root()
        _sweep(root, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            # Another process may remove it before it is locked; if so, make another one.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.is_dir():
                    return
                os.close(self._lock)

    def close(self) -> None:
        """Remove the directory with its content. Idempotent."""
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
        # Removed meanwhile, another user's, or (BlockingIOError) in use.
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
                log.info("removed %s, left by a killed process", left)
            finally:
                os.close(descriptor)
