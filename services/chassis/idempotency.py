"""One effect per request id: repeating a call returns its first response, or joins it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

import xxhash

from troupe.rpc import AlreadyExists, Unavailable

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])


def forgets(when: Callable[[Any], bool]) -> Callable[[Handler], Handler]:
    """Marks a handler whose responses need not be remembered when `when(response)`: they tell
    that nothing happened, so that a repeated call may run again."""

    def mark(handler: Handler) -> Handler:
        handler.forgets = when  # type: ignore[attr-defined]
        return handler

    return mark


def compares(what: Callable[[Any], bytes]) -> Callable[[Handler], Handler]:
    """Marks a handler whose requests are long: of one that comes with a known id only
    `what(request)` must be the same as before, not every byte."""

    def mark(handler: Handler) -> Handler:
        handler.compares = what  # type: ignore[attr-defined]
        return handler

    return mark


class IdempotencyCache:
    """Remembers responses by key for `ttl` seconds, bounded in number and bytes.

    A call that fails is forgotten, so that it can be tried again. A call runs to its end even if
    everyone who waited for it is gone: the one who comes back with its id finds the result.
    """

    def __init__(
        self,
        ttl: float = 600,
        max_entries: int = 10_000,
        max_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl = ttl
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._running: dict[Hashable, _Entry] = {}
        # Finished calls, oldest first.
        self._done: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a call with that key runs, or its response is remembered: `run` joins it."""
        self._expire()
        return key in self._running or key in self._done

    async def run(
        self,
        key: Hashable,
        payload: bytes,
        call: Callable[[], Awaitable[T]],
        *,
        abandoned: Callable[[], None] | None = None,
        forget: Callable[[T], bool] | None = None,
    ) -> T:
        """The response of `call()`, run once per `key`. `abandoned()` is told when the last
        caller left before it ended. A response that `forget` names is for those only who wait.

        Raises `AlreadyExists` when `key` came with another `payload` before, and whatever
        `call` raises.
        """
        self._expire()
        digest = xxhash.xxh3_128_digest(payload)
        entry = self._running.get(key) or self._done.get(key)
        if entry is None:
            entry = _Entry(digest, asyncio.ensure_future(call()))
            self._running[key] = entry
            entry.task.add_done_callback(lambda _: self._settle(key, entry, forget))
        elif entry.digest != digest:
            raise AlreadyExists(
                "this id came with another request before",
                kind="request_id_reused",
                field="request_id",
                value=key[-1] if isinstance(key, tuple) else key,
                remedy="Make a fresh id for every new request; repeat one only unchanged.",
            )
        response: T = await self._wait(entry, abandoned)
        return response

    async def close(self) -> None:
        """Cancel what is still running and wait until it is."""
        tasks = [entry.task for entry in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, entry: _Entry, abandoned: Callable[[], None] | None) -> Any:
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.task.cancelled():
                raise Unavailable("the server stopped before the call ended") from None
            if entry.waiters == 1 and abandoned is not None:
                abandoned()
            raise
        finally:
            entry.waiters -= 1

    def _settle(self, key: Hashable, entry: _Entry, forget: Callable[[Any], bool] | None) -> None:
        del self._running[key]
        # Asking for the exception also marks it as seen when nobody waits any more.
        if entry.task.cancelled() or entry.task.exception() is not None:
            return
        if forget is not None and forget(entry.task.result()):
            return
        size = getattr(entry.task.result(), "ByteSize", None)
        entry.size = 0 if size is None else size()
        entry.expires = self._clock() + self._ttl
        self._done[key] = entry
        self._bytes += entry.size
        while len(self._done) > self._max_entries or self._bytes > self._max_bytes:
            self._forget_oldest()

    def _expire(self) -> None:
        now = self._clock()
        while self._done and next(iter(self._done.values())).expires <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, entry = self._done.popitem(last=False)
        self._bytes -= entry.size


class _Entry:
    """One call: what was asked, the task that answers, who waits."""

    def __init__(self, digest: bytes, task: asyncio.Future[Any]) -> None:
        self.digest = digest
        self.task = task
        self.waiters = 0
        self.expires = 0.0
        self.size = 0
