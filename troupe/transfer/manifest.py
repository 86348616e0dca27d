"""What is stored under a key: names, dtypes, shapes, places, checksums."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from troupe.transfer.checksum import combine, dtype_of

_VERSION = re.compile(r"@(\d+)$")


def version_in(key: str) -> int:
    """`job/policy/weights@3` -> 3; -1 for a key without a version."""
    match = _VERSION.search(key)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class Entry:
    """One tensor: `nbytes` bytes from `offset` (bytes) in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The layout of one stored state.

    `checksum` names the content: equal content has an equal checksum whatever the order in
    which tensors were given. `version` is the number after '@' in the key, or -1.
    """

    key: str
    version: int
    checksum: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def end(self) -> int:
        """Length of the data section in bytes."""
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def to_json(self) -> bytes:
        """Compact JSON, UTF-8."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Inverse of `to_json`; ValueError when `data` is no consistent manifest."""
        try:
            raw: dict[str, Any] = json.loads(data)
            entries = tuple(
                Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw["entries"]
            )
            manifest = Manifest(
                raw["key"], raw["version"], raw["checksum"], entries, dict(raw["metadata"])
            )
            for entry in entries:
                if entry.nbytes != math.prod(entry.shape) * dtype_of(entry.dtype).itemsize:
                    raise ValueError(f"{entry.name}: size does not follow from dtype and shape")
                if entry.offset < 0 or any(size < 0 for size in entry.shape):
                    raise ValueError(f"{entry.name}: negative offset or shape")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        parts = {entry.name: (entry.dtype, entry.shape, entry.checksum) for entry in entries}
        if combine(parts) != manifest.checksum:
            raise ValueError("the manifest's own checksum does not match its entries")
        return manifest
