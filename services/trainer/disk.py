"""Writing files so that they are there after a crash, and saying so when they cannot be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from troupe.checkpoints.full_disks import is_full, system_error
from troupe.rpc import FailedPrecondition, ResourceExhausted, TroupeError


@contextlib.contextmanager
def in_memory(path: Path, what: str) -> Iterator[None]:
    """Turn a write into host memory that fails for want of room into ResourceExhausted of kind
    "storage_full"."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        found = system_error(error)
        if found is None or not is_full(found):
            raise
        raise ResourceExhausted(
            f"no room in {path.parent} for {what} that a gang hands over",
            kind="storage_full",
            field="directory",
            value=path.parent,
            remedy="Free space there, or give the container more of it (`--shm-size`): it takes a "
            "whole copy of weights and optimizer.",
        ) from error


@contextlib.contextmanager
def reported(directory: Path, what: str) -> Iterator[None]:
    """Turn a failed write into a typed error: ResourceExhausted of kind "storage_full", or
    FailedPrecondition of kind "storage_unwritable"."""
    try:
        yield
    except TroupeError:
        raise
    except Exception as error:  # tokenizers raises no other
        found = system_error(error)
        if found is None and not isinstance(error, SafetensorError):
            raise
        if found is not None and is_full(found):
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
