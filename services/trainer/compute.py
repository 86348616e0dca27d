"""The device of a trainer worker, the one thread that computes on it, and its busy times."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from troupe.user_code import call_contained

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """The compute thread, which runs calls first in, first out, so that the event loop never
    blocks.

    Policies that share a worker take turns by micro-batch. A cancelled caller stops waiting, but
    its call still runs to its end before the next one begins.
    """

    def __init__(self, threads: int, device: torch.device) -> None:
        self.device = device
        # Total seconds of finished calls, and the start time of the current one.
        self._ended_seconds = 0.0
        self._began: float | None = None
        self._clock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(threads,)
        )

    @property
    def busy_seconds(self) -> float:
        """The seconds that the thread has computed so far."""
        with self._clock:
            running = 0.0 if self._began is None else time.perf_counter() - self._began
            return self._ended_seconds + running

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await the result of `call(*args, **kwargs)`."""

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
        """Like `run`, for calls that do not count as busy time, such as loading a state."""
        # Users' environments and models may raise SystemExit, which would end the event loop.
        act = functools.partial(call_contained, call, *args, **kwargs)
        future = asyncio.get_running_loop().run_in_executor(self._pool, act)
        # Marks the exception as retrieved, in case the caller is cancelled.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    def close(self) -> None:
        """Drop calls that have not begun; the current one runs to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class SwapClock:
    """A clock of the device's idle time while policies were suspended and resumed.

    Idle time of overlapping swaps is counted once, for the first swap that ends. Not thread-safe:
    for the event loop.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._open = 0
        self._since = self._busy = 0.0

    @contextlib.contextmanager
    def swapping(self) -> Iterator[Callable[[], float]]:
        """Context of a swap; yields a function that returns the idle seconds that it caused."""
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
    """The busy fraction of the last seconds, from a counter of busy seconds."""

    _WINDOW_SECONDS = 10.0

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def fraction(self, busy: float) -> float:
        """Return the busy fraction of the window that ends now; call it about once a second."""
        now = time.monotonic()
        self._seen.append((now, busy))
        while len(self._seen) > 2 and self._seen[1][0] < now - self._WINDOW_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        return min(1.0, (busy - before) / (now - since)) if now > since else 0.0


def memory_of(device: torch.device, setting: int) -> int:
    """Return the bytes of `device` that policies may use: `setting`, or all that it has; 0:
    unbounded."""
    return setting or gpu_memory(device) or 0


def gpu_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of a GPU; 0 if they are unknown, None for a CPU."""
    if device.type == "cpu":
        return None
    there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if there else 0


def give_back_memory() -> None:
    """Give GPU memory that is free in this process back to the driver, for other processes."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()  # modules refer to themselves through their hooks
        torch.cuda.empty_cache()


def choose_device(name: str) -> torch.device:
    """Return the torch device of a setting; "auto": the first GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # Deterministic cuBLAS needs this variable, which is read at the first use of the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)
