"""One stored state as one file: `magic | manifest length | manifest | tensors`.

One file, so that one rename makes all of it visible or none. Who reads it holds a shared lock for
as long as it has it mapped; a file that nobody has mapped and no key names may be used again.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from troupe.transfer.checksum import PIECE_BYTES, bytes_checksum, combine, dtype_name, host_bytes
from troupe.transfer.checksum import dtype_of as dtype_of
from troupe.transfer.deferred import DeferredBytes, DeferredTensors, deferred_bytes
from troupe.transfer.fitting import check_shards
from troupe.transfer.manifest import Entry, Manifest, Shard, version_in
from troupe.transfer.staging import DeviceBytes

# The last byte is the format's number: 2 has checksums by pieces, 3 one of the manifest.
MAGIC: Final = b"TROUPE\x00\x03"
# Tensors start on cache lines, which every dtype's alignment divides.
ALIGN: Final = 64
_MAX_MANIFEST_BYTES: Final = 256 << 20
# A file is locked against readers for the moment between its rename and its unlocking.
_LOCKED_SECONDS: Final = 5.0
_NO_CHECKSUM: Final = "0" * 32

# What a state is written from.
Bytes = memoryview | DeviceBytes | DeferredBytes


def draft(
    key: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    nesting: str = "",
    base: str = "",
    shards: Mapping[str, Shard] | None = None,
) -> tuple[Manifest, list[Bytes]]:
    """The manifest of `tensors` with empty checksums, as long as it will be with them, and their
    bytes in the manifest's order (by name). Deferred tensors are not made for it."""
    deferred = deferred_bytes(tensors) if isinstance(tensors, DeferredTensors) else {}
    layout = tensors.layout if isinstance(tensors, DeferredTensors) else tensors
    check_shards(layout, shards or {})
    entries: list[Entry] = []
    views: list[Bytes] = []
    offset = 0
    for name in sorted(layout):
        tensor = layout[name]
        view: Bytes
        if deferred:
            view = deferred[name]
        elif tensor.device.type == "cuda":
            view = DeviceBytes(tensor)
        else:
            view = host_bytes(tensor)
        shape = tuple(tensor.shape)
        count = -(-len(view) // PIECE_BYTES) if len(view) > PIECE_BYTES else 0
        pieces = (_NO_CHECKSUM,) * count
        shard = (shards or {}).get(name)
        entries.append(
            Entry(
                name,
                dtype_name(tensor.dtype),
                shape,
                offset,
                len(view),
                _NO_CHECKSUM,
                pieces,
                shard,
            )
        )
        views.append(view)
        offset = _aligned(offset + len(view))
    made = Manifest(
        key, version_in(key), _NO_CHECKSUM, tuple(entries), dict(metadata), nesting, base
    )
    return made, views


def signed(manifest: Manifest, checksums: list[tuple[str, tuple[str, ...]]]) -> Manifest:
    """A draft with the checksums of its tensors and their pieces."""
    entries = tuple(
        replace(entry, checksum=checksum, pieces=pieces)
        for entry, (checksum, pieces) in zip(manifest.entries, checksums, strict=True)
    )
    parts = {e.name: (e.dtype, e.shape, e.checksum) for e in entries}
    return replace(manifest, checksum=combine(parts, manifest.nesting), entries=entries)


def prefix(manifest: Manifest) -> bytes:
    """All of a file before its tensors."""
    header = manifest.to_json()
    start = _aligned(len(MAGIC) + 8 + len(header))
    return (MAGIC + len(header).to_bytes(8, "little") + header).ljust(start, b"\0")


def read_manifest(path: Path) -> Manifest:
    """The manifest alone. FileNotFoundError, or ValueError when the file is damaged."""
    with leased(path) as file:
        return _read_header(file)[0]


def read(path: Path) -> tuple[Manifest, dict[str, torch.Tensor], tuple[int, int]]:
    """Map `path`: manifest, tensors over the mapping (no copy), and the file's identity.

    The mapping is copy-on-write: writing to a tensor changes neither the file nor what
    other readers see, and the file may be deleted or replaced meanwhile.
    FileNotFoundError, or ValueError when the file is damaged. Bytes are not verified.
    """
    manifest, mapping, start, status = _map(path)
    tensors = {entry.name: view(mapping, start, entry) for entry in manifest.entries}
    return manifest, tensors, identity_in(status)


def read_bytes(path: Path) -> tuple[Manifest, memoryview]:
    """Map `path` like `read`: manifest and the whole data section as bytes."""
    manifest, mapping, start, _ = _map(path)
    return manifest, memoryview(mapping)[start : start + manifest.end]


def damaged(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether `tensor` does not hold the bytes that were set."""
    return bytes_checksum(host_bytes(tensor)) != entry.checksum


def identity(path: Path) -> tuple[int, int]:
    """Changes whenever the file under `path` is another one, or was written to or renamed."""
    return identity_in(path.stat())


def identity_in(status: os.stat_result) -> tuple[int, int]:
    """`identity` of a file that is open."""
    return status.st_ino, status.st_ctime_ns


def leased(path: Path) -> io.BufferedReader:
    """The file under `path`, which nobody uses again while it, or a mapping of it, is open.

    Raises FileNotFoundError, or ValueError for one that stays locked.
    """
    deadline = time.monotonic() + _LOCKED_SECONDS
    while True:
        file = open(path, "rb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise ValueError(f"locked for {_LOCKED_SECONDS:g} s") from None
            time.sleep(0.001)
        except BaseException:
            file.close()
            raise
        file.close()


def opened(path: Path) -> tuple[Manifest, int, io.BufferedReader]:
    """Manifest, where the tensors begin, and the file, leased while it is open.

    Raises what `leased` does; ValueError also when the file is damaged.
    """
    file = leased(path)
    try:
        manifest, start = _read_header(file)
        size = os.fstat(file.fileno()).st_size
        if size != start + manifest.end:
            raise ValueError(f"{size} bytes long instead of {start + manifest.end}")
    except BaseException:
        file.close()
        raise
    return manifest, start, file


def _map(path: Path) -> tuple[Manifest, mmap.mmap, int, os.stat_result]:
    manifest, start, file = opened(path)
    with file:
        # The mapping keeps a duplicate of the descriptor, and with it the lease.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return manifest, mapping, start, os.fstat(file.fileno())


def _read_header(file: io.BufferedReader) -> tuple[Manifest, int]:
    prefix = file.read(len(MAGIC) + 8)
    if len(prefix) < len(MAGIC) + 8 or not prefix.startswith(MAGIC[:-1]):
        raise ValueError("not a state file")
    if not prefix.startswith(MAGIC):
        raise ValueError(
            f"written in format {prefix[len(MAGIC) - 1]} by another version of Troupe, this one "
            f"reads format {MAGIC[-1]}"
        )
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if length > _MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {length} bytes is longer than allowed")
    return Manifest.from_json(file.read(length)), _aligned(len(prefix) + length)


def view(mapping: Any, start: int, entry: Entry) -> torch.Tensor:
    """One tensor over the bytes of a file, whose tensors begin at `start`."""
    dtype = dtype_of(entry.dtype)
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.nbytes // dtype.itemsize
    flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + entry.offset)
    return flat.reshape(entry.shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
