"""One attempt to read chunks, either way. What arrives is verified before it counts."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from troupe.rpc.errors import DataLoss, TroupeError, Unavailable
from troupe.transfer.checksum import bytes_checksum
from troupe.transfer.remote import lane as ucx
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

Arrived = Callable[[int, bool], None]

# Receives that wait ahead of the owner's sends.
_WINDOW: Final = 6
_IDLE_SECONDS: Final = 30.0


def by_messages(
    stub: rpc.TransferOwnerStub,
    request: pb.ReadStateRequest,
    data: memoryview,
    arrived: Arrived,
    timeout: float,
) -> None:
    """Copy the chunks of `request` into `data` as they come, telling `arrived` (chunk, whole).

    Raises TroupeError; what arrived before stays.
    """
    stream: Any = stub.ReadState(request, timeout=timeout)
    due = iter(request.chunks)
    try:
        for message in stream:
            chunk = next(due, -1)
            _same(message, chunk)
            target = _slice(data, chunk, request.chunk_bytes)
            whole = len(message.data) == len(target)
            if whole:
                target[:] = message.data
            arrived(chunk, whole and bytes_checksum(target) == message.checksum)
        if next(due, None) is not None:
            raise Unavailable("the owner ended early", kind="transfer_cut_short")
    finally:
        stream.cancel()


def by_lane(
    stub: rpc.TransferOwnerStub,
    request: pb.ReadStateRequest,
    data: memoryview,
    arrived: Arrived,
    timeout: float,
) -> None:
    """The same through UCX, straight into `data`. Raises TroupeError or LaneBroken."""
    with ucx.Lane() as lane:
        first_tag = secrets.randbits(62)
        request.lane.CopyFrom(pb.UcxLane(address=lane.address, first_tag=first_tag))
        stream: Any = stub.ReadState(request, timeout=timeout)
        said = _Said(stream)
        try:
            chunks = list(request.chunks)
            flying: deque[Any] = deque()
            asked = 0
            for chunk in chunks:
                while asked < len(chunks) and len(flying) < _WINDOW:
                    target = _slice(data, chunks[asked], request.chunk_bytes)
                    flying.append(lane.receive(target, first_tag + asked))
                    asked += 1
                head = flying[0]

                def done(head: Any = head) -> bool:
                    if head.completed and said.ready():
                        return True
                    # An owner that died ends the stream, whatever UCX has noticed.
                    if said.failure is not None:
                        raise said.failure
                    return False

                lane.wait(done, idle=_IDLE_SECONDS)
                flying.popleft()
                message = said.next()
                _same(message, chunk)
                target = _slice(data, chunk, request.chunk_bytes)
                arrived(chunk, bytes_checksum(target) == message.checksum)
        finally:
            stream.cancel()


class _Said:
    """A stream that a thread reads, so that nobody waits for it but with a deadline."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[pb.StateChunk] = queue.SimpleQueue()
        # Why there will be no more messages; None while there may be.
        self.failure: TroupeError | None = None
        threading.Thread(target=self._read, name="transfer-reader", daemon=True).start()

    def ready(self) -> bool:
        """Whether `next` has a message."""
        return not self._queue.empty()

    def next(self) -> pb.StateChunk:
        """The message that is there."""
        return self._queue.get_nowait()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self._queue.put(message)
        except TroupeError as error:
            self.failure = error


def _same(message: pb.StateChunk, chunk: int) -> None:
    if message.chunk != chunk:
        raise DataLoss(f"chunk {message.chunk} came where {chunk} was due")


def _slice(data: memoryview, chunk: int, size: int) -> memoryview:
    return data[chunk * size : (chunk + 1) * size]
