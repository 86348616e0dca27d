"""What happened to environments in this process: counted here, shown by whoever serves metrics."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

Event = Literal["resets", "steps", "retries", "faults", "kills", "starts", "illegal_moves"]


class Counters:
    """Counts per (event, environment).

    `resets`, `steps`: that succeeded. `retries`: further attempts of a reset. `faults`: failures of
    any kind, those that a retry cured included. `kills`: processes killed at a deadline. `starts`:
    processes started. `illegal_moves`: of players.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[Event, str]] = Counter()

    def count(self, event: Event, environment: str, by: int = 1) -> None:
        """Something happened."""
        self._counts[event, environment] += by

    def of(self, event: Event, environment: str | None = None) -> int:
        """How often; over all environments if none is named."""
        return sum(
            count
            for (what, whose), count in self._counts.items()
            if what == event and environment in (None, whose)
        )

    def all(self) -> dict[tuple[Event, str], int]:
        """A copy of everything."""
        return dict(self._counts)


COUNTERS: Final = Counters()
"""Those of this process."""
