"""Quotas: units that calls hold while they run, fetched before a call and given back after it.

The scheduler decides at once and cannot wait for Redis. So units are fetched in the background for
queued calls, and the scheduler sees the units *in hand* as free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field

from services.reward.worker import MOST_SECONDS
from troupe.rpc import NO_RETRY, InvalidArgument, TroupeError, Unavailable
from troupe.scheduling.elastic.quota import QuotaGrant, QuotaLimits, TokenBucket

log = structlog.get_logger("troupe.reward")

# Prefix of the resource names of quotas.
QUOTA: Final = "quota:"
# A service that is silent for so long counts as dead, as do its calls.
_PATIENCE_SECONDS: Final = 15.0
# Interval of repeated requests to a bucket: other services return units without notice.
_LOOK_SECONDS: Final = 0.1
_LEAST_SECONDS: Final = 0.001
# Surplus units in hand are given back after so long.
_KEEP_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.5
# Pause after a refusal without a duration.
DEFAULT_RETRY_SECONDS: Final = 1.0
# Maximum pause after one refusal; then a call tries again.
MAX_RETRY_SECONDS: Final = 300.0
# Keys in Redis, and how long a command may take.
_PREFIX: Final = "troupe:quota"
_TIMEOUT: Final = 5.0


class QuotaSettings(BaseModel):
    """Limits that an external service sets to all its callers together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Units per second; 0: no such limit."""
    burst: int = Field(default=1, ge=1)
    """Units at once after a pause; no call may take more. Only with `rate`."""
    concurrency: int = Field(default=0, ge=0)
    """Units in use at a time; 0: no such limit."""


def open_quotas(
    declared: Mapping[str, QuotaSettings],
    redis_url: str | None,
    holder: str,
    changed: Callable[[], None],
) -> QuotaManager | None:
    """Return the manager of the declared quotas, None where there are none. Without `redis_url`
    they are counted in this process alone."""
    if not declared:
        return None
    limits = {name: QuotaLimits(q.rate, q.burst, q.concurrency) for name, q in declared.items()}
    buckets: Buckets
    if redis_url is None:
        buckets = LocalBuckets(limits)
        log.warning(
            "quotas are counted in this process only; set TROUPE_REDIS_URL to share them",
            quotas=sorted(limits),
        )
    else:
        buckets = RedisBuckets(redis_url, limits, holder)
        log.info("quotas are shared through Redis", quotas=sorted(limits))
    return QuotaManager(limits, buckets, changed)


class QuotaManager:
    """The units of each quota that this service holds. Not thread-safe."""

    def __init__(
        self,
        quotas: Mapping[str, QuotaLimits],
        buckets: LocalBuckets | RedisBuckets,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when there are more units in hand than before."""
        self._limits = dict(quotas)
        self._buckets = buckets
        self._feeds = {name: _QuotaFeed(name, buckets, changed) for name in quotas}

    def check(self, name: str, units: int) -> None:
        """Raise `InvalidArgument` unless a call that takes `units` can ever begin."""
        if name not in self._limits:
            known = ", ".join(sorted(self._limits)) or "none"
            raise InvalidArgument(
                f"no such quota is declared here (declared: {known})",
                field="function.quota.name",
                value=name,
                remedy="Declare it in TROUPE_REWARD_QUOTAS of the reward service.",
            )
        if not 1 <= units <= self._limits[name].most:
            raise InvalidArgument(
                f"a call takes between 1 and {self._limits[name].most:g} units of {name!r} "
                "(its burst and its concurrency): no other could ever run",
                field="function.quota.units",
                value=units,
                remedy="Declare fewer units, or a larger quota in TROUPE_REWARD_QUOTAS.",
            )

    def free(self) -> dict[str, int]:
        """Return the units in hand, by resource."""
        return {QUOTA + name: feed.hand for name, feed in self._feeds.items()}

    def wish(self, wishes: Mapping[str, Sequence[int]]) -> None:
        """Set what is queued now: by resource, the units of each call in the order of the queue."""
        for name, feed in self._feeds.items():
            feed.wish(wishes.get(QUOTA + name, ()))

    def take(self, holds: Mapping[str, int]) -> None:
        """Begin a call; `holds` are its resources, including quotas."""
        for name, units in self._of(holds):
            self._feeds[name].take(units)

    def give_back(self, holds: Mapping[str, int]) -> None:
        """End a call."""
        for name, units in self._of(holds):
            self._feeds[name].give_back(units)

    def shut(self, holds: Mapping[str, int], seconds: float) -> None:
        """Pause the quotas of `holds` for all services: their interfaces take no calls."""
        if not 0 < seconds <= MOST_SECONDS:
            seconds = DEFAULT_RETRY_SECONDS
        for name, _ in self._of(holds):
            self._feeds[name].shut(min(seconds, MAX_RETRY_SECONDS))

    def why(self, holds: Mapping[str, int]) -> str:
        """Return why units of `holds` are missing, by quota."""
        return "; ".join(filter(None, (self._feeds[name].why for name, _ in self._of(holds))))

    async def start(self) -> None:
        """Raise `FailedPrecondition` if the Redis that quotas are counted in cannot keep them."""
        await self._buckets.check()

    async def stop(self) -> None:
        """Give all units back and close the connections."""
        await asyncio.gather(*(feed.stop() for feed in self._feeds.values()))
        await self._buckets.close()

    def _of(self, holds: Mapping[str, int]) -> list[tuple[str, int]]:
        return [
            (resource.removeprefix(QUOTA), units)
            for resource, units in holds.items()
            if resource.startswith(QUOTA) and units
        ]


