"""How many turns an engine gets at once: as many as still make it faster.

More turns at once are drawn faster together and slower each, until memory bandwidth, cores or the
cache of keys and values are used up; beyond that a further turn only waits inside the engine, where
nobody can prefer another one or send it elsewhere. The limit follows what is observed, as in TCP
and in Netflix' concurrency-limits (https://github.com/Netflix/concurrency-limits, Gradient2): small
steps up while there is demand, a multiplicative step down. What is followed differs: latency of a
batching server grows with its load by nature, so the gradient is that of throughput.

With n turns at once a token takes t(n) = a + b n seconds, so throughput is n / t(n) (Little's law)
and its elasticity to n is a / t(n). It falls to `LEAST_GAIN` at n = a (1 - g) / (b g), which
maximizes Kleinrock's power throughput^k / t for k = (1 - g) / g (Kleinrock 1979, "Power and
deterministic rules of thumb for probabilistic problems in computer communications"). Where the
engine thrashes t grows faster than n, the fitted a becomes negative, and the limit falls until it
no longer does.
"""

from __future__ import annotations

from typing import Final

# A further 1 % of turns must raise throughput by this part of a percent.
LEAST_GAIN: Final = 0.03
# Of the weight of earlier observations, what is left after a window.
MEMORY: Final = 0.8
# Below this spread of n (its standard deviation over its mean) its effect on t is unknown.
LEAST_SPREAD: Final = 0.05
STEP_UP: Final = 0.125
STEP_DOWN: Final = 0.8
# Turns that must end before the limit changes, besides as many as the limit.
WINDOW_TURNS: Final = 16


class AdaptiveLimit:
    """The limit of one engine, in [1, `most`]. It begins at the top: too few turns cost at once."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: an engine needs a place for one turn")
        self._most = most
        self._limit = float(most)
        self._ended = 0
        self._reached = False
        # Sums over turns, weighted by their tokens: 1, n, t, n n, n t.
        self._sums = [0.0] * 5

    @property
    def now(self) -> int:
        """Turns that the engine may have."""
        return max(1, min(self._most, int(self._limit)))

    def ended(self, in_flight: float, seconds: float, tokens: int) -> None:
        """A turn was drawn: `tokens` in `seconds`, beside `in_flight` turns, itself included.

        Turns that drew nothing say nothing.
        """
        if tokens < 1 or seconds <= 0 or in_flight < 1:
            return
        n, t = in_flight, seconds / tokens
        for i, value in enumerate((1.0, n, t, n * n, n * t)):
            self._sums[i] += tokens * value
        self._reached = self._reached or in_flight >= self.now - 0.5
        self._ended += 1
        if self._ended >= max(WINDOW_TURNS, self.now):
            self._adapt()
            self._ended, self._reached = 0, False
            self._sums = [MEMORY * value for value in self._sums]

    def best(self) -> float | None:
        """Turns beyond which throughput hardly grows; infinite when no end is in sight, 0 when it
        falls already, None when too little is known."""
        weight, n, t, nn, nt = self._sums
        if not weight:
            return None
        n, t, nn, nt = n / weight, t / weight, nn / weight, nt / weight
        variance = nn - n * n
        if variance <= (LEAST_SPREAD * n) ** 2:
            return None
        slope = (nt - n * t) / variance
        base = t - slope * n
        if slope <= 0:
            return float("inf")
        return max(0.0, base * (1 - LEAST_GAIN) / (slope * LEAST_GAIN))

    def _adapt(self) -> None:
        best = self.best()
        if best is None or best >= self._limit:
            if self._reached:  # unless more are wanted, more are not tried
                self._limit = min(self._most, self._limit + max(1.0, STEP_UP * self._limit))
        else:
            self._limit = max(1.0, best, STEP_DOWN * self._limit)
