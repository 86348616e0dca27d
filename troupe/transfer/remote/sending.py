"""The bytes that an owner sends: where they are, or come to, and how they go out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from troupe.rpc.errors import Unavailable
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.chunks import Chunk, chunks_of, messages_of
from troupe.transfer.manifest import Manifest
from troupe.transfer.mappings import Lease, Mappings
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.part import Part
from troupe.transfer.store import Transfer
from troupe.v1 import transfer_pb2 as pb

# Messages on their way at once through a lane.
_WINDOW: Final = 16
# What gRPC copies several times it copies in small pieces.
MESSAGE_BYTES: Final = 2 << 20
# Of a chunk, for readers that verify each as it comes: half of a core's own cache. (Each costs
# some 20 us on either side.)
UCX_MESSAGE_BYTES: Final = 1 << 20
# A reader that takes nothing for so long is given up; it asks again if it lives.
_IDLE_SECONDS: Final = 30.0


class Stored:
    """A state that is all here."""

    def __init__(self, manifest: Manifest, lease: Lease) -> None:
        self.chunks = chunks_of(manifest)
        self._lease = lease

    def wait(self, index: int, alive: Callable[[], bool]) -> memoryview:
        """The bytes of a chunk."""
        return self.chunks[index].of(self._lease.data)


class Arriving:
    """A state that this host is still fetching."""

    def __init__(self, part: Part, transfer: Transfer, mappings: Mappings) -> None:
        self.chunks: tuple[Chunk, ...] = part.chunks
        self._part, self._transfer, self._mappings = part, transfer, mappings
        self._stored: Stored | None = None

    def wait(self, index: int, alive: Callable[[], bool]) -> memoryview:
        """The bytes of a chunk once they have come. Raises Unavailable when they do not."""
        if self._stored is None and self._part.shown:
            # From now on its file may be deleted and used again: hold it.
            key = self._part.manifest.key
            manifest, lease = self._mappings.lease(self._transfer.opened(key))
            if manifest.checksum != self._part.manifest.checksum:
                raise Unavailable("was replaced meanwhile", kind="transfer_source_failed")
            self._stored = Stored(manifest, lease)
        if self._stored is not None:
            return self._stored.wait(index, alive)
        deadline = time.monotonic() + _IDLE_SECONDS
        while (come := self._part.wait(index, _IDLE_SECONDS)) is None:
            if not alive():
                raise ucx.LaneBroken("the reader went away")
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"chunk {index} did not come here within {_IDLE_SECONDS:g} s",
                    kind="transfer_source_failed",
                )
        return come


Source = Stored | Arriving


def send(
    lanes: Sequence[ucx.Lane],
    request: pb.ReadStateRequest,
    source: Source,
    alive: Callable[[], bool],
) -> None:
    """The chunks in turns through `lanes`, by this thread: nearby who receives copies."""
    size = request.lanes[0].message_bytes
    tags = PIECE_BYTES // size if size else 1
    flying: deque[tuple[ucx.Lane, Any]] = deque()

    def done() -> bool:
        return bool(flying[0][1].completed)

    def lives() -> None:
        if not alive():
            raise ucx.LaneBroken("the reader went away")

    def until(most: int) -> None:
        while len(flying) > most:
            flying[0][0].wait(done, idle=_IDLE_SECONDS, meanwhile=lives)
            while flying and flying[0][1].completed:
                flying.popleft()

    for place, index in enumerate(request.chunks):
        data = source.wait(index, alive)
        lane, asked = lanes[place % len(lanes)], request.lanes[place % len(lanes)]
        for number, (at, stop) in enumerate(messages_of(len(data), size)):
            tag = asked.first_tag + place * tags + number
            flying.append((lane, lane.send(data[at:stop], tag)))
            until(len(lanes) * _WINDOW - 1)
    until(0)


def messages(index: int, data: memoryview) -> Iterator[pb.StateChunk]:
    for at in range(0, len(data), MESSAGE_BYTES):
        yield _message(index, at, data[at : at + MESSAGE_BYTES])


def _message(index: int, offset: int, data: memoryview) -> pb.StateChunk:
    return pb.StateChunk(chunk=index, offset=offset, data=bytes(data))
