"""Waits of tests: for the very condition that they assert, with a deadline for busy machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# Seconds until a test gives a condition up. Other work may take all cores of a machine for minutes.
PATIENCE: Final = 200.0


async def until(condition: Callable[[], object], pause: float = 0.005) -> None:
    """Wait until `condition()` holds; look every `pause` seconds. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what tests look at has no event
            await asyncio.sleep(pause)
