"""Receives the files of a checkpoint: whole and verified, or not at all."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

import xxhash

from troupe.checkpoints.verifying import verify
from troupe.rpc.errors import DataLoss, DeadlineExceeded, FailedPrecondition, NotFound
from troupe.v1 import orchestrator_pb2 as pb

T = TypeVar("T")
# The longest silence between two chunks.
CHUNK_SECONDS = 60.0


async def receive(chunks: AsyncIterable[pb.ExportCheckpointResponse], to: str | Path) -> Path:
    """Write the streamed files into the directory `to` and return it.

    `to` must not exist or be empty. The files appear there only when all have arrived and their
    checksums are right. Raises `FailedPrecondition`, `DataLoss`, `DeadlineExceeded`, or what the
    stream raises.
    """
    to = target_path(to)
    scratch = scratch_beside(to)
    try:
        await _receive_into(chunks, scratch)
        await asyncio.to_thread(verify, scratch, called="that the cluster sent")
        publish(scratch, to)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        raise
    return to


def target_path(to: str | Path) -> Path:
    """`to` as an absolute path."""
    return Path(to).expanduser().absolute()


def scratch_beside(to: Path) -> Path:
    """A new directory on the disk of `to`, to be renamed to it. Raises `FailedPrecondition` when
    `to` is taken or its place cannot be written to."""
    require_vacant(to)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    except OSError as error:
        raise FailedPrecondition(
            f"nothing can be written there: {error.strerror}.",
            kind="target_not_writable",
            field="to",
            value=to,
            remedy="Choose another directory.",
        ) from error


def publish(scratch: Path, to: Path) -> None:
    """Make what `scratch_beside` gave, filled, the directory `to`."""
    # mkdtemp's directory is closed to others; a checkpoint is for whoever may read `to`.
    scratch.chmod(0o755)
    scratch.replace(to)


def require_vacant(to: Path) -> None:
    """Raise `FailedPrecondition` unless `to` is free to be written."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FailedPrecondition(
            "the target exists and is not empty.",
            field="to",
            value=to,
            remedy="Choose a directory that does not exist yet, or remove this one.",
        )


async def _receive_into(
    chunks: AsyncIterable[pb.ExportCheckpointResponse], directory: Path
) -> None:
    file: BinaryIO | None = None
    name, digest, files = "", xxhash.xxh3_64(), 0
    try:
        async for chunk in _bounded(chunks, CHUNK_SECONDS):
            if file is None:
                name, digest = chunk.path, xxhash.xxh3_64()
                path = directory / _safe(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("wb")
            elif chunk.path != name:
                raise _damaged(name, "it ends in the middle")
            file.write(chunk.data)
            digest.update(chunk.data)
            if chunk.end_of_file:
                if digest.intdigest() != chunk.checksum:
                    raise _damaged(name, "its checksum is wrong")
                file.close()
                file, files = None, files + 1
    finally:
        if file is not None:
            file.close()
    if file is not None:
        raise _damaged(name, "it ends in the middle")
    if not files:
        raise NotFound("the checkpoint has no files", field="checkpoint")


async def _bounded(stream: AsyncIterable[T], seconds: float) -> AsyncIterator[T]:
    """`stream`, with a deadline for each item."""
    items = aiter(stream)
    while True:
        try:
            item = await asyncio.wait_for(anext(items), seconds)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise DeadlineExceeded(f"no chunk of the checkpoint within {seconds:g} s") from error
        yield item


def _safe(name: str) -> Path:
    """A relative path below the target; a server must not choose other places on our disk."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise DataLoss("the server sent a file name that leads out of the target", value=name)
    return Path(path)


def _damaged(name: str, what: str) -> DataLoss:
    return DataLoss(
        f"{what}.",
        field="file",
        value=name,
        remedy="Export again; if it repeats, the checkpoint itself is damaged.",
    )
