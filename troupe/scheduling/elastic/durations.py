"""Duration of a call relative to other calls of its function, learned from related calls.

Durations of one function differ much, but not by chance alone: trajectories of one query run the
same tests, one trajectory repeats itself, and equal calls (same arguments, same query) take nearly
the same time. How much each relation tells is learned, too: where calls of a query are no more
alike than any two, the query is ignored.

Nested random effects on the logarithm of seconds, estimated by hierarchical credibility (Bühlmann
1967, Jewell 1975): the mean of related calls counts with weight n / (n + within / between).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

# Number of remembered queries, which return an epoch later, and of trajectories and arguments,
# which return soon or never. The least recently seen are forgotten.
_QUERIES: Final = 4096
_OTHERS: Final = 1024
# Effective number of remembered calls: of a function, and of one key.
_MEMORY: Final = 1024.0
_KEY_MEMORY: Final = 32.0
# Prior against similarity: counts like so many observed pairs that are no more alike than any.
_DOUBT: Final = 4.0
# Shortest duration that a clock can measure.
_LEAST_SECONDS: Final = 1e-6


class Kin(NamedTuple):
    """Properties that a call shares with others; empty fields: unknown.

    `content` stands for its arguments.
    """

    query: str = ""
    trajectory: str = ""
    content: str = ""


@dataclass(slots=True)
class _Mean:
    """Mean over the calls of one key; `last` is the newest value, `of` its call."""

    count: float
    mean: float
    last: float
    of: Kin


class _Level:
    """Calls grouped by one kind of key, and the variance within a group."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._means: OrderedDict[object, _Mean] = OrderedDict()
        self._pairs, self._squares = 0.0, 0.0

    def observed(self, key: object, value: float, of: Kin, *, independent_only: bool) -> None:
        """Add a call of `key`. `independent_only`: two calls of one trajectory, or with the same
        arguments, do not tell how alike calls are that only share `key`."""
        known = self._means.get(key)
        if known is None:
            self._means[key] = _Mean(1.0, value, value, of)
            if len(self._means) > self._keys:
                self._means.popitem(last=False)
            return
        self._means.move_to_end(key)
        if not independent_only or _independent(known.of, of):
            # Half the squared difference of two values is their variance.
            self._squares += (value - known.last) ** 2 / 2
            self._pairs += 1.0
            if self._pairs > _MEMORY:
                self._pairs, self._squares = self._pairs / 2, self._squares / 2
        known.count = min(_KEY_MEMORY, known.count + 1.0)
        known.mean += (value - known.mean) / known.count
        known.last, known.of = value, of

    def estimate(self, key: object, among: float, prior: float) -> tuple[float, float, float]:
        """Predict the next call of `key` from its mean, given the expectation `prior` with variance
        `among`: return the correction, the variance that it explains, and the remaining variance
        within the key."""
        within = min(among, (self._squares + _DOUBT * among) / (self._pairs + _DOUBT))
        between = among - within
        known = self._means.get(key)
        if known is None or between <= 0:
            return 0.0, 0.0, within
        weight = known.count / (known.count + within / between)
        return weight * (known.mean - prior), weight * between, within


class Durations:
    """Durations of one function's calls, as multiples of the mean or of each call's declared
    seconds."""

    def __init__(self) -> None:
        self._count, self._mean, self._variance = 0.0, 0.0, 0.0
        # Mean actual and declared seconds.
        self._took, self._declared = 0.0, 1.0
        self._queries = _Level(_QUERIES)
        self._contents, self._trajectories = _Level(_OTHERS), _Level(_OTHERS)

    def observed(
        self,
        multiple: float,
        kin: Kin = Kin(),  # noqa: B008 (a tuple)
        *,
        declared: float = 1.0,
    ) -> None:
        """Add a call that took `multiple` times what was expected, or times its `declared` seconds.
        Raises ValueError."""
        if not (multiple >= 0 and math.isfinite(multiple)):
            raise ValueError(f"a call took {multiple} times what was expected")
        value = math.log(max(_LEAST_SECONDS, multiple))
        self._count = min(_MEMORY, self._count + 1.0)
        step, away = 1.0 / self._count, value - self._mean
        self._took += step * (multiple * declared - self._took)
        self._declared += step * (declared - self._declared)
        self._mean += step * away
        self._variance = (1 - step) * (self._variance + step * away * away)
        if kin.query:
            self._queries.observed(kin.query, value, kin, independent_only=True)
        if kin.content:
            self._contents.observed((kin.query, kin.content), value, kin, independent_only=False)
        if kin.trajectory:
            self._trajectories.observed(kin.trajectory, value, kin, independent_only=False)

    def scale(self) -> float:
        """Return the actual seconds per declared second over all calls; 1 before there are any.

        The ratio of the sums: the mean of the ratios would be dominated by a call with almost
        nothing declared.
        """
        return max(_LEAST_SECONDS, self._took / self._declared) if self._count else 1.0

    def factor(self, kin: Kin) -> float:
        """Return the expected duration of a call relative to the mean call."""
        if self._count < 2:
            return 1.0
        among, by_query, explained = self._variance, 0.0, 0.0
        if kin.query:
            by_query, explained, among = self._queries.estimate(kin.query, among, self._mean)
        # Both are nested in the query; the one that explains more is used.
        options = [(0.0, 0.0, among)]
        if kin.content:
            key = (kin.query, kin.content)
            options.append(self._contents.estimate(key, among, self._mean + by_query))
        if kin.trajectory:
            options.append(
                self._trajectories.estimate(kin.trajectory, among, self._mean + by_query)
            )
        nearer, more, _ = max(options, key=lambda one: one[1])
        # Explained variance no longer raises the mean of a log-normal.
        return math.exp(by_query + nearer - (explained + more) / 2)


def _independent(one: Kin, other: Kin) -> bool:
    """Return whether two calls share neither trajectory nor arguments."""
    same_trajectory = one.trajectory == other.trajectory != ""
    return not same_trajectory and not (one.content == other.content != "")
