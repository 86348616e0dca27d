"""A UCX worker that one thread at a time drives: tagged messages, an own progress loop.

ucxx's asyncio API reaches a fifth of what its core API does, its progress thread stalls when
cores are contended, and endpoints made through a listener never use the fastest transport; hence
the core API, a loop that sleeps when there is nothing to do, and workers' addresses that the
caller exchanges.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import secrets
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final

from troupe.rpc.errors import NotFound, TroupeError, Unavailable
from troupe.transfer.blob import Verification, messages_of
from troupe.transfer.checksum import PIECE_BYTES
from troupe.transfer.remote.part import Part
from troupe.transfer.remote.said import StreamReader
from troupe.v1 import transfer_pb2 as pb
from troupe.v1 import transfer_pb2_grpc as rpc

log = logging.getLogger(__name__)

# UCX sends 8 KiB at a time over TCP unless told otherwise: a fifth of the speed.
_SEGMENTS: Final = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k"}
# Only these are several times as fast as the loopback, and none of them can tell that its peer
# is dead: UCX leaves them out wherever errors are to be handled.
_NEAR: Final = "sm,self"
# How often a sleeping loop looks whether the other side still lives.
_NAP_MS: Final = 20
_CLOSE_SECONDS: Final = 1.0
# Of lanes whose peer died; see `Lane.abandon`.
_abandoned: Final[list[object]] = []


class LaneBroken(Exception):
    """UCX could not move the bytes; why, in its words."""


@functools.cache
def missing() -> str:
    """Why UCX cannot be used in this process; empty when it can."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx._lib.arr
        import ucxx._lib.libucxx  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error} (pip install 'troupe[ucx]')"
    return ""


