"""One attempt to read chunks, either way. What arrives is verified before it counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final

from troupe.rpc.errors import TroupeError, Unavailable
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.lanes import Lanes
from troupe.transfer.remote.part import Part
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

# Called with a chunk and the name of a tensor of it that arrived damaged, "" for none.
Arrived = Callable[[int, str], None]

# Receives that wait ahead of the owner's sends.
_WINDOW: Final = 8
_IDLE_SECONDS: Final = 30.0
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
            target = chunk.of(part.data)
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
            arrived(index, chunk.spans[0].name if short else chunk.damaged(part.data))
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
    checker: ThreadPoolExecutor,
) -> None:
    """The same through UCX, straight into `part`, verified meanwhile: by `checker` in another
    thread, where there is a core for it.

    Raises TroupeError or LaneBroken.
    """
    lane = lanes.take(near=near)
    said: _Said | None = None
    try:
        first_tag = secrets.randbits(62)
        request.lane.CopyFrom(pb.UcxLane(address=lane.address, first_tag=first_tag, near=near))
        said = _Said(stub.ReadState(request, timeout=timeout))
        beside = checker if near or _cores() > _BUSY_CORES else None
        _receive(lane, said, list(request.chunks), first_tag, part, arrived, beside)
    except BaseException:
        if said is not None:
            said.cancel()
        lane.close()
        raise
    # All bytes are here and verified. The owner still lets go of its file, which takes a tenth as
    # long as sending it did: the lane is free after that, but nobody has to wait for it.
    said.then(lambda well: lanes.give(lane) if well else lane.close())


def _receive(
    lane: ucx.Lane,
    said: _Said,
    due: list[int],
    first_tag: int,
    part: Part,
    arrived: Arrived,
    checker: ThreadPoolExecutor | None,
) -> None:
    """Without `checker` this thread verifies, as soon as more is asked for: what comes meanwhile
    waits in the kernel."""
    flying: deque[tuple[int, Any]] = deque()
    checks = _Checks(part, checker)
    asked = 0

    def ask() -> None:
        nonlocal asked
        while asked < len(due) and len(flying) < _WINDOW:
            target = part.chunks[due[asked]].of(part.data)
            flying.append((due[asked], lane.receive(target, first_tag + asked)))
            asked += 1

    def done() -> bool:
        return bool(flying[0][1].completed)

    def lives() -> None:
        # An owner that died ends the stream, whatever UCX has noticed.
        if said.failure is not None and not done():
            raise said.failure

    try:
        while asked < len(due) or flying:
            ask()
            lane.wait(done, idle=_IDLE_SECONDS, meanwhile=lives)
            while flying and flying[0][1].completed:
                index, _ = flying.popleft()
                ask()
                checks.begin(index)
            for index, damaged in checks.over():
                arrived(index, damaged)
    finally:
        # Also what came before it broke; nobody hashes memory that is about to be given back.
        checks.end()
        for index, damaged in checks.over():
            arrived(index, damaged)


class _Checks:
    """Verifies chunks of a part: in a thread of `pool`, without one in the caller's.

    One task of the pool for all of them: one for each would cost the receiving thread as much as
    a fifth of the hashing does.
    """

    def __init__(self, part: Part, pool: ThreadPoolExecutor | None) -> None:
        self._part = part
        self._due: SimpleQueue[int | None] = SimpleQueue()
        self._over: deque[tuple[int, str]] = deque()
        self._task = None if pool is None else pool.submit(self._all)

    def begin(self, index: int) -> None:
        """The chunk has come."""
        if self._task is None:
            self._check(index)
        else:
            self._due.put(index)

    def over(self) -> Iterator[tuple[int, str]]:
        """Chunks that were verified since it was last asked, with what is damaged of them."""
        while self._over:
            yield self._over.popleft()

    def end(self) -> None:
        """Wait until all that have come are verified."""
        if self._task is not None:
            self._due.put(None)
            self._task.result()

    def _all(self) -> None:
        while (index := self._due.get()) is not None:
            self._check(index)

    def _check(self, index: int) -> None:
        self._over.append((index, self._part.chunks[index].damaged(self._part.data)))


class _Said:
    """A stream that a thread reads, so that nobody waits for it but with a deadline."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._ended = False
        self._after: Callable[[bool], None] | None = None
        # Why there will be no bytes; None while there may be.
        self.failure: TroupeError | None = None
        threading.Thread(target=self._read, name="transfer-reader", daemon=True).start()

    def then(self, after: Callable[[bool], None]) -> None:
        """Call `after` once it has ended, with whether it ended well: at the latest at its
        deadline, in this thread or its own."""
        with self._lock:
            if not self._ended:
                self._after = after
                return
        after(self.failure is None)

    def cancel(self) -> None:
        """End it."""
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for _ in self._stream:
                pass
        except TroupeError as error:
            self.failure = error
        finally:
            with self._lock:
                self._ended, after = True, self._after
            if after is not None:
                after(self.failure is None)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
