"""How long one call takes beside others of its function: learned from the calls that it is like.

Calls of one function differ by far more than a scheduler can put up with, but not by chance alone:
trajectories of one query run the same tests, one trajectory repeats itself, and the same call (the
same arguments, for the same query) takes nearly the same each time. How much each of these tells is
learned as well: where calls of a query are no more alike than any two, the query says nothing.

These are nested random effects on the logarithm of seconds, estimated by hierarchical credibility
(Bühlmann 1967, Jewell 1975): what is alike by its mean, weighted with n / (n + within / between).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

# Queries that are remembered, which come again an epoch later; and trajectories, and arguments,
# which come again soon or never. The longest unheard of are forgotten.
_QUERIES: Final = 4096
_OTHERS: Final = 1024
# Older calls count less than the last so many: of a function, and of one key of it.
_MEMORY: Final = 1024.0
_KEY_MEMORY: Final = 32.0
# Calls are taken to be no more alike for having a key in common, as surely as if so many pairs of
# them had been seen to be.
_DOUBT: Final = 4.0
# What a clock can still tell from nothing.
_LEAST_SECONDS: Final = 1e-6


class Kin(NamedTuple):
    """What a call has in common with others; empty: nothing is known of it.

    `content` stands for its arguments.
    """

    query: str = ""
    trajectory: str = ""
    content: str = ""


@dataclass(slots=True)
class _Mean:
    """Of the calls of one key; `last` is the last of them, `of` whose it was."""

    count: float
    mean: float
    last: float
    of: Kin


class _Level:
    """Calls by one kind of key, and how far those of one key are apart."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._means: OrderedDict[object, _Mean] = OrderedDict()
        self._pairs, self._squares = 0.0, 0.0

    def observed(self, key: object, value: float, of: Kin, *, apart: bool) -> None:
        """One more call of `key`. `apart`: two of one trajectory, or with the same arguments, do
        not tell how alike those are that only have `key` in common."""
        known = self._means.get(key)
        if known is None:
            self._means[key] = _Mean(1.0, value, value, of)
            if len(self._means) > self._keys:
                self._means.popitem(last=False)
            return
        self._means.move_to_end(key)
        if not apart or _strangers(known.of, of):
            # Half the squared difference of two is their variance.
            self._squares += (value - known.last) ** 2 / 2
            self._pairs += 1.0
            if self._pairs > _MEMORY:
                self._pairs, self._squares = self._pairs / 2, self._squares / 2
        known.count = min(_KEY_MEMORY, known.count + 1.0)
        known.mean += (value - known.mean) / known.count
        known.last, known.of = value, of

    def told(self, key: object, among: float, prior: float) -> tuple[float, float, float]:
        """What the mean of `key` says of its next call, of which `prior` was expected with a
        variance of `among`: the correction, the variance that it explains, and what is left
        for others to explain among calls of one key."""
        within = min(among, (self._squares + _DOUBT * among) / (self._pairs + _DOUBT))
        between = among - within
        known = self._means.get(key)
        if known is None or between <= 0:
            return 0.0, 0.0, within
        weight = known.count / (known.count + within / between)
        return weight * (known.mean - prior), weight * between, within


class Durations:
    """Of the calls of one function: seconds as a multiple of what others take, or of what was
    declared of each."""

    def __init__(self) -> None:
        self._count, self._mean, self._variance = 0.0, 0.0, 0.0
        # Seconds that calls took on average, and that were declared of them.
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
        """A call took so many times what was taken for one, or the `declared` seconds. Raises
        ValueError."""
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
            self._queries.observed(kin.query, value, kin, apart=True)
        if kin.content:
            self._contents.observed((kin.query, kin.content), value, kin, apart=False)
        if kin.trajectory:
            self._trajectories.observed(kin.trajectory, value, kin, apart=False)

    def scale(self) -> float:
        """Seconds that calls took for each second that was declared; 1 before there are any.

        Of all calls together: the mean of their ratios would be whatever the one says of which
        next to nothing was declared.
        """
        return max(_LEAST_SECONDS, self._took / self._declared) if self._count else 1.0

    def factor(self, kin: Kin) -> float:
        """How much longer (less than 1: shorter) a call is expected to take than the mean one."""
        if self._count < 2:
            return 1.0
        among, apart, explained = self._variance, 0.0, 0.0
        if kin.query:
            apart, explained, among = self._queries.told(kin.query, among, self._mean)
        # Either is nested in the query; which tells more decides.
        told = [(0.0, 0.0, among)]
        if kin.content:
            key = (kin.query, kin.content)
            told.append(self._contents.told(key, among, self._mean + apart))
        if kin.trajectory:
            told.append(self._trajectories.told(kin.trajectory, among, self._mean + apart))
        nearer, more, _ = max(told, key=lambda one: one[1])
        # What was explained no longer spreads the logarithm, which had raised the mean.
        return math.exp(apart + nearer - (explained + more) / 2)


def _strangers(one: Kin, other: Kin) -> bool:
    """Whether they have neither the trajectory nor the arguments in common."""
    same_trajectory = one.trajectory == other.trajectory != ""
    return not same_trajectory and not (one.content == other.content != "")