class _QuotaFeed:
    """The units of one quota: a task fetches requested units and returns surplus ones."""

    def __init__(self, name: str, buckets: Buckets, changed: Callable[[], None]) -> None:
        self._name, self._buckets, self._changed = name, buckets, changed
        self._wishes: Sequence[int] = ()
        # Units in hand, and units that running calls use.
        self.hand = self._used = 0
        # Units to give back, and how many of them were never used.
        self._back = self._unused = 0
        self._shut_until = self._to_shut = 0.0
        self._surplus_since: float | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Whether the bucket has us in its line, and when it answered last.
        self._asked = False
        self._answered = 0.0
        # Why the bucket does not answer.
        self._away = ""

    @property
    def why(self) -> str:
        left = self._shut_until - time.monotonic()
        if left > 0:
            return f"{self._name} announced that it takes no calls for {left:.1f} s more"
        return self._away or f"the quota {self._name} is used up"

    def wish(self, wishes: Sequence[int]) -> None:
        self._wishes = list(wishes)
        if self._asked or self.hand != sum(self._wishes):
            self._stir()

    def take(self, units: int) -> None:
        self.hand -= units
        self._used += units

    def give_back(self, units: int) -> None:
        self._used -= units
        self._back += units
        self._stir()

    def shut(self, seconds: float) -> None:
        self._shut_until = max(self._shut_until, time.monotonic() + seconds)
        self._to_shut = max(self._to_shut, seconds)
        self._drop(self.hand)
        self._stir()

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._drop(self.hand)
        self._wishes, self._back, self._used = (), self._back + self._used, 0
        with contextlib.suppress(TroupeError):
            await self._settle()

    def _stir(self) -> None:
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"quota {self._name}")

    def _drop(self, units: int) -> None:
        self.hand -= units
        self._back += units
        self._unused += units

    def _reached(self) -> int:
        """Return how many of the wishes, in their order, the units in hand suffice for."""
        left = self.hand
        for place, units in enumerate(self._wishes):
            if units > left:
                return place
            left -= units
        return len(self._wishes)

    async def _run(self) -> None:
        pause: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()
            try:
                pause = await self._settle()
                self._away = ""
            except TroupeError as error:
                if not self._away:
                    log.warning("a quota cannot be asked for", quota=self._name, error=str(error))
                self._away = f"quota {self._name}: {error}"
                pause = _RETRY_SECONDS

    async def _settle(self) -> float | None:
        """Give back and fetch units; the seconds until the next look (None: when something
        changes). Raises `TroupeError`; all is kept for the next time then."""
        if self._to_shut:
            seconds = self._to_shut
            await self._buckets.shut(self._name, seconds)
            self._to_shut = 0.0 if self._to_shut <= seconds else self._to_shut
        reached = self._reached()
        if reached < len(self._wishes):
            # Never keep a part of a call's units: two services could wait for each other.
            self._drop(self.hand - sum(self._wishes[:reached]))
        if self._back:
            back, unused = self._back, self._unused
            await self._buckets.give_back(self._name, back, unused)
            self._back, self._unused = self._back - back, self._unused - unused
        missing = self._wishes[self._reached() :]
        if not missing:
            return await self._rest()
        self._surplus_since, self._asked = None, True
        answer = await self._ask(missing)
        if answer.granted:
            self.hand += sum(missing[: answer.granted])
            self._changed()
        if answer.granted == len(missing):
            return 0.0
        return min(max(answer.wait, _LEAST_SECONDS), _LOOK_SECONDS)

    async def _rest(self) -> float | None:
        """Handle the state with all wishes in hand: return a lasting surplus, and stay alive in the
        bucket."""
        pause = _PATIENCE_SECONDS / 3
        now = time.monotonic()
        held = bool(self.hand or self._used)
        if self._asked or (held and now - self._answered >= pause):
            # Leaves the line, and shows that the holder of the units is alive.
            await self._ask(())
            self._asked = False
        surplus = self.hand - sum(self._wishes)
        if surplus <= 0:
            self._surplus_since = None
            return pause if held else None
        if self._surplus_since is None:
            self._surplus_since = now
        left = self._surplus_since + _KEEP_SECONDS - now
        if left > 0:
            return left
        self._surplus_since = None
        self._drop(surplus)
        return 0.0

    async def _ask(self, wishes: Sequence[int]) -> QuotaGrant:
        answer = await self._buckets.ask(self._name, wishes, _PATIENCE_SECONDS)
        self._answered = time.monotonic()
        return answer


