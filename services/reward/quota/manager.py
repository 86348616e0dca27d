"""Units of quotas that calls hold while they run: fetched ahead of them, given back after them.

The scheduler decides at once and must not wait for Redis. So what waits says what it wishes, units
are fetched for it in the background, and those *in hand* are one dimension of what is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final, Protocol

import structlog
from pydantic import BaseModel, ConfigDict, Field

from services.reward.worker import MOST_SECONDS
from troupe.rpc import Internal, InvalidArgument, TroupeError, Unavailable
from troupe.scheduling.elastic.quota import QuotaGrant, QuotaLimits, TokenBucket

_PREFIX: Final = "troupe:quota"
_TIMEOUT: Final = 5.0


class Buckets(Protocol):
    """One bucket per quota, by name. `holder` names this process among all that share them."""

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> QuotaGrant:
        """`TokenBucket.ask`. Raises `Unavailable`."""

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`TokenBucket.give_back`. Raises `Unavailable`."""

    async def shut(self, name: str, seconds: float) -> None:
        """Nobody gets anything for so long. Raises `Unavailable`."""

    async def close(self) -> None:
        """Let go of connections."""


class LocalBuckets:
    """Shared with nobody."""

    kind = "process"

    def __init__(self, quotas: Mapping[str, QuotaLimits]) -> None:
        now = time.monotonic()
        self._buckets = {name: TokenBucket(limits, now) for name, limits in quotas.items()}

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> QuotaGrant:
        """`TokenBucket.ask`; nobody else can hold anything, so nothing is ever forgotten."""
        return self._buckets[name].ask("", wishes, time.monotonic(), float("inf"))

    async def give_back(self, name: str, units: int, unused: int = 0) -> None:
        """`TokenBucket.give_back`."""
        self._buckets[name].give_back("", units, time.monotonic(), unused=unused)

    async def shut(self, name: str, seconds: float) -> None:
        """`TokenBucket.shut`."""
        now = time.monotonic()
        self._buckets[name].shut(now + seconds, now)

    async def close(self) -> None:
        """Nothing to let go of."""


class RedisBuckets:
    """Shared with whoever uses the same Redis; each call is one atomic script."""

    kind = "redis"

    def __init__(self, url: str, quotas: Mapping[str, QuotaLimits], holder: str) -> None:
        # Only a service with quotas needs the package.
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._quotas, self._holder = quotas, holder
        self._client = Redis.from_url(
            url,
            # The feed asks again by itself.
            retry=Retry(NoBackoff(), 0),
            # redis-py's own timeouts may swallow a cancellation under Python 3.11.
            socket_timeout=None,
            socket_connect_timeout=None,
            client_name="troupe-reward",
        )
        text = files(__package__).joinpath("quota.lua").read_text(encoding="utf-8")
        self._script: Any = self._client.register_script(text)

    async def ping(self) -> None:
        """Raise `Unavailable` unless Redis answers."""
        await self._guarded(self._client.ping())

    async def ask(self, name: str, wishes: Sequence[int], patience: float) -> QuotaGrant:
        """`TokenBucket.ask`, by Redis' clock."""
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
        await self._client.aclose()

    async def _run(
        self, name: str, what: str, patience: float, *values: float, now: float | str = ""
    ) -> Any:
        limits = self._quotas[name]
        bounds = (limits.rate, limits.burst, limits.concurrency)
        args = (what, self._holder, *bounds, patience, now, *values)
        return await self._guarded(self._script(keys=[f"{_PREFIX}:{{{name}}}"], args=args))

    async def _guarded(self, call: Any) -> Any:
        from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

        try:
            async with asyncio.timeout(_TIMEOUT):
                return await call
        except ResponseError as error:
            raise Internal(f"Redis refuses a command: {error}", kind="redis_error") from error
        except (ConnectionError, TimeoutError, RedisError, OSError) as error:
            raise Unavailable(
                f"the quotas' Redis does not answer: {error}",
                kind="redis_unavailable",
                field="TROUPE_REDIS_URL",
                remedy="Start it; calls that need a quota go on when it is back.",
            ) from error


log = structlog.get_logger("troupe.reward")

# Prefix of the resource names of quotas.
QUOTA: Final = "quota:"
# A process that is not heard of for so long has died with its calls.
_PATIENCE_SECONDS: Final = 15.0
# Others give back without telling us: so often we look.
_LOOK_SECONDS: Final = 0.1
_LEAST_SECONDS: Final = 0.001
# Units in hand that nobody wishes any more go back after so long.
_KEEP_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.5
# An interface that refuses without saying for how long is asked again after this.
DEFAULT_RETRY_SECONDS: Final = 1.0
# One refusal keeps everybody out for no longer; then somebody asks again. What is not plausible was
# not said.
MAX_RETRY_SECONDS: Final = 300.0


