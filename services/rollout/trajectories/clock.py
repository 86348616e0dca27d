"""How long a trajectory may take, and what of it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class _Pause:
    """Time that passes while at least one branch is in it, `without` what another one takes."""

    def __init__(self, time: Callable[[], float], without: _Pause | None = None) -> None:
        self._time, self._without = time, without
        self._inside = 0
        self._since = self._over = 0.0

    def now(self) -> float:
        """The time by which it is measured."""
        return self._time() - (self._without.total if self._without else 0.0)

    @property
    def on(self) -> bool:
        """Whether a branch is in it."""
        return self._inside > 0

    @property
    def total(self) -> float:
        """Seconds so far."""
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
    """Runs from its making to a deadline. All times are the event loop's, in seconds.

    In a deterministic job it is `patient`: it stands still while the trajectory is with an engine
    or with the reward service, since how long those take, or are away, must not decide how the
    trajectory ends. What is left is the workflow's own time. `longest` bounds all of it.
    """

    def __init__(self, seconds: float, *, longest: float, patient: bool) -> None:
        time = asyncio.get_running_loop().time
        self.began = time()
        self._seconds = seconds
        self._longest = max(seconds, longest)
        self._patient = patient
        self._still = _Pause(time)
        self._away = _Pause(time, without=self._still)

    def still(self) -> AbstractContextManager[None]:
        """Nothing counts, to no limit; branches may be at once."""
        return self._still()

    @property
    def left(self) -> float:
        """Seconds until the trajectory is late, as it looks now; at most 0 when it is."""
        now = self._away.now()  # without what was `still`
        end = self._longest
        if not self._away.on:
            end = min(end, self._seconds + self._away.total)
        return self.began + end - now

    def bound(self, seconds: float) -> float:
        """How long one wait for the infrastructure may take, whose own limit is `seconds`."""
        if self._patient:
            return self.began + self._longest - self._away.now()
        return min(seconds, self.left)

    def elsewhere(self) -> AbstractContextManager[None]:
        """The trajectory is with an engine or the reward service; branches may be at once."""
        return self._away() if self._patient else nullcontext()
