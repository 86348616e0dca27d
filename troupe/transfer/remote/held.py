"""What readers were told of, kept for them while they read: a version may be deleted meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from troupe.rpc.errors import NotFound
from troupe.transfer.manifest import Manifest
from troupe.transfer.mappings import Lease
from troupe.transfer.remote.tree import Tree

# Who asked what there is begins to read it, or to read the rest of it, within this.
_HOLD_SECONDS: Final = 30.0
# Who reads from whom is forgotten when nobody asked for so long.
_TREE_SECONDS: Final = 300.0


@dataclass
class _Hold:
    manifest: Manifest
    lease: Lease
    until: float
    # Readers that were told of it and have not had all of it.
    readers: int = 0


class Held:
    """Mapped states by key and checksum, and who reads them from whom. Safe to use from several
    threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: dict[tuple[str, str], _Hold] = {}
        self._trees: dict[tuple[str, str], tuple[Tree, float]] = {}

    def told(self, manifest: Manifest, lease: Lease) -> None:
        """Somebody was told of it, and will read it."""
        name = (manifest.key, manifest.checksum)
        with self._lock:
            hold = self._holds.setdefault(name, _Hold(manifest, lease, 0.0))
            hold.readers += 1
            hold.until = time.monotonic() + _HOLD_SECONDS

    def find(self, key: str, checksum: str) -> tuple[Manifest, Lease]:
        """What is held. Raises NotFound."""
        with self._lock:
            hold = self._holds.get((key, checksum))
            if hold is None:
                raise NotFound(f"nothing of this content is held of '{key}'")
            hold.until = time.monotonic() + _HOLD_SECONDS
            return hold.manifest, hold.lease

    def read(self, key: str, checksum: str) -> None:
        """Somebody has all of it."""
        with self._lock:
            if (hold := self._holds.get((key, checksum))) is not None:
                hold.readers -= 1
                if hold.readers <= 0:
                    del self._holds[(key, checksum)]

    def source_for(
        self, manifest: Manifest, num_chunks: int, reader: str, failed: list[str]
    ) -> str:
        """Whom `reader` reads from; empty: this owner."""
        name = (manifest.key, manifest.checksum)
        with self._lock:
            tree = self._trees.get(name, (Tree(num_chunks), 0.0))[0]
            self._trees[name] = (tree, time.monotonic() + _TREE_SECONDS)
            return tree.join(reader, failed) or ""

    def sweep(self) -> None:
        """Let go what nobody came for."""
        now = time.monotonic()
        with self._lock:
            self._holds = {n: hold for n, hold in self._holds.items() if hold.until > now}
            self._trees = {n: (t, until) for n, (t, until) in self._trees.items() if until > now}
