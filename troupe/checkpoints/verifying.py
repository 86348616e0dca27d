"""The lineage of a checkpoint (`troupe.json`), and the check of its files against it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import xxhash

from troupe.rpc.errors import DataLoss

LINEAGE: Final = "troupe.json"


@dataclass(frozen=True)
class Lineage:
    """The origin of a checkpoint (job, policy, version, step) and the checksums of its files."""

    job_id: str
    job: str
    policy: str
    version: int
    # The step whose samples made the version, from 0; -1: the first weights.
    step: int
    # Checksum of the tensors that were published to engines.
    checksum: str
    # Directory, hub id or model type of the initial weights.
    base_model: str
    # Checksum of the frozen base under an adapter, as published; empty without an adapter.
    base_checksum: str = ""
    # How rewards became gradients: loss and advantage.
    algorithm: str = ""
    # Checksums of the other files, by name.
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the lineage into `folder`. Raises OSError."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / LINEAGE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Lineage | None:
        """Return the lineage in `folder`; None if it is missing or cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return cls.parse(folder)
        return None

    @classmethod
    def parse(cls, folder: Path) -> Lineage:
        """Read the lineage in `folder`.

        Raises FileNotFoundError if there is none, other OSError, ValueError if it is malformed.
        """
        try:
            values: Mapping[str, Any] = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
            known = {one.name for one in fields(cls)}
            return cls(**{name: value for name, value in values.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"it does not describe a checkpoint: {error}") from error


_CHUNK_BYTES: Final = 1 << 20


def digests(folder: Path) -> dict[str, str]:
    """Return the xxh3-128 checksum of every file in `folder` except `LINEAGE`, by name. Raises
    OSError."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != LINEAGE)
    return {path.name: _digest(path) for path in files}


def verify(folder: Path, suffix: str = "", *, called: str = "") -> None:
    """Compare a checkpoint's files with the checksums in its lineage.

    Only files whose names end in `suffix` are checked. Checkpoints without a lineage, and files
    that were added later, are not. `called`: the checkpoint's name in errors, by default `folder`.
    Raises DataLoss of kind "checkpoint_corrupt", naming the file.
    """
    called = called or str(folder)
    for name, wanted in _files(folder, called).items():
        if not name.endswith(suffix):
            continue
        path = folder / name
        if not path.is_file():
            problem = "is gone"
        elif _digest(path) != wanted:
            problem = "differs from the written file"
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
            remedy="Use another version; or, if you know that the rest is intact, remove "
            f"{LINEAGE} "
            "there.",
        ) from error


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()
