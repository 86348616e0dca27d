"""Ctrl-C and SIGTERM, in order: the first asks, the second insists."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal came while something was awaited."""


class Interrupts:
    """Takes the signals of this process for as long as it is entered (in the main thread).

    A signal ends what `guard` awaits; between guards it is remembered for the next one.
    """

    def __init__(self) -> None:
        """Nothing is taken yet."""
        self.signal: signal.Signals | None = None
        self._pending = asyncio.Event()

    @property
    def status(self) -> int:
        """The exit status by the shell's convention: 130 after Ctrl-C."""
        return 128 + (self.signal or signal.SIGINT)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; `Interrupted` when a signal comes first, `work` cancelled then.

        The cancelled `work` is awaited: what it cleans up is clean afterwards.
        """
        task = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._pending.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._pending.clear()
            raise Interrupted
        finally:
            waiting.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        self.signal = self.signal or number
        self._pending.set()
