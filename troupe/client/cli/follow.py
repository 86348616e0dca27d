"""Follows a job on the terminal: events in, display out."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Protocol, Self

from rich.console import Console

from troupe.client.cli.live import LiveDisplay
from troupe.client.cli.plain import PlainDisplay
from troupe.client.cli.progress import Progress
from troupe.client.events import Event
from troupe.client.handle import AsyncJobHandle


class Display(Protocol):
    """Shows progress, somehow."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def say(self, text: str) -> None:
        """One line for people."""

    def show(self, progress: Progress, event: Event) -> None:
        """`event` has been applied to `progress`."""


def make_display(console: Console) -> Display:
    """A live picture on a terminal, lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(sys.stdout)


async def follow(
    handle: AsyncJobHandle,
    progress: Progress,
    display: Display,
    since: datetime | None = None,
) -> None:
    """Show the job until it has ended; events before `since` are taken in but not shown."""
    async for event in handle.watch():
        progress.apply(event)
        if since is None or event.at >= since:
            display.show(progress, event)
