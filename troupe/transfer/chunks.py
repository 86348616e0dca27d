"""How a state is cut into chunks on its way: by its manifest alone, so both sides cut alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from troupe.transfer.checksum import PIECE_BYTES, bytes_checksum
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
        for span in self.spans:
            if bytes_checksum(data[span.offset : span.offset + span.nbytes]) != span.checksum:
                return span.name
        return ""


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
