"""The one thread in which a worker computes, so that its event loop always answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

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
        # Seconds that the thread was at work; of what runs now, not yet.
        self.busy_seconds = 0.0
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `call(*args, **kwargs)`."""
        loop = asyncio.get_running_loop()

        def timed() -> T:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.busy_seconds += time.perf_counter() - began

        future = loop.run_in_executor(self._pool, timed)
        # What it raises concerns nobody once its caller was cancelled: asking marks it as seen.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    def close(self) -> None:
        """Drop what has not begun; what runs is left to finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Usage:
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
