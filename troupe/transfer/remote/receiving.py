"""Chunks that come through UCX: received, and verified while the next ones come."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final

from troupe.transfer.chunks import Verification, messages_of
from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.marks import Marks
from troupe.transfer.remote.part import Part
from troupe.transfer.remote.said import Said

# Called with a chunk and the name of a tensor of it that arrived damaged, "" for none.
Arrived = Callable[[int, str], None]

# Receives that wait ahead of the owner's sends.
_WINDOW: Final = 16
_IDLE_SECONDS: Final = 30.0


def receive_by_two(
    lanes: Sequence[ucx.Lane],
    said: Said,
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
            raise ucx.LaneBroken("the other lane of the read failed")

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
    lane: ucx.Lane,
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
            marks = Marks(memory) if marked else None
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
    marks: Marks | None
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