def machine() -> str:
    """The same for all processes that run on this kernel; empty when near lanes are of no use."""
    # Who names transports in the environment means them.
    return "" if "UCX_TLS" in os.environ else _boot()


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Lane:
    """One UCX worker, and at most one endpoint. Close it, or use it as a context manager.

    It is meant to be kept: a worker takes 30 ms to start, and UCX maps remote memory and learns
    buffers as it goes. A near one moves bytes through shared memory, between processes of one
    machine; a peer that dies is then noticed by who waits (see `wait`), not by UCX.
    """

    def __init__(self, *, near: bool = False) -> None:
        """Raises `LaneBroken` when UCX cannot start."""
        if why := missing():
            raise LaneBroken(why)
        self.near = near
        # Whether anything has come or gone since the lane was taken.
        self.heard = False
        from ucxx._lib import arr, libucxx

        self._ucx, self._array = libucxx, arr.Array
        given = {
            name: value for name, value in _SEGMENTS.items() if f"UCX_{name}" not in os.environ
        }
        if near:
            given["TLS"] = _NEAR
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        self._endpoint: Any = None
        self._flying: deque[Any] = deque()
        try:
            self._context = libucxx.UCXContext(given, features)
            self._worker = libucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except libucxx.UCXError as error:
            raise LaneBroken(f"UCX does not start: {error}") from error
        self._events = select.poll()
        self._events.register(self._worker.epoll_file_descriptor, select.POLLIN)

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @functools.cached_property
    def address(self) -> bytes:
        """What the other side's `connect` wants."""
        return bytes(memoryview(self._ucx.UCXAddress.create_from_worker(self._worker)))

    def connect(self, address: bytes) -> None:
        """Make messages go to the worker at `address`. Raises `LaneBroken`."""
        try:
            there = self._ucx.UCXAddress.create_from_buffer(address)
            # With error handling a dead peer ends the requests instead of the process.
            self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker, there, not self.near
            )
        except (self._ucx.UCXError, ValueError, RuntimeError) as error:
            raise LaneBroken(f"cannot reach the other worker: {error}") from error

    def send(self, data: memoryview, tag: int) -> Any:
        """Start to send `data`, which must stay as it is until the request is done."""
        request = self._endpoint.tag_send(self._array(data), self._ucx.UCXXTag(tag))
        self._flying.append(request)
        return request

    def receive(self, into: memoryview, tag: int) -> Any:
        """Start to receive the message of `tag` into `into`."""
        request = self._worker.tag_recv(self._array(into), self._ucx.UCXXTag(tag))
        self._flying.append(request)
        return request

    def wait(
        self,
        done: Callable[[], bool],
        *,
        idle: float,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Make progress until `done()`, which is asked after every bit of it and so shall be cheap.

        `meanwhile()` is called whenever there is nothing to do. Raises `LaneBroken` when a request
        failed or nothing at all happened for `idle` seconds, and whatever `done` and `meanwhile`
        raise.
        """
        last, moved = time.monotonic(), False
        # One bit at a time (512 KiB nearby, a segment of TCP): what has come is verified while
        # the next comes. There are thousands of them, so nothing else is done for each.
        while not done():
            if self._worker.progress_once():
                moved = self.heard = True
                continue
            self._settle()
            meanwhile()
            if moved:
                last, moved = time.monotonic(), False
            elif time.monotonic() - last > idle:
                raise LaneBroken(f"nothing arrived for {idle:g} s")
            # (Armed only when nothing has come since.)
            if self._worker.arm():
                self._events.poll(_NAP_MS)
        # Some are done before they are waited for.
        self._settle()

    def close(self) -> None:
        """End all requests: afterwards UCX touches none of their memory."""
        if self._worker is None:
            return
        if self._endpoint is None:
            self._worker.cancel_inflight_requests()
        elif self._endpoint.alive:
            # Ends its requests too. (Cancelled first, closing crashes once the peer is dead.)
            self._endpoint.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(not r.completed for r in self._flying) and time.monotonic() < deadline:
            self._worker.progress()
        self._flying.clear()
        # In this order: an endpoint outlives neither its worker nor that its context.
        self._endpoint = self._worker = self._context = None

    def abandon(self) -> None:
        """`close` where the peer may be dead: of what it was about to send UCX touches nothing.

        Nearby it would: to end a worker ucxx receives what nobody asked for, which kills the
        process when the sender is dead. What was heard from nobody is closed; another one stays,
        with its few file descriptors, until the process ends.
        """
        if not (self.near and self.heard):
            self.close()
        elif self._worker is not None:
            log.warning("a lane of shared memory whose peer died stays open")
            # Nothing that was to be received into is kept: who makes no progress writes nowhere.
            _abandoned.append((self._worker, self._context, self._endpoint))
            self._flying.clear()
            self._endpoint = self._worker = self._context = None

    def _settle(self) -> None:
        """Forget the requests that are done before all others; raise for one that failed.

        (They end in the order in which they began but for a few; all of what fails fails at once.)
        """
        while self._flying and self._flying[0].completed:
            try:
                self._flying.popleft().check_error()
            except self._ucx.UCXError as error:
                raise LaneBroken(f"{type(error).__name__}: {error}") from error


# Each has a UCX worker, some hundred KiB and a few file descriptors.
_MOST_KEPT: Final = 32


class Lanes:
    """Idle lanes by what tells them apart. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._idle: OrderedDict[tuple[bool, bytes], list[Lane]] = OrderedDict()

    def take(self, *, near: bool, address: bytes = b"") -> Lane:
        """An idle lane, connected to `address` unless that is empty, or a new one.

        Raises LaneBroken.
        """
        with self._lock:
            idle = self._idle.get((near, address))
            if idle:
                lane = idle.pop()
                lane.heard = False
                return lane
        lane = Lane(near=near)
        if address:
            try:
                lane.connect(address)
            except BaseException:
                lane.close()
                raise
        return lane

    def give(self, lane: Lane, *, address: bytes = b"") -> None:
        """Back, with no request in flight."""
        with self._lock:
            idle = self._idle.setdefault((lane.near, address), [])
            idle.append(lane)
            self._idle.move_to_end((lane.near, address))
            surplus = [idle.pop()] if self._closed else []
            # Those of readers that did not come back for the longest time go.
            while sum(map(len, self._idle.values())) > _MOST_KEPT:
                surplus += self._idle.popitem(last=False)[1]
        for old in surplus:
            old.close()

    def close(self) -> None:
        """End all that are idle, and those that are given back from now on."""
        with self._lock:
            self._closed = True
            lanes = [lane for idle in self._idle.values() for lane in idle]
            self._idle.clear()
        for lane in lanes:
            lane.close()


# What UCX copies at once out of another process: with where it came from it fits in a core's own
# cache, where it is hashed several times as fast as a whole chunk.
STEP_BYTES: Final = 512 << 10
_WORD: Final = 8
# As likely as any other word to be what comes: then more has come than is seen, no less.
_MARK: Final = secrets.randbits(8 * _WORD)


class ReceiveWatermark:
    """Words at the end of every `step` bytes (a multiple of 8) of the memory to be received into.

    For transports that write in order, in the thread that asks, and whole words between two
    questions, as those within a machine do: what lies before a word that was overwritten has come.
    The rest of the last step is not seen.
    """

    def __init__(self, memory: memoryview, step: int = STEP_BYTES) -> None:
        self._step = step // _WORD
        self._words = memory[: len(memory) // step * step].cast("Q")
        # The next one to be overwritten.
        self._next = self._step - 1
        for place in range(self._next, len(self._words), self._step):
            self._words[place] = _MARK

    @property
    def passed(self) -> bool:
        """Whether more has come than when `upto` was asked last."""
        return self._next < len(self._words) and self._words[self._next] != _MARK

    def upto(self) -> int:
        """So many of the first bytes are here, at the least."""
        while self.passed:
            self._next += self._step
        return (self._next + 1 - self._step) * _WORD


# Called with a chunk and the name of a tensor of it that arrived damaged, "" for none.
Arrived = Callable[[int, str], None]

# Receives that wait ahead of the owner's sends.
_WINDOW: Final = 16
_IDLE_SECONDS: Final = 30.0


def receive_by_two(
    lanes: Sequence[Lane],
    said: StreamReader,
    due: Sequence[tuple[int, int]],
    part: Part,
    arrived: Arrived,
    pool: ThreadPoolExecutor,
) -> None:
    """`receive` by each of two lanes, one of them in a thread of `pool`: every other of `due`.

    Both have ended when this does. Raises what the first of them that failed did.
    """
    lock, failures = threading.Lock(), list[BaseException]()
    core = _core()

    def told(index: int, damaged: str) -> None:
        with lock:
            arrived(index, damaged)

    def check() -> None:
        said.check()
        if failures:
            raise LaneBroken("the other lane of the read failed")

    def take(which: int) -> None:
        try:
            if which:
                _leave(core)
            receive(lanes[which], check, due[which::2], part, told, None)
        except BaseException as error:
            failures.append(error)

    second = pool.submit(take, 1)
    take(0)
    try:
        wait([second])
        if failures:
            raise failures[0]
    except BaseException as error:
        # Also when it is this thread that was interrupted: nobody else may drive the lane then.
        failures.append(error)
        wait([second])
        raise
    finally:
        failures.clear()  # a circle otherwise, with the frames of whoever called


def receive(
    lane: Lane,
    check: Callable[[], object],
    due: Sequence[tuple[int, int]],
    part: Part,
    arrived: Arrived,
    checker: ThreadPoolExecutor | None,
    message_bytes: int = 0,
) -> None:
    """The chunks of `due`, each with its first tag, in order, in messages of `message_bytes` (0:
    each in one). `check` raises why no more will come.

    Without `checker` this thread verifies, nearby each step of what comes while it is in the
    cache, else each message as soon as more is asked for: what comes meanwhile waits in the kernel,
    or at the owner.
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
        # An owner that died ends the stream, whatever UCX has noticed.
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
        # Also what came before it broke; nobody hashes memory that is about to be given back.
        checks.end()
        for index, damaged in checks.over():
            arrived(index, damaged)


@dataclass(slots=True)
class _Message:
    """Bytes of a chunk, from `begin` to `end`, that are asked for."""

    chunk: int
    begin: int
    end: int
    # Where it is told how much of it is here before all of it is.
    marks: ReceiveWatermark | None
    request: Any

    def more(self) -> bool:
        """Whether all of it has come, or more than before. Asked after every bit that comes."""
        return self.request.completed or (self.marks is not None and self.marks.passed)

    def upto(self) -> int:
        """So many of the chunk's first bytes are here."""
        return self.begin if self.marks is None else self.begin + self.marks.upto()


def _messages(
    part: Part, due: Sequence[tuple[int, int]], message_bytes: int
) -> Iterator[tuple[int, int, memoryview, int]]:
    """All that will come: its chunk, how much of that is there after it, into what, its tag."""
    for index, tag in due:
        memory = part.chunks[index].of(part.data)
        for number, (at, stop) in enumerate(messages_of(len(memory), message_bytes)):
            yield index, stop, memory[at:stop], tag + number


class _Checks:
    """Verifies chunks of a part: in a thread of `pool`, without one in the caller's.

    One task of the pool for all of them: one for each would cost the receiving thread as much as
    a fifth of the hashing does.
    """

    def __init__(self, part: Part, pool: ThreadPoolExecutor | None) -> None:
        self._part = part
        self._due: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._over: deque[tuple[int, str]] = deque()
        self._now: tuple[int, Verification] | None = None
        self._task = None if pool is None else pool.submit(self._all)

    def upto(self, index: int, nbytes: int) -> None:
        """The first `nbytes` of the chunk have come."""
        if self._task is None:
            self._check(index, nbytes)
        else:
            self._due.put((index, nbytes))

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
        while (due := self._due.get()) is not None:
            self._check(*due)

    def _check(self, index: int, nbytes: int) -> None:
        chunk = self._part.chunks[index]
        if self._now is None or self._now[0] != index:
            self._now = index, Verification(chunk, self._part.data)
        check = self._now[1]
        check.upto(nbytes)
        if nbytes == chunk.nbytes:
            # Once more as a whole: it may not have come in the order in which it was looked at.
            self._over.append((index, check.damaged and chunk.damaged(self._part.data)))
            self._now = None


def _core() -> int:
    """That this thread runs on; -1 where nobody knows."""
    with contextlib.suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None).sched_getcpu())
    return -1


