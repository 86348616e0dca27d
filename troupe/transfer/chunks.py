"""How a state is cut into chunks on its way: by its manifest alone, so both sides cut alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from troupe.transfer.checksum import PIECE_BYTES, hasher
from troupe.transfer.manifest import Manifest


@dataclass(frozen=True)
class Span:
    """Bytes of the data section with a checksum: a tensor, or a piece of a large one."""

    offset: int
    nbytes: int
    checksum: str
    name: str


@dataclass(frozen=True)
class Chunk:
    """What is sent, verified, and sent again at once: neighbouring spans, at most
    `PIECE_BYTES` of them together (and the padding between them)."""

    offset: int
    nbytes: int
    spans: tuple[Span, ...]

    def of(self, data: memoryview) -> memoryview:
        """Its bytes in the data section."""
        return data[self.offset : self.offset + self.nbytes]

    def damaged(self, data: memoryview) -> str:
        """Name of the first tensor in it whose bytes are not those that were set; "" for none."""
        check = Verification(self, data)
        check.upto(self.nbytes)
        return check.damaged


class Verification:
    """Verifies a chunk as its bytes come, in order: what has just come is still in the cache.

    `damaged`: name of the first tensor whose bytes are not those that were set; "" for none so far.
    """

    def __init__(self, chunk: Chunk, data: memoryview) -> None:
        self.damaged = ""
        self._data, self._begin, self._done = data, chunk.offset, chunk.offset
        self._spans = deque(chunk.spans)
        self._hash = hasher()

    def upto(self, nbytes: int) -> None:
        """The first `nbytes` of the chunk are there."""
        end = self._begin + nbytes
        while self._spans:
            span = self._spans[0]
            start, stop = max(self._done, span.offset), min(end, span.offset + span.nbytes)
            if start < stop:
                self._hash.update(self._data[start:stop])
                self._done = stop
            if stop < span.offset + span.nbytes:
                return
            if self._hash.hexdigest() != span.checksum:
                self.damaged = self.damaged or span.name
            self._hash = hasher()
            self._spans.popleft()


def messages_of(nbytes: int, message_bytes: int) -> Iterator[tuple[int, int]]:
    """Where each of the messages that a chunk comes in begins and ends; one for 0."""
    size = message_bytes or nbytes
    return ((at, min(at + size, nbytes)) for at in range(0, nbytes, size))


def spans_of(manifest: Manifest) -> Iterator[Span]:
    """Everything that has bytes, in the order of the data section."""
    for entry in manifest.entries:
        if not entry.pieces:
            if entry.nbytes:
                yield Span(entry.offset, entry.nbytes, entry.checksum, entry.name)
            continue
        for place, checksum in enumerate(entry.pieces):
            start = place * PIECE_BYTES
            size = min(PIECE_BYTES, entry.nbytes - start)
            yield Span(entry.offset + start, size, checksum, entry.name)


def chunks_of(manifest: Manifest) -> tuple[Chunk, ...]:
    """All bytes of a state."""
    made: list[Chunk] = []
    held: list[Span] = []
    for span in spans_of(manifest):
        if held and span.offset + span.nbytes - held[0].offset > PIECE_BYTES:
            made.append(_chunk(held))
            held = []
        held.append(span)
    if held:
        made.append(_chunk(held))
    return tuple(made)


def _chunk(spans: list[Span]) -> Chunk:
    offset, last = spans[0].offset, spans[-1]
    return Chunk(offset, last.offset + last.nbytes - offset, tuple(spans))
