"""What this host is fetching right now: others may read what of it is here already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from troupe.transfer.remote.part import Part


class Arrivals:
    """Parts by key and checksum. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, str], Part] = {}

    @contextlib.contextmanager
    def coming(self, part: Part) -> Iterator[None]:
        """`part` is there for others within the block."""
        name = (part.manifest.key, part.manifest.checksum)
        with self._lock:
            self._parts[name] = part
        try:
            yield
        finally:
            with self._lock:
                del self._parts[name]

    def find(self, key: str, checksum: str) -> Part | None:
        """The part of this content (of any, for an empty checksum)."""
        with self._lock:
            if checksum:
                return self._parts.get((key, checksum))
            return next((part for (k, _), part in self._parts.items() if k == key), None)
