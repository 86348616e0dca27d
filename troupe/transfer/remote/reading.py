"""Reading a state from its owner: its file's chunks arrive through UCX or in gRPC messages.

With UCX the bytes go directly into the file that will be mapped, and are verified as they arrive.
The call `ReadState` then carries no bytes: its stream shows that the owner lives, and how the read
ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final

from troupe.rpc.errors import DeadlineExceeded, NotFound, TroupeError, Unavailable
from troupe.transfer.blob import Verification, messages_of
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote.lane import Lane, LaneBroken, LanePool
from troupe.transfer.remote.partial_state import PartialState
from troupe.v1 import transfer_pb2 as transfer_pb
from troupe.v1 import transfer_pb2_grpc as transfer_grpc


class StreamReader:
    """A gRPC stream read by a separate thread, so that callers can wait with a deadline.

    `first`: its first message; None before that. `failure`: the error that ended it, if any.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._ended = False
        self.first: Any = None
        self._begun = threading.Event()
        self._after: Callable[[bool], None] | None = None
        self.failure: TroupeError | None = None
        threading.Thread(target=self._read, name="transfer-reader", daemon=True).start()

    def check(self) -> None:
        """Raise the error that ended the stream, if one did."""
        if self.failure is not None:
            raise self.failure

    def begins(self, timeout: float) -> Any:
        """Return the first message. Raises the stream's error, or DeadlineExceeded after `timeout`
        s."""
        if not self._begun.wait(timeout):
            raise DeadlineExceeded(f"no message within {timeout:g} s")
        if self.first is None:
            self.check()
            raise Unavailable("the owner ended early", kind="transfer_cut_short")
        return self.first

    def then(self, after: Callable[[bool], None]) -> None:
        """Call `after`, in this thread or the stream's, once the stream has ended (at its deadline
        at the latest); its argument is whether the stream ended without an error."""
        with self._lock:
            if not self._ended:
                self._after = after
                return
        after(self.failure is None)

    def cancel(self) -> None:
        """Cancel the call."""
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self.first = self.first or message
                self._begun.set()
        except TroupeError as error:
            self.failure = error
        finally:
            with self._lock:
                self._ended, after = True, self._after
            self._begun.set()
            if after is not None:
                after(self.failure is None)


# Bytes that UCX copies at a time from another process: source and copy fit in a core's own cache,
# where they are hashed several times as fast as a whole chunk.
STEP_BYTES: Final = 512 << 10
_WORD: Final = 8
# If the data contain this word, progress is only underestimated.
_MARK: Final = secrets.randbits(8 * _WORD)