def _leave(core: int) -> None:
    """Move this thread to another core than `core`, and let it be moved as before.

    Linux wakes a thread where its waker runs: the two took turns on one core for some 4 ms.
    """
    may = os.sched_getaffinity(0)
    if others := may - {core}:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, may)


# All of it is here: nobody waits longer for the owner to say so.
_END_SECONDS: Final = 2.0
# What TCP takes of one host: who receives, and the kernel's side of it (between two containers of
# a host, who sends). A third thread that wants a core then only makes all of them wait.
_BUSY_CORES: Final = 2


@dataclass(frozen=True)
class StateSource:
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
        self, place: StateSource, request: pb.ReadStateRequest, lanes: Lanes, timeout: float
    ) -> None:
        """Raises LaneBroken."""
        self.place, self._lanes = place, lanes
        near, cores = place.near, _cores()
        self._two = near and place.lanes > 1 and cores > 1
        self._beside = not self._two and (near or cores > _BUSY_CORES)
        self._message_bytes = 0 if self._two or self._beside else place.message_bytes
        self._taken: list[Lane] = []
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
            self._said = StreamReader(place.stub.ReadState(request, timeout=timeout))
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
            self.cancel(owner_lives=not isinstance(error, LaneBroken | Unavailable))
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

    def _end(self, taken: Sequence[Lane], *, well: bool) -> None:
        for lane in taken:
            if well:
                self._lanes.give(lane)
            else:
                lane.close()


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
