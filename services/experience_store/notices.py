"""Notices that wake callers waiting for a change of a table, so that no caller polls.

The scripts publish their changes. Every replica of the store subscribes to all of them on one
connection, and so learns of its own writes and of other replicas' writes. While that connection is
down, this process wakes waiters after its own writes. When the connection is back, it wakes all
waiters, since it may have missed any notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Iterator
from typing import Any, Final

import structlog
from redis import exceptions

from services.experience_store.database import Database
from services.experience_store.records import CHANNEL_PATTERN, parse_channel
from troupe.rpc import RetryPolicy, Unavailable


class Background:
    """At most one background task, started and ended in one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start `work`, which never ends by itself."""
        self._task = asyncio.create_task(work, name=name)

    async def stop(self) -> None:
        """Cancel the task, if one was started. Repeatable."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None


log = structlog.get_logger(__name__)

CLAIMABLE: Final = "claimable"
COUNTS: Final = "counts"
DROPPED: Final = "dropped"

_RECONNECT: Final = RetryPolicy(initial_backoff=0.1, max_backoff=2.0)


class Subscription:
    """The subscription of one waiter. Notices that arrive before `wait` are kept."""

    def __init__(self, policy: str | None, step: int | None, kinds: frozenset[str]) -> None:
        self._policy = policy
        self._step = step
        self._kinds = kinds
        self._event = asyncio.Event()
        self._steps: set[int] = set()
        self.dropped = False
        """The job's tables are gone."""

    def matches(self, policy: str, step: int, kind: str) -> bool:
        """Return whether this waiter waits for such a notice."""
        return kind in self._kinds and self._policy in (None, policy) and self._step in (None, step)

    def wake(self, step: int | None = None, *, dropped: bool = False) -> None:
        """Wake the waiter."""
        if step is not None:
            self._steps.add(step)
        self.dropped = self.dropped or dropped
        self._event.set()

    async def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a notice; return whether one came."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def take_steps(self) -> set[int]:
        """Return the steps that notices named since the last call."""
        steps, self._steps = self._steps, set()
        return steps


class Notices:
    """The waiters of this process, and the connection that wakes them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._subscriptions: dict[str, set[Subscription]] = {}
        self._background = Background()
        self._connected = asyncio.Event()
        self.closing = False
        """The service is stopping: waiting calls answer with their present results."""

    @contextlib.contextmanager
    def listen(
        self, job: str, *, policy: str | None = None, step: int | None = None, kinds: frozenset[str]
    ) -> Iterator[Subscription]:
        """Subscribe to changes of `job`. Read the state after this, so that no change is missed."""
        subscription = Subscription(policy, step, kinds)
        subscriptions = self._subscriptions.setdefault(job, set())
        subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            subscriptions.discard(subscription)
            if not subscriptions and self._subscriptions.get(job) is subscriptions:
                del self._subscriptions[job]

    def written(self, job: str, policy: str, step: int) -> None:
        """Wake waiters after a write of this process, while no notice of Redis can arrive."""
        if not self._connected.is_set():
            for kind in (CLAIMABLE, COUNTS):
                self._wake(job, policy, step, kind)

    def _wake(self, job: str, policy: str, step: int, kind: str) -> None:
        for subscription in self._subscriptions.get(job, ()):
            if kind == DROPPED:
                subscription.wake(dropped=True)
            elif subscription.matches(policy, step, kind):
                subscription.wake(step)

    def wake_all(self) -> None:
        """Wake all waiters after a change that no table's notice announces."""
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.wake()

    async def start(self, timeout: float = 5.0) -> None:
        """Subscribe; return once subscribed, or after `timeout` seconds while still trying."""
        self._background.start(self._listen_forever(), "notices")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), timeout)

    async def stop(self) -> None:
        """Wake all waiters for good and end the subscription."""
        self.closing = True
        self.wake_all()
        await self._background.stop()

    async def _listen_forever(self) -> None:
        failures, rng = 0, random.Random()
        while True:
            try:
                await self._listen()
            except (exceptions.RedisError, OSError) as error:
                if self._connected.is_set():
                    failures = 0
                    log.warning("notices_lost", redis=self._database.address, error=str(error))
                self._connected.clear()
                self.wake_all()
                failures += 1
            delay = _RECONNECT.backoff(min(failures, 16), Unavailable("redis"), rng)
            await asyncio.sleep(delay)

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._database.listen(CHANNEL_PATTERN)) as published:
            async for message in published:
                if message is None:
                    self._connected.set()
                    self.wake_all()
                    continue
                job, policy = parse_channel(message[0].decode())
                step, _, kind = message[1].decode().partition(" ")
                self._wake(job, policy, int(step), kind or COUNTS)
