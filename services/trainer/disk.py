"""Writing files so that they are there after a crash, and saying so when they cannot be."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from troupe.rpc import FailedPrecondition, ResourceExhausted

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def reported(directory: Path, what: str) -> Iterator[None]:
    """Turn a failed write into a typed error: ResourceExhausted of kind "storage_full", or
    FailedPrecondition of kind "storage_unwritable"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _is_full(error):
            raise ResourceExhausted(
                f"no room for {what} in {directory}",
                kind="storage_full",
                field="data_dir",
                value=directory,
                remedy="Free space there, then resume; nothing that was finished is lost.",
            ) from error
        raise FailedPrecondition(
            f"{what} cannot be written to {directory}: {error}",
            kind="storage_unwritable",
            field="data_dir",
            value=directory,
            remedy="Make the directory writable for the trainer, or set TROUPE_DATA_DIR.",
        ) from error


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors writes in Rust and passes the system's message on as text.
    return any(f"os error {number}" in str(error) for number in _FULL)