class QuotaManager:
    """What this service has of each quota. Not thread-safe; lives in one event loop."""

    def __init__(
        self, quotas: Mapping[str, QuotaLimits], buckets: Buckets, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when there is more in hand than before."""
        self._limits = dict(quotas)
        self._buckets = buckets
        self._feeds = {name: _QuotaFeed(name, buckets, changed) for name in quotas}

    @property
    def resources(self) -> frozenset[str]:
        """The dimensions of `free`."""
        return frozenset(QUOTA + name for name in self._feeds)

    def check(self, name: str, units: int) -> None:
        """Raise `InvalidArgument` unless a call of so many units can ever begin."""
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
        """Units in hand, by resource."""
        return {QUOTA + name: feed.in_hand for name, feed in self._feeds.items()}

    def wish(self, wishes: Mapping[str, Sequence[int]]) -> None:
        """What waits now, by resource: units of one call each, in the order of the queue."""
        for name, feed in self._feeds.items():
            feed.wish(wishes.get(QUOTA + name, ()))

    def take(self, holds: Mapping[str, int]) -> None:
        """A call begins with `holds`, of which only quotas matter here."""
        for name, units in self._of(holds):
            self._feeds[name].take(units)

    def give_back(self, holds: Mapping[str, int]) -> None:
        """It has ended."""
        for name, units in self._of(holds):
            self._feeds[name].give_back(units)

    def shut(self, holds: Mapping[str, int], seconds: float) -> None:
        """The interfaces of `holds` want no call for so long, from nobody."""
        if not 0 < seconds <= MOST_SECONDS:
            seconds = DEFAULT_RETRY_SECONDS
        for name, _ in self._of(holds):
            self._feeds[name].shut(min(seconds, MAX_RETRY_SECONDS))

    def why(self, holds: Mapping[str, int]) -> str:
        """Why a call that waits for `holds` waits, if it is for a quota; else empty."""
        return "; ".join(filter(None, (self._feeds[name].why for name, _ in self._of(holds))))

    async def stop(self) -> None:
        """Give everything back and let go."""
        await asyncio.gather(*(feed.stop() for feed in self._feeds.values()))
        await self._buckets.close()

    def _of(self, holds: Mapping[str, int]) -> list[tuple[str, int]]:
        return [
            (resource.removeprefix(QUOTA), units)
            for resource, units in holds.items()
            if resource.startswith(QUOTA) and units
        ]


class _QuotaFeed:
    """One quota: a task that asks for what is wished and gives back what is not needed."""

    def __init__(self, name: str, buckets: Buckets, changed: Callable[[], None]) -> None:
        self._name, self._buckets, self._changed = name, buckets, changed
        self._wishes: Sequence[int] = ()
        self._hand = self._used = 0
        # To be given back: units, and how many of them were never used.
        self._back = self._unused = 0
        self._shut_until = self._to_shut = 0.0
        self._surplus_since: float | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asked = False
        self._heard = 0.0
        self._away = ""

    @property
    def in_hand(self) -> int:
        return self._hand

    @property
    def why(self) -> str:
        left = self._shut_until - time.monotonic()
        if left > 0:
            return f"{self._name} takes no calls for {left:.1f} s more (it said so)"
        return self._away or f"the quota {self._name} is used up"

    def wish(self, wishes: Sequence[int]) -> None:
        self._wishes = list(wishes)
        if self._asked or self._hand != sum(self._wishes):
            self._stir()

    def take(self, units: int) -> None:
        self._hand -= units
        self._used += units

    def give_back(self, units: int) -> None:
        self._used -= units
        self._back += units
        self._stir()

    def shut(self, seconds: float) -> None:
        self._shut_until = max(self._shut_until, time.monotonic() + seconds)
        self._to_shut = max(self._to_shut, seconds)
        self._drop(self._hand)
        self._stir()

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._drop(self._hand)
        self._wishes, self._back, self._used = (), self._back + self._used, 0
        with contextlib.suppress(TroupeError):
            await self._settle()

    def _stir(self) -> None:
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"quota {self._name}")

    def _drop(self, units: int) -> None:
        self._hand -= units
        self._back += units
        self._unused += units

    def _reached(self) -> int:
        """How many of the wishes, in their order, what is in hand is enough for."""
        left = self._hand
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
        """Bring the bucket up to date; returns after how many seconds to look again at the
        latest (None: when stirred). Raises `TroupeError`; then nothing is forgotten."""
        if self._to_shut:
            seconds = self._to_shut
            await self._buckets.shut(self._name, seconds)
            self._to_shut = 0.0 if self._to_shut <= seconds else self._to_shut
        reached = self._reached()
        if reached < len(self._wishes):
            # Nobody keeps part of what a call needs: two that did could wait for each other.
            self._drop(self._hand - sum(self._wishes[:reached]))
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
            self._hand += sum(missing[: answer.granted])
            self._changed()
        if answer.granted == len(missing):
            return 0.0
        return min(max(answer.wait, _LEAST_SECONDS), _LOOK_SECONDS)

    async def _rest(self) -> float | None:
        """Nothing is wished that is not in hand."""
        pause = _PATIENCE_SECONDS / 3
        now = time.monotonic()
        held = bool(self._hand or self._used)
        if self._asked or (held and now - self._heard >= pause):
            # No place in the line any more; what is held is still ours.
            await self._ask(())
            self._asked = False
        surplus = self._hand - sum(self._wishes)
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
        self._heard = time.monotonic()
        return answer


class Budget:
    """Lets pass what there are units for; nothing of a quota passes after something that lacks.

    `lacking` are the wishes of those that did not pass, in units of a call, at most `most` each.
    """

    def __init__(self, units: Mapping[str, int], most: int) -> None:
        self._left = dict(units)
        self._most = most
        self.lacking: dict[str, list[int]] = {}

    def admits(self, needs: Mapping[str, int], alike: int = 1) -> bool:
        """Whether a call with `needs` can begin now; of those behind it `alike - 1` are like it."""
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


class QuotaSettings(BaseModel):
    """What an interface outside allows all who call it together."""

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
    """None where no quota is declared. Without `redis_url` they are this process' alone."""
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
