"""`Room`: the file of a state while it is filled, invisible until all of it is there."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from troupe.transfer import blob
from troupe.transfer.blob import Bytes
from troupe.transfer.checksum import PIECE_BYTES, whole
from troupe.transfer.errors import InvalidKey
from troupe.transfer.manifest import Manifest
from troupe.transfer.spares import Spare, Spares
from troupe.transfer.staging import each, threads_for

# Nobody takes longer than this between creating a temporary file and locking it.
_TEMP_GRACE_SECONDS = 60.0
# What a dead process had fetched of a state serves whoever goes on with it, for so long.
_PART_GRACE_SECONDS = 600.0
# Hashed and copied at once by a lone thread: small enough to be in the cache the second time.
# (Several would wait for the interpreter's lock at each.)
_BLOCK_BYTES: Final = 512 << 10
_TRIES: Final = 100


class Room:
    """Take one, fill it, then `show` or `abandon` it. A context manager abandons it at its end."""

    def __init__(self, path: Path, nbytes: int, spares: Spares | None, *, name: str = "") -> None:
        """Room for a file of `nbytes` that will be at `path`: one that was used before, else a new
        and empty one. `name`: of the file until then; one of that name and size that a process
        left half filled is gone on with (`resumed`). Raises OSError; InvalidKey where another
        state is in the way."""
        self.path, self.nbytes, self._spares = path, nbytes, spares
        self.temp = path.parent / (name or f".{path.name}.{secrets.token_hex(8)}.tmp")
        self._data: memoryview | None = None
        self._spare: Spare | None = None
        self._shown = self.resumed = False
        self.file: BinaryIO
        for last in (*[False] * _TRIES, True):
            try:
                make_directory(path)
                self._open(resume=bool(name))
                break
            except (FileNotFoundError, FileExistsError):
                # Who deleted the last state beside it took the directory, too.
                if last:
                    raise

    def _open(self, *, resume: bool) -> None:
        if resume and (left := _left(self.temp, self.nbytes)) is not None:
            self.file, self.resumed = left, True
            return
        self._spare = self._spares.take(self.nbytes) if self._spares else None
        if self._spare is not None:
            try:
                self._data = self._spare.map(self.nbytes)
                os.link(self._spare.link, self.temp)
            except BaseException:
                self._data = None
                self._spare.close()
                raise
            self.file = self._spare.file
            return
        self.file = open(self.temp, "x+b", buffering=0)  # noqa: SIM115
        # Held while the writer lives: `sweep` tells a dead writer's file by it.
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    @property
    def mapped(self) -> memoryview:
        """All of the file as writable memory. Raises OSError when there is no room."""
        if self._data is None:
            # A store through a mapping without room behind it would kill the process.
            os.posix_fallocate(self.file.fileno(), 0, self.nbytes)
            self._data = memoryview(mmap.mmap(self.file.fileno(), self.nbytes))
        return self._data[: self.nbytes]

    def write(self, offset: int, block: memoryview) -> None:
        """Copy `block` to `offset`. Raises OSError when there is no room."""
        if self._data is not None:
            # (An assignment to the memoryview would hold the interpreter's lock.)
            np.copyto(np.frombuffer(self._data[offset : offset + len(block)], np.uint8), block)
            return
        # write(2), not a store through a mapping: on a full tmpfs the former is an error,
        # the latter kills the process.
        _write_all(self.file.fileno(), block, offset)

    def show(self) -> None:
        """Give it its key's name: all of it appears at once, in place of what was there."""
        # A last tensor without bytes would leave it short, a spare may be too long.
        self.file.truncate(self.nbytes)
        if self._spare is None and self._spares is not None:
            self._spare = self._spares.keep(self.file, self.temp, self.nbytes)
            if self._spare is not None and self._data is not None:
                self._spare.mapping = self._data.obj  # type: ignore[assignment]
        self.temp.replace(self.path)
        self._shown = True
        # From now on readers may lock it.
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self._data = None
        if self._spare is None or self._spares is None:
            self.file.close()
        else:
            self._spares.put(self._spare)

    def abandon(self, *, keep_file: bool = False) -> None:
        """Give the room back, unless it is shown. `keep_file`: somebody may go on with it."""
        if self._shown:
            return
        self._shown = True
        if not keep_file:
            with contextlib.suppress(FileNotFoundError):
                self.temp.unlink()
        self._data = None
        if self._spare is not None:
            self._spare.close()
        else:
            self.file.close()


def write(
    path: Path,
    manifest: Manifest,
    views: Sequence[Bytes],
    spares: Spares | None = None,
) -> Manifest:
    """Hash and copy `views` into a file at `path`, in one pass; the manifest with the checksums.

    OSError leaves `path` as it was.
    """
    start = len(blob.prefix(manifest))
    with Room(path, start + manifest.end, spares) as room:
        # Piece by piece, several at once where this process may use several threads.
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
        room.show()
    return manifest


def sweep(directory: Path) -> None:
    """Remove what writers and readers that died half way left in `directory`."""
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
    """The one that `path` is in. Raises InvalidKey where another state is in the way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError):
        if not any(parent.is_file() for parent in path.parents):
            raise
        raise InvalidKey(str(path), "lies under another state") from None
    if path.is_dir():
        raise InvalidKey(str(path), "is where other states lie")


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
        # Somebody else's, or of no use.
        temp.unlink(missing_ok=True)
        return None


def _copy(room: Room, size: int, offset: int, view: Bytes, start: int) -> str:
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
