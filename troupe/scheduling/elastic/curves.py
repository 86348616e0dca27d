"""Speed-up curves: the duration of a function by its number of units of a resource, learned from
its runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from troupe.scheduling.elastic.decision import Elastic

_LEAST_SECONDS = 1e-6
# Below this variance of 1/m, relative to its squared mean, the runs had one level and say nothing
# about the shape. Runs at another level are forgotten after about a hundred.
_SPREAD = 1e-3
# While the shape is unknown, one in so many calls explores another level, one at a time,
_EVERY = 8
# chosen by multiplicative hashing, since a function may only ever see every second call,
_MIXER = 2654435761
# with at least so many times fewer units, or more units if there are no fewer.
_APART = 4


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """`seconds(m) = serial + parallel / m` for one version of a function (Amdahl 1967).

    Equals ARL-Tangram's `T1 / (E(m) m)` with `E(m) = (serial + parallel) / (m serial + parallel)`,
    which is always within 0 .. 1. Before there are runs at two levels, the shape is the declared
    `parallel_fraction` and only the scale follows the runs; later the shape is learned, as far as
    runs differ by more than their noise. A run's weight decays by `memory` with every later run.
    """

    parallel_fraction: float = 0.0
    seconds_at_one: float = 1.0
    memory: float = 0.95
    # Weighted sums over runs, with x = 1/m and y = seconds.
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.parallel_fraction <= 1:
            raise ValueError(f"parallel_fraction = {self.parallel_fraction} is not within 0 .. 1")
        if self.seconds_at_one <= 0:
            raise ValueError(f"seconds_at_one = {self.seconds_at_one} is not positive")
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory = {self.memory} is not within (0, 1]")

    def observed(self, level: int, seconds: float) -> SpeedUp:
        """Return the curve with one more run: `seconds` with `level` units. Raises ValueError."""
        if level < 1 or not 0 <= seconds < float("inf"):
            raise ValueError(f"no run of {seconds} s with {level} units")
        x, keep = 1.0 / level, self.memory
        return replace(
            self,
            _n=keep * self._n + 1.0,
            _x=keep * self._x + x,
            _y=keep * self._y + seconds,
            _xx=keep * self._xx + x * x,
            _xy=keep * self._xy + x * seconds,
            _yy=keep * self._yy + seconds * seconds,
        )

    @property
    def explored(self) -> bool:
        """Whether the runs had levels that differ enough to determine the shape."""
        squared = self._x * self._x
        return self._n * self._xx - squared > _SPREAD * squared

    def offered(
        self, levels: Sequence[int], nth: int = 0, *, most: int = sys.maxsize, explore: bool = True
    ) -> tuple[int, ...]:
        """Return the levels (ascending) that the next run may have; `nth` counts the calls. `most`:
        units of the largest host that it may run on. `explore`: no other call explores now.

        All of them, unless all runs had one level: then the other levels are known only by a
        declaration, which would choose that level again. So one call in `_EVERY` explores another
        level: not every waiting call, and not the most distant level, which could take very long.
        A level that no host has is not explored: the call would wait for ever, and all behind it.
        Nor do several calls explore at once: one says enough, and each may take many times longer.
        """
        if not (explore and self._n) or self.explored or (nth * _MIXER >> 16) % _EVERY:
            return tuple(levels)
        seen = round(self._n / self._x, 6)
        lower = max((m for m in levels if m <= seen / _APART), default=levels[0])
        higher = min((m for m in levels if m >= seen * _APART), default=levels[-1])
        # Fewer cores take nothing from others; more only where there are no fewer.
        chosen = lower if lower <= seen / 2 or higher <= seen else higher
        return (chosen,) if chosen <= most else tuple(levels)

    @property
    def line(self) -> tuple[float, float]:
        """(serial, parallel) in seconds, neither negative.

        Least squares over the runs, blended with the declared shape by how far the fit exceeds the
        noise: durations of one function differ by more than a few cores change them.
        """
        fraction = self.parallel_fraction
        if not self._n:
            return self.seconds_at_one * (1 - fraction), self.seconds_at_one * fraction
        # The declared shape 1 - f + f/m, scaled by least squares.
        inner = (1 - fraction) * self._y + fraction * self._xy
        square = (1 - fraction) ** 2 * self._n + fraction**2 * self._xx
        at_one = inner / (square + 2 * fraction * (1 - fraction) * self._x)
        declared = at_one * (1 - fraction), at_one * fraction
        if not self.explored or self._n <= 2:  # any two runs lie on a line
            return declared
        spread = self._xx - self._x * self._x / self._n
        slope = (self._xy - self._y * self._x / self._n) / spread
        residual = max(0.0, self._yy - self._y * self._y / self._n - slope * slope * spread)
        # Squared standard error of the slope, against the squared distance from the declared one.
        doubt = residual / (self._n - 2) / spread
        apart = (slope - declared[1]) ** 2
        trust = apart / (apart + doubt) if apart + doubt > 0 else 1.0
        fitted = self._fitted(slope)
        return (
            trust * fitted[0] + (1 - trust) * declared[0],
            trust * fitted[1] + (1 - trust) * declared[1],
        )

    def _fitted(self, parallel: float) -> tuple[float, float]:
        serial = (self._y - parallel * self._x) / self._n
        if parallel < 0:  # more units made it slower
            return self._y / self._n, 0.0
        if serial < 0:
            return 0.0, self._xy / self._xx
        return serial, parallel

    def seconds(self, levels: Sequence[int]) -> tuple[float, ...]:
        """Return the expected duration at each of `levels`, at least a microsecond."""
        serial, parallel = self.line
        return tuple(max(_LEAST_SECONDS, serial + parallel / level) for level in levels)

    def elastic(
        self,
        resource: str,
        levels: tuple[int, ...],
        nth: int = 0,
        *,
        lowest: float = 0.0,
        most: int = sys.maxsize,
        explore: bool = True,
    ) -> Elastic:
        """Return the `Elastic` of the `nth` call: all of `levels`, or the one to explore. `lowest`:
        known seconds of this call at the lowest level; 0: as others. `most` and `explore` as in
        `offered`."""
        offered = self.offered(levels, nth, most=most, explore=explore)
        known = _elastic(self, resource, offered)
        if not lowest:
            return known
        scale = lowest / self.seconds(levels[:1])[0]
        return Elastic(resource, known.levels, tuple(scale * s for s in known.seconds))


@lru_cache(maxsize=1024)
def _elastic(curve: SpeedUp, resource: str, levels: tuple[int, ...]) -> Elastic:
    # Shared by all waiting calls of a function, since every decision looks at it.
    return Elastic(resource, levels, curve.seconds(levels))
