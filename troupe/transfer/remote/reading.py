"""One attempt to read chunks, either way. What arrives is verified before it counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from troupe.rpc.errors import TroupeError, Unavailable
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


def by_lane(
    stub: rpc.TransferOwnerStub,
    request: pb.ReadStateRequest,
    part: Part,
    arrived: Arrived,
    timeout: float,
    *,
    lanes: Lanes,
    near: bool,
    most_lanes: int,
    message_bytes: int,
    checker: ThreadPoolExecutor,
) -> None:
    """The same through UCX, straight into `part`, verified meanwhile.

    Nearby it is the receiver's core that copies: two lanes, where the owner sends through so many,
    each in a thread that receives and verifies every other chunk. `checker` has the second one, or
    the thread that verifies what one lane brings, where there is a core for it. Without either a
    chunk comes in messages of `message_bytes` (0 where the owner sends it as one), each verified
    while it is in the cache.

    Raises TroupeError or LaneBroken.
    """
    cores = _cores()
    two = near and most_lanes > 1 and cores > 1 and len(request.chunks) > 1
    taken: list[ucx.Lane] = []
    said: Said | None = None
    try:
        taken.extend(lanes.take(near=near) for _ in range(2 if two else 1))
        first_tag = secrets.randbits(62)
        beside = None if two or (cores <= _BUSY_CORES and not near) else checker
        size = 0 if two or beside is not None else message_bytes
        request.ClearField("lanes")
        request.lanes.extend(
            pb.UcxLane(address=lane.address, first_tag=first_tag, near=near, message_bytes=size)
            for lane in taken
        )
        said = Said(stub.ReadState(request, timeout=timeout))
        tags = PIECE_BYTES // size if size else 1
        due = [(index, first_tag + place * tags) for place, index in enumerate(request.chunks)]
        if two:
            receive_by_two(taken, said, due, part, arrived, checker)
        else:
            receive(taken[0], said.check, due, part, arrived, beside, size)
    except BaseException:
        if said is not None:
            said.cancel()
        for lane in taken:
            lane.close()
        raise

    def back(well: bool) -> None:
        for lane in taken:
            if well:
                lanes.give(lane)
            else:
                lane.close()

    # All bytes are here and verified. The owner still lets go of its file, which takes a tenth as
    # long as sending it did: the lanes are free after that, but nobody has to wait for it.
    said.then(back)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