class ReceiveWatermark:
    """A measure of how much of a message has arrived, before it is complete.

    A random word is written at the end of every `step` bytes (a multiple of 8) of the receive
    buffer. Transports within a machine write whole words in order, in the polling thread: all bytes
    before an overwritten word have arrived. The rest of the last step is not noticed.
    """

    def __init__(self, memory: memoryview, step: int = STEP_BYTES) -> None:
        self._step = step // _WORD
        self._words = memory[: len(memory) // step * step].cast("Q")
        # The next word to be overwritten.
        self._next = self._step - 1
        for place in range(self._next, len(self._words), self._step):
            self._words[place] = _MARK

    @property
    def passed(self) -> bool:
        """Whether more has arrived since the last call of `upto`."""
        return self._next < len(self._words) and self._words[self._next] != _MARK

    def upto(self) -> int:
        """Return a lower bound of the number of first bytes that have arrived."""
        while self.passed:
            self._next += self._step
        return (self._next + 1 - self._step) * _WORD


# Called with a chunk and the name of a damaged tensor in it, "" for none.
Arrived = Callable[[int, str], None]

# Number of receives posted ahead of the owner's sends.
_WINDOW: Final = 16
_IDLE_SECONDS: Final = 30.0


def receive_by_two(
    lanes: Sequence[Lane],
    stream: StreamReader,
    due: Sequence[tuple[int, int]],
    part: PartialState,
    arrived: Arrived,
    pool: ThreadPoolExecutor,
) -> None:
    """`receive` through two lanes, one of them in a thread of `pool`: each takes every other chunk.

    Both have ended when this does. Raises the error of the first that failed.
    """
    lock, failures = threading.Lock(), list[BaseException]()
    core = _core()

    def arrived_in_turn(index: int, damaged: str) -> None:
        with lock:
            arrived(index, damaged)

    def check() -> None:
        stream.check()
        if failures:
            raise LaneBroken("the other lane of the read failed")

    def take(which: int) -> None:
        try:
            if which:
                _leave(core)
            receive(lanes[which], check, due[which::2], part, arrived_in_turn, None)
        except BaseException as error:
            failures.append(error)

    second = pool.submit(take, 1)
    take(0)
    try:
        wait([second])
        if failures:
            raise failures[0]
    except BaseException as error:
        # Also if this thread was interrupted: the other must not drive its lane any longer.
        failures.append(error)
        wait([second])
        raise
    finally:
        failures.clear()  # else a reference cycle that keeps the callers' frames


def receive(
    lane: Lane,
    check: Callable[[], object],
    due: Sequence[tuple[int, int]],
    part: PartialState,
    arrived: Arrived,
    checker: ThreadPoolExecutor | None,
    message_bytes: int = 0,
) -> None:
    """Receive the chunks of `due`, each with its first tag, in order, in messages of
    `message_bytes` (0: one message per chunk). `check` raises an error if the owner has ended.

    Without `checker` this thread verifies: through shared memory each step while it is in the
    cache, else each message after the next receive is posted; meanwhile data waits in the kernel or
    at the owner.
    """
    flying: deque[_Message] = deque()
    checks = _Checks(part, checker)
    messages = _messages(part, due, message_bytes)
    marked = lane.near and checker is None

    def ask() -> None:
        for index, upto, memory, tag in islice(messages, _WINDOW - len(flying)):
            marks = ReceiveWatermark(memory) if marked else None
            flying.append(
                _Message(index, upto - len(memory), upto, marks, lane.receive(memory, tag))
            )

    def more() -> bool:
        return flying[0].more()

    def lives() -> None:
        # The stream ends when the owner dies, whether or not UCX notices.
        if not more():
            check()

    try:
        ask()
        while flying:
            lane.wait(more, idle=_IDLE_SECONDS, meanwhile=lives)
            while flying and flying[0].request.completed:
                message = flying.popleft()
                ask()
                checks.upto(message.chunk, message.end)
            if flying and flying[0].more():
                checks.upto(flying[0].chunk, flying[0].upto())
            for index, damaged in checks.over():
                arrived(index, damaged)
    finally:
        # Also the bytes that arrived before a failure; and no thread may hash memory that is freed
        # next.
        checks.end()
        for index, damaged in checks.over():
            arrived(index, damaged)


@dataclass(slots=True)
class _Message:
    """A posted receive: bytes `begin` to `end` of a chunk."""

    chunk: int
    begin: int
    end: int
    # Shows how much of it has arrived before it is complete, if the transport allows that.
    marks: ReceiveWatermark | None
    request: Any

    def more(self) -> bool:
        """Return whether the message is complete or more of it has arrived than before. Called
        after every step."""
        return self.request.completed or (self.marks is not None and self.marks.passed)

    def upto(self) -> int:
        """Return the number of the chunk's first bytes that have arrived."""
        return self.begin if self.marks is None else self.begin + self.marks.upto()


def _messages(
    part: PartialState, due: Sequence[tuple[int, int]], message_bytes: int
) -> Iterator[tuple[int, int, memoryview, int]]:
    """Yield every message of the read: chunk, end in the chunk, buffer, tag."""
    for index, tag in due:
        memory = part.chunks[index].of(part.data)
        for number, (at, stop) in enumerate(messages_of(len(memory), message_bytes)):
            yield index, stop, memory[at:stop], tag + number


class _Checks:
    """The verification of a partial state's chunks, in a thread of `pool`, or without one in the
    caller's.

    One task of the pool verifies all chunks: a task per chunk would cost the receiving thread a
    fifth of the hashing time.
    """

    def __init__(self, part: PartialState, pool: ThreadPoolExecutor | None) -> None:
        self._part = part
        self._due: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._over: deque[tuple[int, str]] = deque()
        self._now: tuple[int, Verification] | None = None
        self._task = None if pool is None else pool.submit(self._check_due)

    def upto(self, index: int, nbytes: int) -> None:
        """Record that the first `nbytes` of a chunk have arrived."""
        if self._task is None:
            self._check(index, nbytes)
        else:
            self._due.put((index, nbytes))

    def over(self) -> Iterator[tuple[int, str]]:
        """Yield chunks verified since the last call, each with the name of a damaged tensor or
        ""."""
        while self._over:
            yield self._over.popleft()

    def end(self) -> None:
        """Wait until everything that arrived is verified."""
        if self._task is not None:
            self._due.put(None)
            self._task.result()

    def _check_due(self) -> None:
        while (due := self._due.get()) is not None:
            self._check(*due)

    def _check(self, index: int, nbytes: int) -> None:
        chunk = self._part.chunks[index]
        if self._now is None or self._now[0] != index:
            self._now = index, Verification(chunk, self._part.data)
        check = self._now[1]
        check.upto(nbytes)
        if nbytes == chunk.nbytes:
            # Checked again as a whole: bytes may have arrived in a different order than they were
            # hashed.
            self._over.append((index, check.damaged and chunk.damaged(self._part.data)))
            self._now = None


def _core() -> int:
    """Return the core that this thread runs on; -1 where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None).sched_getcpu())
    return -1


def _leave(core: int) -> None:
    """Move this thread away from `core`; afterwards the scheduler may place it as before.

    Linux wakes a thread on its waker's core: otherwise the two would take turns on one core for
    some 4 ms.
    """
    may = os.sched_getaffinity(0)
    if others := may - {core}:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, may)


# How long to wait for the owner to end the stream after all bytes have arrived.
_END_SECONDS: Final = 2.0
# Cores that a TCP read keeps busy: the receiver's, and the kernel's (between containers of one
# host, the sender's). A verifying thread needs a third core.
_BUSY_CORES: Final = 2


@dataclass(frozen=True)
class StateSource:
    """An owner that has the state, or is fetching it."""

    address: str
    stub: transfer_grpc.TransferOwnerStub = field(compare=False)
    # Why UCX cannot be used; "" if it can.
    why_not_ucx: str
    near: bool
    # Number of lanes of one reader to which it sends simultaneously.
    lanes: int = 1
    # Bytes of one message of a chunk; 0: one message per chunk.
    message_bytes: int = 0


def by_messages(
    stub: transfer_grpc.TransferOwnerStub,
    request: transfer_pb.ReadStateRequest,
    part: PartialState,
    arrived: Arrived,
    timeout: float,
) -> None:
    """Read the chunks of `request` in gRPC messages into `part`, calling `arrived` for each.

    Raises TroupeError; chunks that arrived before are kept.
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
                raise Unavailable("a chunk had the wrong length", kind="transfer_cut_short")
        _see_end(stream, messages)
    finally:
        stream.cancel()


def _see_end(stream: Any, messages: Iterator[Any]) -> None:
    """Read the stream to its end. An owner whose stream is cancelled after the last message cannot
    know that everything arrived, and would keep the state for half a minute for another attempt."""
    late = threading.Timer(_END_SECONDS, stream.cancel)
    late.daemon = True
    late.start()
    with contextlib.suppress(TroupeError):
        next(messages, None)
    late.cancel()


class LaneRead:
    """A started read through UCX, in which the owner sends as soon as receives are posted.

    Through shared memory the receiver's core copies: if the owner offers two lanes, two threads
    each receive and verify every other chunk. Otherwise a second thread verifies if a core is free
    for it; if not, chunks arrive in messages that are verified while in the cache.
    """

    def __init__(
        self,
        place: StateSource,
        request: transfer_pb.ReadStateRequest,
        lanes: LanePool,
        timeout: float,
    ) -> None:
        """Raises LaneBroken."""
        self.place, self._lanes = place, lanes
        near, cores = place.near, _cores()
        self._two = near and place.lanes > 1 and cores > 1
        self._verifies_apart = not self._two and (near or cores > _BUSY_CORES)
        self._message_bytes = 0 if self._two or self._verifies_apart else place.message_bytes
        self._taken: list[Lane] = []
        self._first_tag = secrets.randbits(62)
        try:
            self._taken.extend(lanes.take(near=near) for _ in range(2 if self._two else 1))
            request.ClearField("lanes")
            request.lanes.extend(
                transfer_pb.UcxLane(
                    address=lane.address,
                    first_tag=self._first_tag,
                    near=near,
                    message_bytes=self._message_bytes,
                )
                for lane in self._taken
            )
            self._stream = StreamReader(place.stub.ReadState(request, timeout=timeout))
        except BaseException:
            self._give_back(well=False)
            raise

    @property
    def under_way(self) -> bool:
        """Whether the read has neither ended nor been cancelled."""
        return bool(self._taken)

    def described(self, timeout: float) -> transfer_pb.DescribeStateResponse | None:
        """Return the description of the state if the request asked for it. If the owner cannot be
        reached, cancel the read and return None. Raises TroupeError."""
        try:
            first: transfer_pb.StateChunk = self._stream.begins(timeout)
        except NotFound:
            # Nothing was sent.
            self._give_back(well=True)
            raise
        except Unavailable:
            self.cancel()
            return None
        return first.description

    def receive(
        self,
        chunks: Sequence[int],
        part: PartialState,
        arrived: Arrived,
        checker: ThreadPoolExecutor,
    ) -> None:
        """Receive the chunks into `part`, and verify them. A thread of `checker` drives the second
        lane, or verifies the chunks of the only lane. Raises TroupeError or LaneBroken.
        """
        size = self._message_bytes
        tags = PIECE_BYTES // size if size else 1
        due = [(index, self._first_tag + place * tags) for place, index in enumerate(chunks)]
        try:
            if self._two:
                receive_by_two(self._taken, self._stream, due, part, arrived, checker)
            else:
                apart = checker if self._verifies_apart else None
                receive(self._taken[0], self._stream.check, due, part, arrived, apart, size)
        except BaseException as error:
            self.cancel(owner_lives=not isinstance(error, LaneBroken | Unavailable))
            raise
        # All bytes are verified. The owner still releases its file, which takes a tenth of the
        # sending time. The lanes are free after that, but the caller need not wait.
        taken, self._taken = self._taken, []
        self._stream.then(lambda well: self._end(taken, well=well))

    def cancel(self, *, owner_lives: bool = True) -> None:
        """Cancel the read, unless it has ended."""
        if not self._taken:
            return
        owner_lives = owner_lives and self._stream.failure is None
        self._stream.cancel()
        if owner_lives:
            self._give_back(well=False)
            return
        taken, self._taken = self._taken, []
        for lane in taken:
            lane.abandon()

    def _give_back(self, *, well: bool) -> None:
        taken, self._taken = self._taken, []
        self._end(taken, well=well)

    def _end(self, taken: Sequence[Lane], *, well: bool) -> None:
        for lane in taken:
            if well:
                self._lanes.give(lane)
            else:
                lane.close()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
