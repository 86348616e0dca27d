"""The one thread in which a worker computes, so that its event loop always answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from troupe.user_code import call_contained

# Of a GPU's memory.
_STATE_SHARE = 0.75

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """Runs calls one after another, in the order in which they were asked for.

    Policies that share a worker take turns by micro-batch. A caller that is cancelled stops
    waiting; its call still ends before the next one begins.
    """

    def __init__(self, threads: int, device: torch.device) -> None:
        self.device = device
        # Of calls that have ended; and when the one that runs began.
        self._ended_seconds = 0.0
        self._began: float | None = None
        self._clock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(threads,)
        )

    @property
    def busy_seconds(self) -> float:
        """How long the thread has computed so far."""
        with self._clock:
            running = 0.0 if self._began is None else time.perf_counter() - self._began
            return self._ended_seconds + running

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `call(*args, **kwargs)`."""

        def timed() -> T:
            began = self._began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                with self._clock:
                    self._ended_seconds += time.perf_counter() - began
                    self._began = None

        return await self.hold(timed)

    async def hold(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, of what keeps the thread from computing."""
        # Environments and models of users may raise what would end the event loop.
        act = functools.partial(call_contained, call, *args, **kwargs)
        future = asyncio.get_running_loop().run_in_executor(self._pool, act)
        # What it raises concerns nobody once its caller was cancelled: asking marks it as seen.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    def close(self) -> None:
        """Drop what has not begun; what runs is left to finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Standstill:
    """How long a device computed nothing, for whichever policy, while policies came or went.

    What several that come and go at once kept it from computing is counted once: by the first of
    them that is done. Of the event loop.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._open = 0
        self._since = self._busy = 0.0

    @contextlib.contextmanager
    def of_swap(self) -> Iterator[Callable[[], float]]:
        """A swap is under way; asked at its end, the seconds that are its own."""
        if not self._open:
            self._mark()
        self._open += 1
        try:
            yield self._take
        finally:
            self._open -= 1

    def _take(self) -> float:
        since, busy = self._since, self._busy
        self._mark()
        return max(0.0, self._since - since - (self._busy - busy))

    def _mark(self) -> None:
        self._since, self._busy = time.perf_counter(), self._compute.busy_seconds


class BusyFraction:
    """Which fraction of the last seconds something was busy, from how long it was in all."""

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._seen: deque[tuple[float, float]] = deque()

    def fraction(self, busy: float) -> float:
        """Over the window that ends now; to be asked about once a second."""
        now = time.monotonic()
        self._seen.append((now, busy))
        while len(self._seen) > 2 and self._seen[1][0] < now - self._window:
            self._seen.popleft()
        since, before = self._seen[0]
        return min(1.0, (busy - before) / (now - since)) if now > since else 0.0


def memory_of(device: torch.device, setting: int) -> int:
    """Bytes of training state that fit on `device`; 0: not bounded."""
    if setting or device.type != "cuda":
        return setting
    # What passes keep meanwhile (activations, logits) needs the rest.
    return int(torch.cuda.get_device_properties(device).total_memory * _STATE_SHARE)


def choose_device(name: str) -> torch.device:
    """ "auto": the first GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # Read when the GPU is used first; without it deterministic jobs would be refused.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)
