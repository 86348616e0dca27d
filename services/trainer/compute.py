"""The one thread in which a worker computes, so that its event loop always answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """Runs calls one after another, in the order in which they were asked for.

    Policies that share a worker take turns by micro-batch. A caller that is cancelled stops
    waiting; its call still ends before the next one begins.
    """

    def __init__(self, threads: int, device: torch.device) -> None:
        self.device = device
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `call(*args, **kwargs)`."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))
        # What it raises concerns nobody once its caller was cancelled: asking marks it as seen.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    def close(self) -> None:
        """Drop what has not begun; what runs is left to finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def choose_device(name: str) -> torch.device:
    """ "auto": the first GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # Read when the GPU is used first; without it deterministic jobs would be refused.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)
