"""Ctrl-C and SIGTERM during a command: each signal interrupts the work in progress, so that the
first can end it in order and the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """Raised by `Interrupts.guard` when a signal came before the work was done."""


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP of this process; a context manager (main thread only).

    A signal cancels the work that `guard` awaits; between guards it is kept for the next one.
    """

    def __init__(self) -> None:
        """Handlers are installed by `__enter__`."""
        self.signal: signal.Signals | None = None
        self._pending = asyncio.Event()

    @property
    def status(self) -> int:
        """The exit status by the shell's convention: 130 after Ctrl-C."""
        return 128 + (self.signal or signal.SIGINT)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or `Interrupted` when a signal comes first.

        `work` is cancelled then, and awaited, so that its clean-up is done.
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
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _received(self, number: signal.Signals) -> None:
        self.signal = self.signal or number
        self._pending.set()
