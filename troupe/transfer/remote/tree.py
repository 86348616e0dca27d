"""Who reads from whom when several readers want one state. Pure: no clock, no I/O.

A reader hands on what it has verified while more comes in. Links being the bottleneck, a chain
uses each of them once in either direction: with n chunks the k-th reader ends (k - 1) / n of the
time after the first, where readers that all ask the owner take k times as long as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# How much longer than the first the last reader of a chain may take. Beyond, the owner begins
# another chain: also so that one slow reader holds up few.
_LATE: Final = 0.25
_LONGEST: Final = 16


class Tree:
    """The readers of one state, by address, and where each reads from."""

    def __init__(self, num_chunks: int) -> None:
        self._longest = min(max(int(_LATE * num_chunks), 1), _LONGEST)
        # reader -> whom it reads from; None: the owner. In the order in which they came.
        self._source: dict[str, str | None] = {}

    def join(self, reader: str, failed: Iterable[str] = ()) -> str | None:
        """Whom `reader` reads from; None: the owner itself. `failed` did not answer it.

        A reader that was here before gets another source than those that failed and those that
        read from it. Who read from a reader that failed comes by itself.
        """
        below = self._below(reader)
        for address in failed:
            self._source.pop(address, None)
        self._source.pop(reader, None)
        busy = set(self._source.values())
        free = [
            one
            for one in self._source
            if one not in busy and one not in below and 0 < self._depth(one) < self._longest
        ]
        # The longest chain that is not too long; of equal ones the one that began first.
        source = max(free, key=self._depth, default=None)
        self._source[reader] = source
        return source

    def leave(self, reader: str) -> None:
        """It serves nobody any more."""
        self._source.pop(reader, None)

    def _depth(self, reader: str) -> int:
        """Readers from the owner to this one; 0 when it hangs on one that has gone."""
        depth, at = 1, self._source[reader]
        while at is not None:
            if at not in self._source:
                return 0
            depth, at = depth + 1, self._source[at]
        return depth

    def _below(self, reader: str) -> set[str]:
        """Those that read from `reader`, at first or second hand, and itself."""
        found = {reader}
        while True:
            more = {one for one, source in self._source.items() if source in found} - found
            if not more:
                return found
            found |= more
