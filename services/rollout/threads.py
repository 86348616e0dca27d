"""Threads for what blocks: as many as are asked for, and nobody waits for their end.

Tasks and workflows are the users' code, and what they run in a thread may never return. In a pool
each such call would take a thread from all jobs for good, until not even weights could be loaded,
and at last the process would wait for it instead of ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """An executor for `loop.set_default_executor`, which insists on this base class; it pools
    nothing."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread of its own."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                # SystemExit, raised where the result is awaited, would end the event loop.
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                future.set_result(result)

        threading.Thread(target=run, name="blocking-call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The threads end with their calls, or with the process."""
