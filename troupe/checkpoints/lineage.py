"""Where a checkpoint's weights come from: a small file beside them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

LINEAGE: Final = "troupe.json"


@dataclass(frozen=True)
class Lineage:
    """What a trainer knows of the version that it writes."""

    job_id: str
    job: str
    policy: str
    version: int
    # The step whose samples made the version, from 0; -1: the first weights.
    step: int
    # Of the version as published to engines.
    checksum: str
    # Directory, hub id or model type that training began with.
    base_model: str
    # Of the frozen weights under an adapter, as published; empty without one.
    base_checksum: str = ""
    # How rewards became gradients: loss and advantage.
    algorithm: str = ""
    # Checksums of the files beside it (verifying.py).
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put the file into `folder`. Raises OSError."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / LINEAGE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Lineage | None:
        """What `folder` says of itself; None where it says nothing that can be read."""
        with contextlib.suppress(OSError, ValueError):
            return cls.parse(folder)
        return None

    @classmethod
    def parse(cls, folder: Path) -> Lineage:
        """What `folder` says of itself. Raises OSError, FileNotFoundError where it says nothing;
        ValueError for what cannot be read."""
        try:
            values: Mapping[str, Any] = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
            known = {one.name for one in fields(cls)}
            return cls(**{name: value for name, value in values.items() if name in known})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"it is no description of a checkpoint: {error}") from error
