"""How much faster a function runs with more of a resource: learned from the runs that it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Below this variance of 1/m, relative to its squared mean, the runs say nothing about the shape:
# they had all the same level. Runs at another level are forgotten after some hundred.
_SPREAD = 1e-3


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """`seconds(m) = serial + parallel / m` for one version of a function (Amdahl 1967).

    It is ARL-Tangram's `T1 / (E(m) m)` with `E(m) = (serial + parallel) / (m serial + parallel)`,
    which is within 0 .. 1 by itself. Before there are runs at two levels the shape is the declared
    one (`parallel_fraction`), and only its scale follows the runs. Older runs count less: with a
    weight of `memory` per run that came after.
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

    def __post_init__(self) -> None:
        if not 0 <= self.parallel_fraction <= 1:
            raise ValueError(f"parallel_fraction = {self.parallel_fraction} is not within 0 .. 1")
        if self.seconds_at_one <= 0:
            raise ValueError(f"seconds_at_one = {self.seconds_at_one} is not positive")
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory = {self.memory} is not within (0, 1]")

    def observed(self, level: int, seconds: float) -> SpeedUp:
        """With one more run: it took `seconds` with `level` units. Raises ValueError."""
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
        )

    @property
    def explored(self) -> bool:
        """Whether the runs had levels that differ enough to tell the shape."""
        squared = self._x * self._x
        return self._n * self._xx - squared > _SPREAD * squared

    def offered(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Those of `levels` (ascending) that the next run may have.

        All; but where runs had one level only, what is known of the others is a declaration that
        decides for that level again: then the end of `levels` that is farther from it.
        """
        if not self._n or self.explored:
            return tuple(levels)
        seen = self._x / self._n
        return (max(levels[0], levels[-1], key=lambda level: abs(1.0 / level - seen)),)

    @property
    def line(self) -> tuple[float, float]:
        """(serial, parallel) in seconds, neither negative: least squares over the runs."""
        declared = self.seconds_at_one * (1 - self.parallel_fraction)
        if not self._n:
            return declared, self.seconds_at_one - declared
        spread = self._xx - self._x * self._x / self._n
        if not self.explored:
            # One level: the declared shape, scaled.
            shape = 1 - self.parallel_fraction + self.parallel_fraction * self._x / self._n
            at_one = self._y / self._n / shape
            return at_one * (1 - self.parallel_fraction), at_one * self.parallel_fraction
        parallel = (self._xy - self._x * self._y / self._n) / spread
        serial = (self._y - parallel * self._x) / self._n
        if parallel < 0:  # more made it slower: nothing to be gained
            return self._y / self._n, 0.0
        if serial < 0:
            return 0.0, self._xy / self._xx
        return serial, parallel

    def seconds(self, levels: Sequence[int], *, least: float = 1e-6) -> tuple[float, ...]:
        """Expected duration at each of `levels`, at least `least`."""
        serial, parallel = self.line
        return tuple(max(least, serial + parallel / level) for level in levels)
