"""Idempotency by request id: a repeated call joins the running call or gets its response."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import xxhash

from troupe.rpc import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])

# Longest request id; ids that Troupe makes have about 40 characters.
MAX_ID_LENGTH: Final = 512
# Overhead of a remembered response in bytes: its id, digest and table entry.
_ENTRY_BYTES: Final = 1024
_LATER_MS: Final = 500


def repeatable(handler: Handler) -> Handler:
    """Decorate a handler whose repeated calls all run, since its own records make them
    idempotent."""
    return _marked(handler, "repeatable", True)


def compares(what: Callable[[Any], bytes]) -> Callable[[Handler], Handler]:
    """Decorate a handler whose repeated requests are compared by `what(request)`.

    By default requests with the same id must be equal in every byte.
    """
    return lambda handler: _marked(handler, "compares", what)


def _marked(handler: Handler, name: str, value: object) -> Handler:
    setattr(handler, name, value)
    return handler


class IdempotencyCache:
    """Cache of responses by request key, kept for `ttl` seconds, bounded in number and bytes.

    A failed call is forgotten, so that it can be repeated. A call runs to its end even if all its
    callers have disconnected: a caller that retries with its id gets the result. Therefore requests
    in flight are also bounded in bytes.
    """

    def __init__(
        self,
        ttl: float = 600,
        max_entries: int = 10_000,
        max_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_running_bytes: int = 2**30,
        field: str = "request_id",
    ) -> None:
        """Create the cache. `field`: the name of the request's id field, for error messages."""
        self._ttl = ttl
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_running_bytes = max_running_bytes
        self._clock = clock
        self._field = field
        self._running: dict[Hashable, _RunningCall] = {}
        # Finished calls, oldest first.
        self._done: OrderedDict[Hashable, _Done] = OrderedDict()
        self._bytes = 0
        self._running_bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a call with that key is running or remembered, so that `run` would join
        it."""
        self._expire()
        return key in self._running or key in self._done

    async def run(
        self,
        key: Hashable,
        payload: bytes,
        call: Callable[[], Awaitable[T]],
        *,
        size: int | None = None,
        abandoned: Callable[[], None] | None = None,
    ) -> T:
        """Return the response of `call()`, which runs once per `key`.

        `size`: bytes of the request, if `payload` is only a part of it. `abandoned()` is called if
        all callers disconnect before the call ends.

        Raises `AlreadyExists` if `key` came with another `payload` before, `InvalidArgument` for an
        id that is too long, `ResourceExhausted` (retryable) while too many bytes of requests are in
        flight, and the errors of `call`.
        """
        self._expire()
        name = key[-1] if isinstance(key, tuple) else key
        digest = xxhash.xxh3_128_digest(payload)
        entry = self._running.get(key)
        known = entry or self._done.get(key)
        if known is not None and known.digest != digest:
            raise AlreadyExists(
                "this id was used for a different request",
                kind="request_id_reused",
                field=self._field,
                value=name,
                remedy="Use a new id for every new request; repeat a request only unchanged.",
            )
        if isinstance(known, _Done):
            remembered: T = known.response
            return remembered
        if entry is None:
            entry = self._begin(key, name, digest, len(payload) if size is None else size, call)
            entry.task.add_done_callback(lambda _: self._settle(key, entry))
        response: T = await self._wait(entry, abandoned)
        return response

    async def close(self) -> None:
        """Cancel the running calls and wait for their end."""
        tasks = [entry.task for entry in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self,
        key: Hashable,
        name: Hashable,
        digest: bytes,
        size: int,
        call: Callable[[], Awaitable[Any]],
    ) -> _RunningCall:
        if isinstance(name, str) and len(name) > MAX_ID_LENGTH:
            raise InvalidArgument(
                f"has {len(name):,} characters; the limit is {MAX_ID_LENGTH}",
                field=self._field,
                value=name,
                remedy="Send a short id, such as a UUID.",
            )
        # A single request is admitted at any size: otherwise it could never run.
        if self._running and self._running_bytes + size > self._max_running_bytes:
            raise ResourceExhausted(
                f"{self._running_bytes:,} bytes of requests are in flight",
                kind="requests_in_flight",
                remedy="Wait until some of them have ended, or send fewer at a time.",
                retry_after_ms=_LATER_MS,
            )
        entry = self._running[key] = _RunningCall(digest, size, asyncio.ensure_future(call()))
        self._running_bytes += size
        return entry

    async def _wait(self, entry: _RunningCall, abandoned: Callable[[], None] | None) -> Any:
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

    def _settle(self, key: Hashable, entry: _RunningCall) -> None:
        del self._running[key]
        self._running_bytes -= entry.size
        # `exception()` also marks the exception as retrieved when no caller waits any more.
        if entry.task.cancelled() or entry.task.exception() is not None:
            return
        response = entry.task.result()
        # Keep only the response, not the task, whose context references the request.
        done = _Done(entry.digest, response, self._clock() + self._ttl)
        self._done[key] = done
        self._bytes += done.size
        while len(self._done) > self._max_entries or self._bytes > self._max_bytes:
            self._forget_oldest()

    def _expire(self) -> None:
        now = self._clock()
        while self._done and next(iter(self._done.values())).expires <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, done = self._done.popitem(last=False)
        self._bytes -= done.size


@dataclass(eq=False, slots=True)
class _RunningCall:
    """A call in flight: digest and size of its request, its task, the number of waiting callers."""

    digest: bytes
    size: int
    task: asyncio.Future[Any]
    waiters: int = 0


class _Done:
    """A finished call: digest of its request, and its response."""

    def __init__(self, digest: bytes, response: Any, expires: float) -> None:
        self.digest = digest
        self.response = response
        self.expires = expires
        measure = getattr(response, "ByteSize", None)
        self.size = _ENTRY_BYTES + (sys.getsizeof(response) if measure is None else measure())
