"""Connections through UCX: tagged messages, and a progress loop driven by one thread at a time.

A *lane* is a UCX worker with at most one endpoint.

ucxx's asyncio API reaches a fifth of the speed of its core API, its progress thread stalls when
cores are contended, and endpoints made through a listener never use the fastest transport. So this
module uses the core API, a loop that sleeps when idle, and worker addresses that the caller
exchanges.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

# UCX sends 8 KiB at a time over TCP unless told otherwise: a fifth of the speed.
_SEGMENTS: Final = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k"}
# Only these are several times as fast as the loopback, but none of them notices the death of its
# peer: UCX leaves them out if errors have to be handled.
_NEAR: Final = "sm,self"
# How often a sleeping loop checks whether the other side still lives.
_NAP_MS: Final = 20
_CLOSE_SECONDS: Final = 1.0
# Resources of lanes whose peer died; see `Lane.abandon`.
_abandoned: Final[list[object]] = []


class LaneBroken(Exception):
    """UCX failed to move bytes; the text is its own."""


@functools.cache
def missing() -> str:
    """Return why UCX cannot be used in this process; "" if it can."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx._lib.arr
        import ucxx._lib.libucxx  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error} (`pip install 'troupe-rl[ucx]'`)"
    return ""


def machine() -> str:
    """Return an id shared by all processes on this kernel; "" if near lanes must not be used."""
    # Transports that the environment names are used unchanged.
    return "" if "UCX_TLS" in os.environ else _boot()


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Lane:
    """One UCX worker, and at most one endpoint. Close it, or use it as a context manager.

    Lanes are kept for reuse: a worker takes 30 ms to start, and UCX maps remote memory and learns
    buffers as it goes. A near lane moves bytes through shared memory, between processes of one
    machine; then the death of a peer is noticed by the waiting thread (see `wait`), not by UCX.
    """

    def __init__(self, *, near: bool = False) -> None:
        """Start a worker. Raises `LaneBroken` if UCX cannot start."""
        if why := missing():
            raise LaneBroken(why)
        self.near = near
        # Whether any message was sent or received since the lane was taken from the pool.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    @functools.cached_property
    def address(self) -> bytes:
        """The worker's address, for `connect` of the other side."""
        return bytes(memoryview(self._ucx.UCXAddress.create_from_worker(self._worker)))

    def connect(self, address: bytes) -> None:
        """Send messages to the worker at `address` from now on. Raises `LaneBroken`."""
        try:
            there = self._ucx.UCXAddress.create_from_buffer(address)
            # With error handling, a dead peer ends the requests instead of the process.
            self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker, there, not self.near
            )
        except (self._ucx.UCXError, ValueError, RuntimeError) as error:
            raise LaneBroken(f"cannot reach the other worker: {error}") from error

    def send(self, data: memoryview, tag: int) -> Any:
        """Start to send `data`, which must not change until the request is done."""
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
        """Make progress until `done()`, which is called after every step and so must be cheap.

        `meanwhile()` is called whenever there is nothing to do. Raises `LaneBroken` if a request
        failed or nothing happened for `idle` seconds, and the errors of `done` and `meanwhile`.
        """
        last, moved = time.monotonic(), False
        # One step at a time (512 KiB of shared memory, or a TCP segment), so that arrived bytes are
        # verified while more arrive. There are thousands of steps, so each does nothing else.
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
            # (Armed only if nothing has arrived since.)
            if self._worker.arm():
                self._events.poll(_NAP_MS)
        # Some requests are done before they are waited for.
        self._settle()

    def close(self) -> None:
        """End all requests; afterwards UCX does not touch their memory."""
        if self._worker is None:
            return
        if self._endpoint is None:
            self._worker.cancel_inflight_requests()
        elif self._endpoint.alive:
            # Also ends its requests. (After cancelling them, closing would crash if the peer is
            # dead.)
            self._endpoint.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(not r.completed for r in self._flying) and time.monotonic() < deadline:
            self._worker.progress()
        self._flying.clear()
        # In this order: an endpoint must not outlive its worker, nor a worker its context.
        self._endpoint = self._worker = self._context = None

    def abandon(self) -> None:
        """Close a lane whose peer may be dead, without touching the messages that the peer was
        sending.

        To end a near worker, ucxx receives unexpected messages, which kills the process when their
        sender is dead. A lane on which nothing was received is closed; another one stays open,
        with its few file descriptors, until the process ends.
        """
        if not (self.near and self.heard):
            self.close()
        elif self._worker is not None:
            log.warning("a shared-memory lane stays open because its peer died")
            # Receive buffers are not kept: without progress nothing is written to them.
            _abandoned.append((self._worker, self._context, self._endpoint))
            self._flying.clear()
            self._endpoint = self._worker = self._context = None

    def _settle(self) -> None:
        """Forget completed requests at the head of the queue; raise for one that failed.

        (Requests complete nearly in the order in which they began, and fail all at once.)
        """
        while self._flying and self._flying[0].completed:
            try:
                self._flying.popleft().check_error()
            except self._ucx.UCXError as error:
                raise LaneBroken(f"{type(error).__name__}: {error}") from error


# Each lane has a UCX worker, some hundred KiB and a few file descriptors.
_MOST_KEPT: Final = 32


class LanePool:
    """Idle lanes by kind and remote address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._idle: OrderedDict[tuple[bool, bytes], list[Lane]] = OrderedDict()

    def take(self, *, near: bool, address: bytes = b"") -> Lane:
        """Return an idle lane, connected to `address` unless that is empty, or a new one.

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
        """Return a lane without requests in flight to the pool."""
        with self._lock:
            idle = self._idle.setdefault((lane.near, address), [])
            idle.append(lane)
            self._idle.move_to_end((lane.near, address))
            surplus = [idle.pop()] if self._closed else []
            # The least recently used lanes are closed.
            while sum(map(len, self._idle.values())) > _MOST_KEPT:
                surplus += self._idle.popitem(last=False)[1]
        for old in surplus:
            old.close()

    def close(self) -> None:
        """Close all idle lanes, and lanes that are returned from now on."""
        with self._lock:
            self._closed = True
            lanes = [lane for idle in self._idle.values() for lane in idle]
            self._idle.clear()
        for lane in lanes:
            lane.close()
