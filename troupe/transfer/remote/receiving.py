"""Chunks that come through UCX: received, and verified while the next ones come."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, Final

from troupe.transfer.remote import lane as ucx
from troupe.transfer.remote.part import Part
from troupe.transfer.remote.said import Said

# Called with a chunk and the name of a tensor of it that arrived damaged, "" for none.
Arrived = Callable[[int, str], None]

# Receives that wait ahead of the owner's sends.
_WINDOW: Final = 8
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
) -> None:
    """The chunks of `due`, each with its tag, in order. `check` raises why no more will come.

    Without `checker` this thread verifies, as soon as more is asked for: what comes meanwhile
    waits in the kernel, or at the owner.
    """
    flying: deque[tuple[int, Any]] = deque()
    checks = _Checks(part, checker)
    asked = 0

    def ask() -> None:
        nonlocal asked
        while asked < len(due) and len(flying) < _WINDOW:
            index, tag = due[asked]
            flying.append((index, lane.receive(part.chunks[index].of(part.data), tag)))
            asked += 1

    def done() -> bool:
        return bool(flying[0][1].completed)

    def lives() -> None:
        # An owner that died ends the stream, whatever UCX has noticed.
        if not done():
            check()

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