class Budget:
    """The admission of queued calls while there are units. After a call that a quota lacks units
    for, no other call of that quota is admitted.

    `lacking`: resource -> units of each call that was not admitted, at most `most` calls.
    """

    def __init__(self, units: Mapping[str, int], most: int) -> None:
        self._left = dict(units)
        self._most = most
        self.lacking: dict[str, list[int]] = {}

    def admits(self, needs: Mapping[str, int], alike: int = 1) -> bool:
        """Return whether a call with `needs` can begin now; `alike - 1` calls behind it need the
        same."""
        short = False
        for resource, units in needs.items():
            if not resource.startswith(QUOTA):
                continue
            wishes = self.lacking.get(resource)
            if wishes is None and self._left.get(resource, 0) >= units:
                continue
            wishes = self.lacking.setdefault(resource, [])
            wishes += [units] * min(alike, self._most - len(wishes))
            short = True
        if short:
            return False
        for resource, units in needs.items():
            if resource.startswith(QUOTA):
                self._left[resource] -= units
        return True


class LocalBuckets:
    """One token bucket per quota, in this process alone."""

    def __init__(self, quotas: Mapping[str, QuotaLimits]) -> None:
        now = time.monotonic()
        self._buckets = {name: TokenBucket(limits, now) for name, limits in quotas.items()}

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> QuotaGrant:
        """Run `TokenBucket.ask`. This process is the only holder, and never counts as dead."""
        return self._buckets[name].ask("", wishes, time.monotonic(), float("inf"))

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`TokenBucket.give_back`."""
        self._buckets[name].give_back("", units, time.monotonic(), unused=unused)

    async def shut(self, name: str, seconds: float) -> None:
        """Run `TokenBucket.shut` for `seconds`."""
        now = time.monotonic()
        self._buckets[name].shut(now + seconds, now)

    async def check(self) -> None:
        """Do nothing: there is nothing to check."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class RedisBuckets:
    """One token bucket per quota in Redis, shared by all services that use it. Each call is one
    atomic script; `holder` names this process. All methods raise `TroupeError`."""

    def __init__(self, url: str, quotas: Mapping[str, QuotaLimits], holder: str) -> None:
        # Only a service with quotas needs the package `redis`.
        from services.chassis.redis import RedisClient

        self._quotas, self._holder = quotas, holder
        self._redis = RedisClient(
            url,
            {"quota": files(__package__).joinpath("quota.lua").read_text(encoding="utf-8")},
            name="troupe-reward",
            retries=NO_RETRY,  # the feed repeats what failed
            timeout=_TIMEOUT,
            patience=_TIMEOUT,
        )

    async def check(self) -> None:
        """Raise `FailedPrecondition` if Redis may delete buckets, which would raise the limits.

        Does not wait for an unreachable Redis, since only functions with quotas need it.
        """
        try:
            warnings = await self._redis.risks()
        except Unavailable as error:
            warnings = [str(error)]
        for warning in warnings:
            log.warning("quotas in Redis", reason=warning)

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> QuotaGrant:
        """Run `TokenBucket.ask` by the Redis clock."""
        granted, wait = await self._run(name, "ask", patience, *wishes)
        seconds = float(wait)
        return QuotaGrant(int(granted), seconds if seconds >= 0 else float("inf"))

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`TokenBucket.give_back`."""
        await self._run(name, "give_back", 0, units, unused)

    async def shut(self, name: str, seconds: float) -> None:
        """`TokenBucket.shut`."""
        await self._run(name, "shut", 0, seconds)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _run(
        self, name: str, what: str, patience: float, *values: float, now: float | str = ""
    ) -> Any:
        limits = self._quotas[name]
        bounds = (limits.rate, limits.burst, limits.concurrency)
        args = (what, self._holder, *bounds, patience, now, *values)
        return await self._redis.run_script("quota", [f"{_PREFIX}:{{{name}}}"], args)


Buckets = LocalBuckets | RedisBuckets
