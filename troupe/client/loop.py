"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from troupe.rpc import FailedPrecondition

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for blocking callers; any thread may call."""

    def __init__(self, name: str) -> None:
        """Starts the thread; `close` ends it. It never keeps a program from exiting."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or its exception. Ctrl-C cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call from the client's own event loop would never end")
        if self._loop.is_closed():
            work.close()
            raise FailedPrecondition(
                "the client is closed",
                kind="client_closed",
                remedy="Call before it is closed, or open another.",
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items one by one; a caller that stops early closes `items`."""
        done = object()

        async def following() -> T | object:
            return await anext(items, done)

        try:
            while (item := self.run(following())) is not done:
                yield item  # type: ignore[misc]
        finally:
            if (close := getattr(items, "aclose", None)) is not None and not (
                self._loop.is_closed()
            ):
                with suppress(CancelledError):
                    self.run(close())

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._loop.is_closed():
            return
        self.run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
