"""Units of quotas that calls hold while they run: fetched ahead of them, given back after them.

The scheduler decides at once and must not wait for Redis. So what waits says what it wishes, units
are fetched for it in the background, and those *in hand* are one dimension of what is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from services.reward.quota.buckets import Buckets
from services.reward.worker import MOST_SECONDS
from troupe.rpc import InvalidArgument, TroupeError
from troupe.scheduling.elastic.quota import Answer, Limits

log = structlog.get_logger("troupe.reward")

PREFIX: Final = "quota:"
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
        self, quotas: Mapping[str, Limits], buckets: Buckets, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when there is more in hand than before."""
        self._limits = dict(quotas)
        self._buckets = buckets
        self._feeds = {name: _Feed(name, buckets, changed) for name in quotas}

    @property
    def resources(self) -> frozenset[str]:
        """The dimensions of `free`."""
        return frozenset(PREFIX + name for name in self._feeds)

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
        return {PREFIX + name: feed.in_hand for name, feed in self._feeds.items()}

    def wish(self, wishes: Mapping[str, Sequence[int]]) -> None:
        """What waits now, by resource: units of one call each, in the order of the queue."""
        for name, feed in self._feeds.items():
            feed.wish(wishes.get(PREFIX + name, ()))

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
            (resource.removeprefix(PREFIX), units)
            for resource, units in holds.items()
            if resource.startswith(PREFIX) and units
        ]


class _Feed:
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

    async def _ask(self, wishes: Sequence[int]) -> Answer:
        answer = await self._buckets.ask(self._name, wishes, _PATIENCE_SECONDS)
        self._heard = time.monotonic()
        return answer
