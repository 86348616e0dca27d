"""Wakes whoever waits for a change of a table, so that nobody polls.

The scripts publish what they changed; every replica of the store listens to all of it on one
connection, and so hears its own writes and those of the others. While that connection is down
nothing is heard: then this process's own writes ring the bells directly, and when it is back all
bells ring, since any notice may have been missed.
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
    """At most one task; starting and ending belong to one event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work`, which never ends by itself."""
        self._task = asyncio.create_task(work, name=name)

    async def stop(self) -> None:
        """End it, if it was started. Repeatable."""
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


class Bell:
    """What one waiter listens with. Notices that come before `wait` are kept."""

    def __init__(self, policy: str | None, step: int | None, kinds: frozenset[str]) -> None:
        self._policy = policy
        self._step = step
        self._kinds = kinds
        self._event = asyncio.Event()
        self._steps: set[int] = set()
        self.dropped = False
        """The job's tables are gone."""

    def hears(self, policy: str, step: int, kind: str) -> bool:
        """Whether this waiter asked for such a notice."""
        return kind in self._kinds and self._policy in (None, policy) and self._step in (None, step)

    def ring(self, step: int | None = None, *, dropped: bool = False) -> None:
        """Wake the waiter."""
        if step is not None:
            self._steps.add(step)
        self.dropped = self.dropped or dropped
        self._event.set()

    async def wait(self, timeout: float) -> bool:
        """Wait for a notice for at most `timeout` seconds; whether one came."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def take_steps(self) -> set[int]:
        """The steps that notices named since the last call."""
        steps, self._steps = self._steps, set()
        return steps


class Notices:
    """All bells of this process, and the connection that rings them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._bells: dict[str, set[Bell]] = {}
        self._background = Background()
        self._connected = asyncio.Event()
        self.closing = False
        """The service stops: whoever waits answers with what it has."""

    @contextlib.contextmanager
    def listen(
        self, job: str, *, policy: str | None = None, step: int | None = None, kinds: frozenset[str]
    ) -> Iterator[Bell]:
        """A bell for changes of `job`; ask for the state after this, so that none is missed."""
        bell = Bell(policy, step, kinds)
        bells = self._bells.setdefault(job, set())
        bells.add(bell)
        try:
            yield bell
        finally:
            bells.discard(bell)
            if not bells and self._bells.get(job) is bells:
                del self._bells[job]

    def written(self, job: str, policy: str, step: int) -> None:
        """Tell that this process wrote: rings only while Redis's own notice cannot be heard."""
        if not self._connected.is_set():
            for kind in (CLAIMABLE, COUNTS):
                self._ring(job, policy, step, kind)

    def _ring(self, job: str, policy: str, step: int, kind: str) -> None:
        for bell in self._bells.get(job, ()):
            if kind == DROPPED:
                bell.ring(dropped=True)
            elif bell.hears(policy, step, kind):
                bell.ring(step)

    def ring_all(self) -> None:
        """Wake everybody: something changed that no table's notice tells."""
        for bells in self._bells.values():
            for bell in bells:
                bell.ring()

    async def start(self, timeout: float = 5.0) -> None:
        """Begin to listen; returns once subscribed, or after `timeout` (listening goes on)."""
        self._background.start(self._listen_forever(), "notices")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), timeout)

    async def stop(self) -> None:
        """Wake all waiters for good and end the listening."""
        self.closing = True
        self.ring_all()
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
                self.ring_all()
                failures += 1
            delay = _RECONNECT.backoff(min(failures, 16), Unavailable("redis"), rng)
            await asyncio.sleep(delay)

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._database.listen(CHANNEL_PATTERN)) as heard:
            async for message in heard:
                if message is None:
                    self._connected.set()
                    self.ring_all()
                    continue
                job, policy = parse_channel(message[0].decode())
                step, _, kind = message[1].decode().partition(" ")
                self._ring(job, policy, int(step), kind or COUNTS)
