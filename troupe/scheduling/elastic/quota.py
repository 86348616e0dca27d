"""Quotas of external interfaces: calls per second and concurrent calls, shared by many callers.

A token bucket with a bound on units in use and a first-come-first-served line, so no caller
starves. Pure: `now` is the caller's, in seconds. `services/reward/quota.lua` is the same
arithmetic for callers on several hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Tolerance for the rounding of many refills.
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of an interface: `rate` units per second, a `burst` of units after a pause,
    `concurrency` units in use at a time. 0: no such limit."""

    rate: float = 0.0
    burst: int = 1
    concurrency: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError(f"rate = {self.rate} is not a number of 0 or more")
        if self.burst < 1:
            raise ValueError(f"burst = {self.burst} < 1: no call could ever begin")
        if self.concurrency < 0:
            raise ValueError(f"concurrency = {self.concurrency} is negative")

    @property
    def most(self) -> float:
        """The most units that one call can ever have."""
        return min(
            self.burst if self.rate else math.inf,
            self.concurrency if self.concurrency else math.inf,
        )


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """The first `granted` wishes are granted. The caller may ask for the next after `wait` seconds,
    or when units are given back (infinite: only then)."""

    granted: int
    wait: float


@dataclass(slots=True)
class _UnitHold:
    """Units in use; forgotten after `until`, when their holder must have died."""

    units: int
    until: float


@dataclass(slots=True)
class _QueuePlace:
    """A place in the line, ordered by `turn`, for `units`; lost after `until`."""

    turn: int
    until: float
    units: int


class TokenBucket:
    """The state of one quota. Not thread-safe."""

    def __init__(self, limits: QuotaLimits, now: float) -> None:
        """Starts full, with nothing in use."""
        self.limits = limits
        self._tokens = float(limits.burst)
        # Time until which tokens have been refilled; in the future while the quota is shut.
        self._at = now
        self._shut = -math.inf
        self._holds: dict[str, _UnitHold] = {}
        self._line: dict[str, _QueuePlace] = {}
        self._turns = 0

    def ask(self, holder: str, wishes: Sequence[int], now: float, patience: float) -> QuotaGrant:
        """Grant as many of `wishes`, the units of one call each, as are available, in order.

        None are granted while an earlier caller waits. Without wishes the caller's place in the
        line is given up. What `holder` has, and its place, are forgotten when it does not ask for
        `patience` seconds. Raises ValueError for a wish that can never be granted.
        """
        if wishes and max(wishes) > self.limits.most:
            raise ValueError(f"{max(wishes)} units wanted, at most {self.limits.most:g} ever")
        self._pass(now)
        if holder in self._holds:
            self._holds[holder].until = now + patience
        if not wishes:
            self._line.pop(holder, None)
            return QuotaGrant(0, 0.0)
        place = self._line.get(holder)
        turn = self._turns if place is None else place.turn
        ahead = [place.units for place in self._line.values() if place.turn < turn]
        granted = 0
        if not ahead and now >= self._shut:
            for units in wishes:
                limits = self.limits
                if limits.rate and self._tokens + _EPSILON < units:
                    break
                if limits.concurrency and self.in_use + units > limits.concurrency:
                    break
                self._take(holder, units, now + patience)
                granted += 1
        if granted == len(wishes):
            self._line.pop(holder, None)
            return QuotaGrant(granted, 0.0)
        # A caller that got something goes behind those that came meanwhile.
        units = wishes[granted]
        self._line[holder] = _QueuePlace(self._turns if granted else turn, now + patience, units)
        self._turns += 1
        return QuotaGrant(granted, self._wait(sum(ahead) + units, now))

    def give_back(self, holder: str, units: int, now: float, *, unused: int = 0) -> None:
        """Return `units`; `unused` of them were never used and are refilled."""
        self._pass(now)
        if hold := self._holds.get(holder):
            hold.units -= units
            if hold.units <= 0:
                del self._holds[holder]
        if self.limits.rate and now >= self._shut:
            self._tokens = min(float(self.limits.burst), self._tokens + unused)

    def shut(self, until: float, now: float) -> None:
        """Grant nothing before `until`, because the interface said so (HTTP 429, Retry-After).

        Saved tokens are dropped: the interface counts differently.
        """
        self._pass(now)
        if until > max(self._shut, now):
            self._shut, self._at, self._tokens = until, until, 0.0

    @property
    def in_use(self) -> int:
        """Units that are held."""
        return sum(hold.units for hold in self._holds.values())

    def _pass(self, now: float) -> None:
        """Refill until `now`, and forget holders that have not been heard of."""
        if now > self._at:
            gained = self._tokens + (now - self._at) * self.limits.rate
            self._tokens, self._at = min(float(self.limits.burst), gained), now
        self._holds = {name: hold for name, hold in self._holds.items() if hold.until > now}
        self._line = {name: place for name, place in self._line.items() if place.until > now}

    def _take(self, holder: str, units: int, until: float) -> None:
        if self.limits.rate:
            self._tokens -= units
        hold = self._holds.setdefault(holder, _UnitHold(0, until))
        hold.units, hold.until = hold.units + units, until

    def _wait(self, units: int, now: float) -> float:
        """Return the seconds until there could be tokens for `units`; infinite when concurrency is
        the limit."""
        shut = max(0.0, self._shut - now)
        lacking = units - self._tokens if self.limits.rate else 0.0
        if lacking > _EPSILON:
            return max(0.0, self._at - now) + lacking / self.limits.rate
        return shut or math.inf
