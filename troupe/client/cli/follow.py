"""Follows a job on the terminal: events in, display out."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Protocol, Self

from rich.console import Console

from troupe.client.cli.live import LiveDisplay
from troupe.client.cli.plain import PlainDisplay
from troupe.client.cli.progress import Progress
from troupe.client.events import Event, MetricsLogged
from troupe.client.handle import AsyncJobHandle

# An event this young is news; clocks of two machines may differ by some seconds.
_FRESH_SECONDS = 30.0


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
        # Versions are in the ledger, not in the log; in a replay they would all be today's.
        if isinstance(event, MetricsLogged) and _fresh(event.at):
            progress.update_versions((await handle.info()).versions)
        if since is None or event.at >= since:
            display.show(progress, event)


def _fresh(at: datetime) -> bool:
    return (datetime.now(UTC) - at).total_seconds() < _FRESH_SECONDS
