"""Waits of tests: for the very condition that they assert, with a deadline for busy machines."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Final

# Seconds until a test gives a condition up. Other work may take all cores of a machine for minutes.
PATIENCE: Final = 200.0


async def until(condition: Callable[[], object], pause: float = 0.005) -> None:
    """Wait until `condition()`, awaited if need be, holds; look every `pause` seconds.

    Raises TimeoutError.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            held = condition()
            if inspect.isawaitable(held):
                held = await held
            if held:
                return
            await asyncio.sleep(pause)


def block_until(condition: Callable[[], object], pause: float = 0.005) -> None:
    """Block the thread until `condition()` holds; look every `pause` seconds.

    Raises TimeoutError.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {PATIENCE:g} s")
        time.sleep(pause)
