"""One attempt to read chunks, either way. What arrives is verified before it counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from troupe.rpc.errors import NotFound, TroupeError, Unavailable
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.chunks import Verification
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.lanes import Lanes
from troupe.transfer.remote.part import Part
from troupe.transfer.remote.receiving import Arrived, receive, receive_by_two
from troupe.transfer.remote.said import Said
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

# All of it is here: nobody waits longer for the owner to say so.
_END_SECONDS: Final = 2.0
# What TCP takes of one host: who receives, and the kernel's side of it (between two containers of
# a host, who sends). A third thread that wants a core then only makes all of them wait.
_BUSY_CORES: Final = 2


@dataclass(frozen=True)
class Place:
    """An owner that has, or is getting, the state."""

    address: str
    stub: rpc.TransferOwnerStub = field(compare=False)
    # Why not through UCX; empty when it can be.
    why_not_ucx: str
    near: bool
    # Workers of this host that it sends to at once.
    lanes: int = 1
    # That its chunks may come in; 0: each in one.
    message_bytes: int = 0


def by_messages(
    stub: rpc.TransferOwnerStub,
    request: pb.ReadStateRequest,
    part: Part,
    arrived: Arrived,
    timeout: float,
) -> None:
    """Copy the chunks of `request` into `part` as they come, telling `arrived`.

    Raises TroupeError; what arrived before stays.
    """
    stream: Any = stub.ReadState(request, timeout=timeout)
    messages = iter(stream)
    try:
        for index in request.chunks:
            chunk = part.chunks[index]
            target, check = chunk.of(part.data), Verification(chunk, part.data)
            at, short = 0, False
            while at < len(target) and not short:
                message = next(messages, None)
                if message is None:
                    if at == 0:
                        raise Unavailable("the owner ended early", kind="transfer_cut_short")
                    short = True
                    break
                size = len(message.data)
                due = (message.chunk, message.offset) == (index, at)
                if short := not due or size == 0 or at + size > len(target):
                    break
                target[at : at + size] = message.data
                at += size
                check.upto(at)
            arrived(index, chunk.spans[0].name if short else check.damaged)
            if short:
                raise Unavailable("a chunk had another length", kind="transfer_cut_short")
        _see_end(stream, messages)
    finally:
        stream.cancel()


def _see_end(stream: Any, messages: Iterator[Any]) -> None:
    """An owner whose stream is cancelled after the last message may not know that all of it came,
    and keeps it for who might go on: a version's memory, for half a minute."""
    late = threading.Timer(_END_SECONDS, stream.cancel)
    late.daemon = True
    late.start()
    with contextlib.suppress(TroupeError):
        next(messages, None)
    late.cancel()


class LaneRead:
    """A read through UCX that has begun: its owner sends as soon as somebody receives.

    Nearby it is the receiver's core that copies: two lanes, where the owner sends through so many,
    each in a thread that receives and verifies every other chunk. Without them, and without a core
    for a thread that verifies, a chunk comes in messages, each verified while it is in the cache.
    """

    def __init__(
        self, place: Place, request: pb.ReadStateRequest, lanes: Lanes, timeout: float
    ) -> None:
        """Raises LaneBroken."""
        self.place, self._lanes = place, lanes
        near, cores = place.near, _cores()
        self._two = near and place.lanes > 1 and cores > 1
        self._beside = not self._two and (near or cores > _BUSY_CORES)
        self._message_bytes = 0 if self._two or self._beside else place.message_bytes
        self._taken: list[ucx.Lane] = []
        self._first_tag = secrets.randbits(62)
        try:
            self._taken.extend(lanes.take(near=near) for _ in range(2 if self._two else 1))
            request.ClearField("lanes")
            request.lanes.extend(
                pb.UcxLane(
                    address=lane.address,
                    first_tag=self._first_tag,
                    near=near,
                    message_bytes=self._message_bytes,
                )
                for lane in self._taken
            )
            self._said = Said(place.stub.ReadState(request, timeout=timeout))
        except BaseException:
            self._give_back(well=False)
            raise

    @property
    def under_way(self) -> bool:
        """Whether it has neither ended nor been cancelled."""
        return bool(self._taken)

    def described(self, timeout: float) -> pb.DescribeStateResponse | None:
        """What is read, where the request asked for that; None, and it is cancelled, when the owner
        could not be reached: a read is not repeated as other calls are. Raises TroupeError."""
        try:
            first: pb.StateChunk = self._said.begins(timeout)
        except NotFound:
            # Nothing was sent.
            self._give_back(well=True)
            raise
        except Unavailable:
            self.cancel()
            return None
        return first.description

    def receive(
        self, chunks: Sequence[int], part: Part, arrived: Arrived, checker: ThreadPoolExecutor
    ) -> None:
        """All of it, which is these chunks, straight into `part`, verified meanwhile. `checker` has
        the second lane, or verifies what one brings.

        Raises TroupeError or LaneBroken.
        """
        size = self._message_bytes
        tags = PIECE_BYTES // size if size else 1
        due = [(index, self._first_tag + place * tags) for place, index in enumerate(chunks)]
        try:
            if self._two:
                receive_by_two(self._taken, self._said, due, part, arrived, checker)
            else:
                beside = checker if self._beside else None
                receive(self._taken[0], self._said.check, due, part, arrived, beside, size)
        except BaseException as error:
            self.cancel(owner_lives=not isinstance(error, ucx.LaneBroken | Unavailable))
            raise
        # All bytes are here and verified. The owner still lets go of its file, which takes a tenth
        # as long as sending it did: the lanes are free after that, but nobody has to wait for it.
        taken, self._taken = self._taken, []
        self._said.then(lambda well: self._end(taken, well=well))

    def cancel(self, *, owner_lives: bool = True) -> None:
        """End it, unless it has ended."""
        if not self._taken:
            return
        owner_lives = owner_lives and self._said.failure is None
        self._said.cancel()
        if owner_lives:
            self._give_back(well=False)
            return
        taken, self._taken = self._taken, []
        for lane in taken:
            lane.abandon()

    def _give_back(self, *, well: bool) -> None:
        taken, self._taken = self._taken, []
        self._end(taken, well=well)

    def _end(self, taken: Sequence[ucx.Lane], *, well: bool) -> None:
        for lane in taken:
            if well:
                self._lanes.give(lane)
            else:
                lane.close()


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
