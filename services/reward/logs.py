"""What the calls of a function printed last, line by line, and who listens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from services.reward.function import Function

# Of one function, so much is kept; a longer line is cut into pieces of this length.
_KEPT_BYTES: Final = 256 * 2**10
_LINE_BYTES: Final = 4 * 2**10
# Of what is read at once, so many lines are kept.
_LINES: Final = 200
# A listener that is slower than its function misses lines, and nobody waits for it.
_AHEAD: Final = 1000


class Lines:
    """Cuts what comes in parts into lines."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with each line, without its end."""
        self._tell = tell
        self._rest = b""

    def add(self, part: bytes) -> None:
        """More was printed."""
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(whole) > _LINES:
            # Nobody reads so fast, and everybody else would wait.
            self._tell(f"({len(whole) - _LINES:,} lines left out)")
        for line in whole[-_LINES:]:
            self._cut(line)
        while len(self._rest) >= _LINE_BYTES:
            self._tell(_text(self._rest[:_LINE_BYTES]))
            self._rest = self._rest[_LINE_BYTES:]

    def end(self) -> None:
        """There will be no more: the last line need not be whole."""
        if self._rest:
            self._tell(_text(self._rest))
            self._rest = b""

    def _cut(self, line: bytes) -> None:
        for start in range(0, max(1, len(line)), _LINE_BYTES):
            self._tell(_text(line[start : start + _LINE_BYTES]))


@dataclass
class Logs:
    """The last lines of one function."""

    kept: deque[pb.LogLine] = field(default_factory=deque)
    size: int = 0
    listeners: set[asyncio.Queue[pb.LogLine | None]] = field(default_factory=set)

    def add(self, line: pb.LogLine) -> None:
        """Keep it, and let go of the oldest where there is too much."""
        line.seconds = time.time()
        self.kept.append(line)
        self.size += len(line.text)
        while self.size > _KEPT_BYTES:
            self.size -= len(self.kept.popleft().text)
        for queue in self.listeners:
            if not queue.full():
                queue.put_nowait(line)

    def close(self) -> None:
        """There will be no more lines."""
        for queue in self.listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)


@contextmanager
def listening(functions: Iterable[Function]) -> Iterator[asyncio.Queue[pb.LogLine | None]]:
    """All lines of `functions` from now on; None when there will be no more."""
    queue: asyncio.Queue[pb.LogLine | None] = asyncio.Queue(_AHEAD)
    listened = [function.logs for function in functions]
    for logs in listened:
        logs.listeners.add(queue)
    try:
        yield queue
    finally:
        for logs in listened:
            logs.listeners.discard(queue)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
