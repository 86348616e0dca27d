"""How long a trajectory may take, and what of it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class TrajectoryClock:
    """Runs from its making to a deadline. All times are the event loop's, in seconds.

    In a deterministic job it is `patient`: it stands still while the trajectory is with an engine
    or with the reward service, since how long those take, or are away, must not decide how the
    trajectory ends. What is left is the workflow's own time. `longest` bounds all of it.
    """

    def __init__(self, seconds: float, *, longest: float, patient: bool) -> None:
        self._time = asyncio.get_running_loop().time
        self.began = self._time()
        self._seconds = seconds
        self._longest = max(seconds, longest)
        self._patient = patient
        self._away = 0
        self._away_since = 0.0
        self._stood = 0.0
        self._still = 0
        self._still_since = 0.0
        self._skipped = 0.0

    def _now(self) -> float:
        """The loop's time without what was `still`."""
        return (self._still_since if self._still else self._time()) - self._skipped

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing counts, to no limit; branches may be at once."""
        if self._still == 0:
            self._still_since = self._time()
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1
            if self._still == 0:
                self._skipped += self._time() - self._still_since

    @property
    def left(self) -> float:
        """Seconds until the trajectory is late, as it looks now; at most 0 when it is."""
        now = self._now()
        end = self._longest
        if not self._away:
            end = min(end, self._seconds + self._stood)
        return self.began + end - now

    def bound(self, seconds: float) -> float:
        """How long one wait for the infrastructure may take, whose own limit is `seconds`."""
        if self._patient:
            return self.began + self._longest - self._now()
        return min(seconds, self.left)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """The trajectory is with an engine or the reward service; branches may be at once."""
        if not self._patient:
            yield
            return
        if self._away == 0:
            self._away_since = self._now()
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1
            if self._away == 0:
                self._stood += self._now() - self._away_since
