"""The deadline of a trajectory, and the time that counts towards it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class _Pause:
    """A stopwatch of the time during which at least one branch is inside the context, minus the
    time of `without`."""

    def __init__(self, time: Callable[[], float], without: _Pause | None = None) -> None:
        self._time, self._without = time, without
        self._inside = 0
        self._since = self._over = 0.0

    def now(self) -> float:
        """Return the time of its clock, in seconds."""
        return self._time() - (self._without.total if self._without else 0.0)

    @property
    def on(self) -> bool:
        """Whether a branch is inside."""
        return self._inside > 0

    @property
    def total(self) -> float:
        """The seconds counted so far."""
        return self._over + (self.now() - self._since if self._inside else 0.0)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._inside:
            self._since = self.now()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._over += self.now() - self._since


class TrajectoryClock:
    """A deadline `seconds` after its creation. All times are the event loop's, in seconds.

    In a deterministic job the clock is `patient`: it stops while the trajectory waits for an engine
    or the reward service, since their speed must not decide how the trajectory ends. Then only the
    workflow's own time counts. `longest` bounds the total time.
    """

    def __init__(self, seconds: float, *, longest: float, patient: bool) -> None:
        time = asyncio.get_running_loop().time
        self.began = time()
        self._seconds = seconds
        self._longest = max(seconds, longest)
        self._patient = patient
        self._paused = _Pause(time)
        self._outside = _Pause(time, without=self._paused)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which time does not count towards any limit; branches may overlap."""
        return self._paused()

    @property
    def left(self) -> float:
        """Seconds of counted time until the deadline; at most 0 when it has passed."""
        now = self._outside.now()  # without paused time
        end = self._longest
        if not self._outside.on:
            end = min(end, self._seconds + self._outside.total)
        return self.began + end - now

    def bound(self, seconds: float) -> float:
        """Return how long a wait for an engine or the reward service may take, given a limit
        `seconds`."""
        if self._patient:
            return self.began + self._longest - self._outside.now()
        return min(seconds, self.left)

    def outside(self) -> AbstractContextManager[None]:
        """Return the context of a wait for an engine or the reward service; branches may
        overlap."""
        return self._outside() if self._patient else nullcontext()
