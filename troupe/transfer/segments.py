"""The segment store of a host: one file per state, in shared memory or on disk, by key.

`SegmentWriter` fills a file that becomes visible all at once, `SegmentStore` finds, lists, verifies
and deletes them, `Mappings` keeps read-only mappings of them open. Other processes of the host use
the same directories; they coordinate through file locks and marks next to a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import numpy as np
import xxhash

from troupe.disks import own_directory
from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.transfer import blob
from troupe.transfer.arguments import SEGMENT, check_key, why_no_key
from troupe.transfer.blob import Bytes, Manifest, MappedState, TensorEntry, stem_of, version_in
from troupe.transfer.checksum import PIECE_BYTES, whole
from troupe.transfer.errors import Corrupt, InvalidKey, KeyNotFound, TransferTimeout
from troupe.transfer.segment_pool import PooledSegment, SegmentPool
from troupe.transfer.staging import each, threads_for

T = TypeVar("T")

# The longest time between creating a temporary file and locking it.
_TEMP_GRACE_SECONDS = 60.0
# How long a dead process's partially fetched state is kept for continuation.
_PART_GRACE_SECONDS = 600.0
# Bytes hashed and copied at a time by a single thread: small enough to be in the cache the second
# time. (Several threads would wait for the interpreter's lock at each block.)
_BLOCK_BYTES: Final = 512 << 10
_TRIES: Final = 100


class SegmentWriter:
    """A file that is filled, then published or abandoned. Use it as a context manager."""

    def __init__(
        self, path: Path, nbytes: int, pool: SegmentPool | None, *, name: str = ""
    ) -> None:
        """Open a file of `nbytes` that will be at `path`: one of `pool`, else a new and empty one.

        `name`: name of the file until it is published; a half-filled file of that name and size is
        continued (`resumed`). Raises OSError, and InvalidKey if the path lies under another state
        or is a directory of states.
        """
        self.path, self.nbytes, self._pool = path, nbytes, pool
        self.temp = path.parent / (name or f".{path.name}.{secrets.token_hex(8)}.tmp")
        self._data: memoryview | None = None
        self._pooled: PooledSegment | None = None
        self._published = self.resumed = False
        self.file: BinaryIO
        for last in (*[False] * _TRIES, True):
            try:
                make_directory(path)
                self._open(resume=bool(name))
                break
            except (FileNotFoundError, FileExistsError):
                # The directory disappears with its last state, which another process deleted.
                if last:
                    raise

    def _open(self, *, resume: bool) -> None:
        if resume and (left := _left(self.temp, self.nbytes)) is not None:
            self.file, self.resumed = left, True
            return
        self._pooled = self._pool.take(self.nbytes) if self._pool else None
        if self._pooled is not None:
            try:
                self._data = self._pooled.map(self.nbytes)
                os.link(self._pooled.link, self.temp)
            except BaseException:
                self._data = None
                self._pooled.close()
                raise
            self.file = self._pooled.file
            return
        self.file = open(self.temp, "x+b", buffering=0)  # noqa: SIM115
        # Held while the writer lives; it tells `sweep` whether the writer is dead.
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    @property
    def mapped(self) -> memoryview:
        """The whole file as writable memory. Raises OSError if there is no room."""
        if self._data is None:
            # A store through a mapping without room behind it would kill the process.
            os.posix_fallocate(self.file.fileno(), 0, self.nbytes)
            self._data = memoryview(mmap.mmap(self.file.fileno(), self.nbytes))
        return self._data[: self.nbytes]

    def write(self, offset: int, block: memoryview) -> None:
        """Copy `block` to `offset`. Raises OSError when there is no room."""
        if self._data is not None:
            # (Assigning to the memoryview would hold the interpreter's lock.)
            np.copyto(np.frombuffer(self._data[offset : offset + len(block)], np.uint8), block)
            return
        # write(2) instead of writing through a mapping: on a full tmpfs the former is an error, but
        # the latter kills the process.
        _write_all(self.file.fileno(), block, offset)

    def publish(self) -> None:
        """Rename it to its path, so that all of it appears at once and replaces the former file."""
        # A last tensor without bytes would leave it too short, and a pooled file may be too long.
        self.file.truncate(self.nbytes)
        # A file filled through a mapping has the times of its former content (`blob.identity`).
        now = time.time_ns()
        os.utime(self.file.fileno(), ns=(now, now))
        if self._pooled is None and self._pool is not None:
            self._pooled = self._pool.keep(self.file, self.temp, self.nbytes)
            if self._pooled is not None and self._data is not None:
                self._pooled.mapping = self._data.obj  # type: ignore[assignment]
        self.temp.replace(self.path)
        self._published = True
        # From now on readers may lock it.
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self._data = None
        if self._pooled is None or self._pool is None:
            self.file.close()
        else:
            self._pool.put(self._pooled)

    def abandon(self, *, keep_file: bool = False) -> None:
        """Free the room, unless the file is published. `keep_file`: another process may continue
        it."""
        if self._published:
            return
        self._published = True
        if not keep_file:
            with contextlib.suppress(FileNotFoundError):
                self.temp.unlink()
        self._data = None
        if self._pooled is not None:
            self._pooled.close()
        else:
            self.file.close()


def write(
    path: Path,
    manifest: Manifest,
    views: Sequence[Bytes],
    pool: SegmentPool | None = None,
) -> Manifest:
    """Hash and copy `views` into a file at `path` in one pass, and return the manifest with the
    checksums.

    After an OSError, `path` is unchanged.
    """
    start = len(blob.prefix(manifest))
    with SegmentWriter(path, start + manifest.end, pool) as room:
        # Piece by piece, several concurrently if this process may use several threads.
        jobs = [
            (start + entry.offset, view, at)
            for entry, view in zip(manifest.entries, views, strict=True)
            for at in range(0, max(len(view), 1), PIECE_BYTES)
        ]
        device = any(not isinstance(view, memoryview) and view.on_device for view in views)
        threads = threads_for(manifest.end, device=device)
        block = _BLOCK_BYTES if threads == 1 else PIECE_BYTES
        found = each(lambda job: _copy(room, block, *job), jobs, threads)
        checksums, at = [], 0
        for entry in manifest.entries:
            count = max(len(entry.pieces), 1)
            pieces = tuple(found[at : at + count])
            checksums.append((pieces[0], ()) if count == 1 else (whole(pieces), pieces))
            at += count
        manifest = blob.signed(manifest, checksums)
        room.write(0, memoryview(blob.prefix(manifest)))
        room.publish()
    return manifest


def sweep(directory: Path) -> None:
    """Remove half-filled files in `directory` whose writers or fetching processes died."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    graces = {".tmp": _TEMP_GRACE_SECONDS, ".part": _PART_GRACE_SECONDS}
    for temp in (directory / name for name in names if name.startswith(".")):
        if temp.suffix not in graces:
            continue
        with contextlib.suppress(OSError):
            if time.time() - temp.stat().st_mtime < graces[temp.suffix]:
                continue
            with open(temp, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temp.unlink()


def make_directory(path: Path) -> None:
    """Make the directory of `path`. Raises InvalidKey if another state is in the way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError):
        if not any(parent.is_file() for parent in path.parents):
            raise
        raise InvalidKey(str(path), "lies under another state") from None
    if path.is_dir():
        raise InvalidKey(str(path), "is a directory of other states")


def _left(temp: Path, nbytes: int) -> BinaryIO | None:
    try:
        file = open(temp, "r+b", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size == nbytes:
                stack.pop_all()
                return file
        # Locked by another process, or of another size.
        temp.unlink(missing_ok=True)
        return None


def _copy(room: SegmentWriter, size: int, offset: int, view: Bytes, start: int) -> str:
    piece, offset = view[start : start + PIECE_BYTES], offset + start
    digest = xxhash.xxh3_128()
    for at in range(0, len(piece), size):
        block = piece[at : at + size]
        digest.update(block)
        room.write(offset + at, block)
    return digest.hexdigest()


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    # A write moves at most 2 GiB and may stop early.
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


# Seconds between two attempts to get a lock, at first and at most: its holder may need a
# millisecond or minutes.
_SIDECAR_POLL_SECONDS = (0.0005, 0.005)


def mark(path: Path, kind: str, text: str = "", *, identity: tuple[int, int] | None = None) -> None:
    """Mark the file at `path` as "verified", "fetched" (`text`: the source's address) or "damaged":
    the current file, or the one with `identity`."""
    with contextlib.suppress(OSError):
        inode, changed = identity or blob.identity(path)
        temp = path.parent / f".{path.name}.{kind}.{os.getpid()}.{threading.get_ident()}.tmp"
        temp.write_text(f"{inode} {changed} {text}")
        temp.replace(_sidecar(path, kind))


def note(path: Path, kind: str, identity: tuple[int, int] | None = None) -> str | None:
    """Return the text of a mark of the file at `path` (with this `identity`); None if there is
    none."""
    try:
        inode, changed, text = _sidecar(path, kind).read_text().split(" ", 2)
        same = (int(inode), int(changed)) == (identity or blob.identity(path))
    except (OSError, ValueError):
        return None
    return text if same else None


def clear(path: Path) -> None:
    """Remove all marks of `path`."""
    for kind in ("verified", "fetched", "damaged"):
        _sidecar(path, kind).unlink(missing_ok=True)


@contextlib.contextmanager
def alone(
    path: Path, deadline: float, *, unless: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Hold a lock on `path`, which only one thread on this host can hold at a time; yield True.

    Yield False, without the lock, once `unless()` shows that the protected work is done. Raises
    TimeoutError at `deadline` (on the monotonic clock), and InvalidKey if no state can be at
    `path`. The death of a process frees its lock.
    """
    lock = _sidecar(path, "lock")
    file = _locked(path, lock, deadline, unless)
    if file is None:
        yield False
        return
    try:
        yield not unless()
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def busy(path: Path) -> bool:
    """Return whether some thread or process seems to hold the lock of `path` (`alone`)."""
    return _sidecar(path, "lock").exists()


def _locked(path: Path, lock: Path, deadline: float, unless: Callable[[], bool]) -> BinaryIO | None:
    pause, most = _SIDECAR_POLL_SECONDS
    while not unless():
        make_directory(path)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(open(lock, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have removed it between our opening and locking.
                if os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
                    stack.pop_all()
                    return file
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process is working on {lock.name}") from None
                time.sleep(pause)
                pause = min(2 * pause, most)
    return None


def _sidecar(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}"


# Two versions each of a few policies.
_MOST_KEPT: Final = 16
_IDLE_SECONDS: Final = 120.0


@dataclass(eq=False)
class Lease:
    """The data section of a state, whose file is not refilled while this is referenced."""

    data: memoryview
    file: BinaryIO

    def __del__(self) -> None:
        self.file.close()


@dataclass
class _Kept:
    mapping: mmap.mmap
    # Opened separately from any lease: a mapping keeps its file open and locked.
    file: BinaryIO
    used: float


class _Leased(np.ndarray):  # type: ignore[type-arg]
    """Bytes that keep their lease; tensors over them keep these bytes."""

    lease: Lease


class Mappings:
    """Copy-on-write mappings of states, which stay open between reads, by file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], _Kept] = OrderedDict()

    def lease(self, opened: tuple[Manifest, int, BinaryIO]) -> tuple[Manifest, Lease]:
        """Return the unverified state in an open file (`Transfer.opened`)."""
        manifest, start, file = opened
        try:
            mapping = self._mapping(file)
        except BaseException:
            file.close()
            raise
        return manifest, Lease(memoryview(mapping)[start : start + manifest.end], file)

    def read(self, path: Path) -> MappedState:
        """Do `blob.read` through a mapping that stays open, whose tensors must not be written
        to."""
        self.sweep()
        manifest, lease = self.lease(blob.opened(path))
        data = np.frombuffer(lease.data, np.uint8).view(_Leased)
        data.lease = lease
        return MappedState(manifest, data, blob.identity_in(os.fstat(lease.file.fileno())))

    def sweep(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        """Close files that were deleted or not read for `idle_seconds`."""
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
                        # Replaced meanwhile: no other reader can use this mapping.
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


# States of at least this size are verified once per host; its other processes trust the mark.
_MARKED_BYTES = 1 << 20
# The longest time that one process verifies while others wait.
_ALONE_SECONDS = 600.0
_UNUSABLE = "transfer_root_unusable"
_ELSEWHERE = "Set TROUPE_TRANSFER_DIR to a directory that this user may write to."


class SegmentStore:
    """The states under `roots`, of which the first is preferred. Other processes use them too."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Create missing `roots`. Raises InvalidArgument if one cannot be created, or if another
        user may have created it or may redirect it."""
        self.roots = tuple(Path(root).absolute() for root in roots)
        for root in self.roots:
            try:
                own_directory(root)
            except OSError as error:
                raise InvalidArgument(
                    f"this directory cannot be used: {error.strerror}",
                    kind=_UNUSABLE,
                    field="root",
                    value=root,
                    remedy=_ELSEWHERE,
                ) from error
        self.pools = {root: SegmentPool(root) for root in self.roots}

    def paths(self, key: str) -> list[Path]:
        """Return the possible paths of `key`. Raises InvalidKey."""
        check_key(key)
        return [root / key for root in self.roots]

    def path(self, key: str) -> Path:
        """Return the path of `key`. Raises InvalidKey, KeyNotFound."""
        for path in self.paths(key):
            if path.is_file():
                return path
        raise KeyNotFound(key, f"nothing is stored under it in {self.roots[0]}")

    def holds(self, key: str, checksum: str | None = None) -> bool:
        """Return whether a state (with this checksum) is stored under `key`."""
        if checksum is None:
            return any(path.is_file() for path in self.paths(key))
        try:
            return self.manifest(key).checksum == checksum and not self.damaged(key)
        except (KeyNotFound, Corrupt):
            return False

    def damaged(self, key: str) -> bool:
        """Return whether the state under `key` was found damaged and not replaced since."""
        return any(note(path, "damaged") is not None for path in self.paths(key))

    def manifest(self, key: str) -> Manifest:
        """Return the manifest stored under `key`, without tensors. Raises KeyNotFound, Corrupt."""
        return self._read(key, blob.read_manifest)

    def opened(self, key: str) -> tuple[Manifest, int, BinaryIO]:
        """Return manifest, start of the tensors, and the file of `key`, which is not refilled while
        it is open. Raises KeyNotFound, Corrupt."""
        return self._read(key, blob.opened)

    def bytes(self, key: str) -> tuple[Manifest, memoryview]:
        """Return manifest and mapped, unverified data section of `key`. Raises KeyNotFound,
        Corrupt."""
        state = self._read(key, blob.read)
        return state.manifest, state.data

    def _read(self, key: str, read: Callable[[Path], T]) -> T:
        try:
            return read(self.path(key))
        except FileNotFoundError:
            raise KeyNotFound(key, "deleted while being read") from None
        except ValueError as error:
            raise Corrupt(key, str(error)) from error

    def delete(self, key: str) -> bool:
        """Delete `key`; return False if there was none. Processes that have it mapped keep it."""
        existed = False
        for root, path in zip(self.roots, self.paths(key), strict=True):
            if not path.is_file():
                continue
            clear(path)
            try:
                path.unlink()
                existed = True
            except FileNotFoundError:
                continue
            for parent in path.parents:
                if parent == root:
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break
            self.pools[root].trim()
        return existed

    def keys(self, prefix: str = "") -> list[str]:
        """Return all keys that start with `prefix`, sorted; files whose names are not keys are left
        out.

        Raises InvalidKey for a prefix that is not text."""
        if not isinstance(prefix, str):
            raise InvalidKey(str(prefix), "is not a possible beginning of keys")
        found: set[str] = set()
        # Only their common directory, not every job's.
        *directory, _ = prefix.split("/")
        if not all(SEGMENT.fullmatch(segment) for segment in directory):
            return []  # no key starts with it, and it may lead outside
        for root in self.roots:
            # (`rglob` fails if a directory disappears meanwhile, with its last state.)
            for place, below, names in os.walk(root.joinpath(*directory)):
                below[:] = filter(SEGMENT.fullmatch, below)
                names = list(filter(SEGMENT.fullmatch, names))
                keys = (Path(place, name).relative_to(root).as_posix() for name in names)
                found.update(k for k in keys if k.startswith(prefix) and not why_no_key(k))
        return sorted(found)

    def fetched(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield keys whose content came from another host, and the address of that host."""
        for key in self.keys(prefix):
            for path in self.paths(key):
                if (address := note(path, "fetched")) is not None:
                    yield key, address
                    break

    def older(self, key: str) -> list[str]:
        """Return the versions before `key` that came from other hosts."""
        stem, version = stem_of(key), version_in(key)
        fetched = (other for other, _ in self.fetched(f"{stem}@"))
        return [other for other in fetched if 0 <= version_in(other) < version]

    def sweep(self) -> None:
        """Remove half-written files and unused pooled files."""
        for root in self.roots:
            for place, below, _ in os.walk(root):
                below[:] = [name for name in below if not name.startswith(".")]
                sweep(Path(place))
            self.pools[root].sweep()

    def verify(self, path: Path, state: MappedState, deadline: float | None) -> None:
        """Check that `state`, mapped from the file at `path`, has its original content.

        Large states are verified once per host, until they are written to; a second process waits
        for the first. Raises Corrupt, TransferTimeout.
        """
        if state.manifest.num_bytes < _MARKED_BYTES:
            _verify(state, deadline)
            return

        def verified() -> bool:
            # (A fetched state was verified as it arrived.)
            kinds = ("verified", "fetched")
            return any(note(path, kind, state.identity) is not None for kind in kinds)

        until = time.monotonic() + _ALONE_SECONDS if deadline is None else deadline
        try:
            with alone(path, until, unless=verified) as first:
                if first:
                    _verify(state, deadline)
                    mark(path, "verified", identity=state.identity)
        except TimeoutError as error:
            raise TransferTimeout(state.manifest.key, f"not verified in time: {error}") from None


def unusable(root: Path, error: OSError) -> FailedPrecondition:
    """Return the error of a `root` that is no longer writable."""
    return FailedPrecondition(
        f"it cannot be written to: {error.strerror}",
        kind=_UNUSABLE,
        field="root",
        value=root,
        remedy=_ELSEWHERE,
    )


def _verify(state: MappedState, deadline: float | None) -> None:
    manifest, key = state.manifest, state.manifest.key

    def check(entry: TensorEntry) -> None:
        if blob.damaged(entry, state.data):
            raise Corrupt(key, f"the bytes of '{entry.name}' do not match their checksum")
        if deadline is not None and time.monotonic() > deadline:
            raise TransferTimeout(key, "not verified in time")

    each(check, manifest.entries, threads_for(manifest.num_bytes, device=False))
