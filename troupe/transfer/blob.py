"""One stored state as one file: `magic | manifest length | manifest | tensors`.

One file, so that one rename makes all of it visible or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from troupe.transfer.checksum import bytes_checksum, combine, dtype_name, dtype_of, host_bytes
from troupe.transfer.manifest import Entry, Manifest, version_in

MAGIC = b"TROUPE\x00\x01"
# Tensors start on cache lines, which every dtype's alignment divides.
ALIGN = 64
# Nobody takes longer than this between creating a temporary file and locking it.
_TEMP_GRACE_SECONDS = 60.0
_MAX_MANIFEST_BYTES = 64 << 20


def layout(
    key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[Manifest, list[memoryview]]:
    """The manifest of `tensors` and their bytes, in the manifest's order (by name)."""
    entries: list[Entry] = []
    views: list[memoryview] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        view = host_bytes(tensor)
        shape = tuple(tensor.shape)
        entries.append(
            Entry(name, dtype_name(tensor.dtype), shape, offset, len(view), bytes_checksum(view))
        )
        views.append(view)
        offset = _aligned(offset + len(view))
    checksum = combine({e.name: (e.dtype, e.shape, e.checksum) for e in entries})
    return Manifest(key, version_in(key), checksum, tuple(entries), dict(metadata)), views


def prefix(manifest: Manifest) -> bytes:
    """All of a file before its tensors."""
    header = manifest.to_json()
    start = _aligned(len(MAGIC) + 8 + len(header))
    return (MAGIC + len(header).to_bytes(8, "little") + header).ljust(start, b"\0")


def write(path: Path, manifest: Manifest, views: list[memoryview]) -> None:
    """Write under a temporary name, then rename to `path`. OSError leaves `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    head = prefix(manifest)
    try:
        # write(2), not a store through a mapping: on a full tmpfs the former is an error,
        # the latter kills the process.
        with open(temp, "xb", buffering=0) as file:
            # Held while the writer lives: `sweep` tells a dead writer's file by it.
            fcntl.flock(file, fcntl.LOCK_EX)
            start = len(head)
            _write_all(file, memoryview(head))
            for entry, view in zip(manifest.entries, views, strict=True):
                file.seek(start + entry.offset)
                _write_all(file, view)
            # A last tensor without bytes would leave the file short.
            file.truncate(start + manifest.end)
            temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def read_manifest(path: Path) -> Manifest:
    """The manifest alone. FileNotFoundError, or ValueError when the file is damaged."""
    with open(path, "rb") as file:
        return _read_header(file)[0]


def read(path: Path) -> tuple[Manifest, dict[str, torch.Tensor], tuple[int, int]]:
    """Map `path`: manifest, tensors over the mapping (no copy), and the file's identity.

    The mapping is copy-on-write: writing to a tensor changes neither the file nor what
    other readers see, and the file may be deleted or replaced meanwhile.
    FileNotFoundError, or ValueError when the file is damaged. Bytes are not verified.
    """
    manifest, mapping, start, status = _map(path)
    tensors = {entry.name: _view(mapping, start, entry) for entry in manifest.entries}
    return manifest, tensors, (status.st_ino, status.st_mtime_ns)


def read_bytes(path: Path) -> tuple[Manifest, memoryview]:
    """Map `path` like `read`: manifest and the whole data section as bytes."""
    manifest, mapping, start, _ = _map(path)
    return manifest, memoryview(mapping)[start:]


def damaged(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Iterator[str | None]:
    """Check one tensor per iteration: its name if its bytes are not those set, else None."""
    for entry in manifest.entries:
        ok = bytes_checksum(host_bytes(tensors[entry.name])) == entry.checksum
        yield None if ok else entry.name


def identity(path: Path) -> tuple[int, int]:
    """Changes whenever the file under `path` is another one."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def sweep(directory: Path) -> None:
    """Remove what writers that died half way left in `directory`."""
    for temp in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - temp.stat().st_mtime < _TEMP_GRACE_SECONDS:
                continue
            with open(temp, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temp.unlink()


def _map(path: Path) -> tuple[Manifest, mmap.mmap, int, os.stat_result]:
    with open(path, "rb") as file:
        manifest, start = _read_header(file)
        status = os.fstat(file.fileno())
        if status.st_size != start + manifest.end:
            raise ValueError(f"{status.st_size} bytes long instead of {start + manifest.end}")
        return manifest, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), start, status


def _read_header(file: io.BufferedReader) -> tuple[Manifest, int]:
    prefix = file.read(len(MAGIC) + 8)
    if len(prefix) < len(MAGIC) + 8 or not prefix.startswith(MAGIC):
        raise ValueError("not a state file")
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if length > _MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {length} bytes is longer than allowed")
    return Manifest.from_json(file.read(length)), _aligned(len(prefix) + length)


def _view(mapping: mmap.mmap, start: int, entry: Entry) -> torch.Tensor:
    dtype = dtype_of(entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + entry.offset)
    return flat.reshape(entry.shape)


def _write_all(file: io.FileIO, view: memoryview) -> None:
    # An unbuffered write moves at most 2 GiB and may stop early.
    while len(view):
        view = view[file.write(view) :]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
