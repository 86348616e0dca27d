"""Whether a checkpoint's files are those that were written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import xxhash

from troupe.checkpoints.lineage import LINEAGE, Lineage
from troupe.rpc.errors import DataLoss

_CHUNK_BYTES: Final = 1 << 20


def digests(folder: Path) -> dict[str, str]:
    """xxh3-128 of every file in `folder` but `LINEAGE`, by name. Raises OSError."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != LINEAGE)
    return {path.name: _digest(path) for path in files}


def verify(folder: Path, suffix: str = "", *, called: str = "") -> None:
    """Compare with what its lineage says of the files whose names end so.

    Nothing is said of checkpoints of older releases, nor of files that were added. `called`: what
    the checkpoint is to who reads the error, if not `folder`. Raises DataLoss of kind
    "checkpoint_corrupt", naming the file.
    """
    called = called or str(folder)
    for name, wanted in _files(folder, called).items():
        if not name.endswith(suffix):
            continue
        path = folder / name
        if not path.is_file():
            problem = "is gone"
        elif _digest(path) != wanted:
            problem = "is not what was written"
        else:
            continue
        raise DataLoss(
            f"{name} of checkpoint {called} {problem}",
            kind="checkpoint_corrupt",
            field="file",
            value=name,
            remedy=f"Use another version; or, if you changed it yourself, remove {LINEAGE} there.",
        )


def _files(folder: Path, called: str) -> Mapping[str, str]:
    try:
        return Lineage.parse(folder).files
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataLoss(
            f"{LINEAGE} of checkpoint {called} cannot be read: {error}",
            kind="checkpoint_corrupt",
            field="file",
            value=LINEAGE,
            remedy=f"Use another version; or, if you know that the rest is whole, remove {LINEAGE} "
            "there.",
        ) from error


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()
