"""Copying of folders between services without a shared disk, as streams of chunks.

A chunk is a message with `path`, `data`, `end_of_file`, and `checksum`: the xxh3-64 of the whole
file in its last chunk, else 0.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

import xxhash

from troupe.disks import sync_directory
from troupe.rpc import DataLoss

T = TypeVar("T")
_CHUNK_BYTES: Final = 1 << 20


async def read_folder(root: Path, message: type[T]) -> AsyncIterator[T]:
    """Stream all files below `root`, in order of name, as chunks of the type `message`.

    Raises FileNotFoundError if a file is removed meanwhile.
    """
    make: Callable[..., T] = message
    for path in await asyncio.to_thread(files_below, root):
        name = path.relative_to(root).as_posix()
        digest = xxhash.xxh3_64()
        with await asyncio.to_thread(path.open, "rb") as file:
            data = await asyncio.to_thread(file.read, _CHUNK_BYTES)
            last = False
            while not last:
                following = await asyncio.to_thread(file.read, _CHUNK_BYTES)
                last = not following
                digest.update(data)
                checksum = digest.intdigest() if last else 0
                yield make(path=name, data=data, end_of_file=last, checksum=checksum)
                data = following


async def write_folder(target: Path, chunks: AsyncIterable[Any]) -> int:
    """Write the chunks of `read_folder` atomically to the folder `target`, and return their bytes.

    An existing folder is left as it is. Raises DataLoss for a damaged file or a name that leads out
    of the folder, and OSError.
    """
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    size = 0
    try:
        await asyncio.to_thread(draft.mkdir, parents=True)
        complete, digest = True, xxhash.xxh3_64()
        async for chunk in chunks:
            if complete:
                digest = xxhash.xxh3_64()
            name = PurePosixPath(chunk.path)
            if name.is_absolute() or ".." in name.parts:
                raise DataLoss(f"'{chunk.path}' leads out of the folder", kind="folder_corrupt")
            digest.update(chunk.data)
            size += len(chunk.data)
            await asyncio.to_thread(_append, draft / name, chunk.data, chunk.end_of_file)
            complete = chunk.end_of_file
            if complete and digest.intdigest() != chunk.checksum:
                raise DataLoss(f"'{chunk.path}' arrived damaged", kind="folder_corrupt")
        if not complete:
            raise DataLoss("the last file is incomplete", kind="folder_corrupt")
        await asyncio.to_thread(_publish, draft, target)
    finally:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    return size


def files_below(root: Path) -> list[Path]:
    """Return all files below `root`, sorted."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def _append(path: Path, data: bytes, last: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)
        if last:
            file.flush()
            os.fsync(file.fileno())


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # else another process has published it first
            raise
    sync_directory(target.parent)
