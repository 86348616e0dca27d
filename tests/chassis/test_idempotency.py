"""One effect per id, in any order of calls, repeats, failures and disconnects."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.chassis.idempotency import IdempotencyCache
from troupe.rpc import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable
from troupe.v1 import common_pb2 as common_pb

# (key, payload, how it ends: with an answer, with an error, or its caller leaves first)
CALLS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([b"a", b"b"]),
        st.sampled_from(["answer", "error", "leave"]),
        st.booleans(),
    ),
    max_size=12,
)


@given(CALLS)
@settings(max_examples=60, deadline=None)
def test_every_request_id_has_one_effect(calls: list[tuple[int, bytes, str, bool]]) -> None:
    asyncio.run(_play(calls))


async def _play(calls: list[tuple[int, bytes, str, bool]]) -> None:
    cache = IdempotencyCache()
    effects: dict[int, list[bytes]] = {}
    waiting: list[tuple[int, bytes, asyncio.Task[bytes]]] = []

    def handler(key: int, payload: bytes, end: str):  # type: ignore[no-untyped-def]
        async def handle() -> bytes:
            await asyncio.sleep(0)
            if end == "error":
                raise ValueError(key)
            effects.setdefault(key, []).append(payload)
            return payload

        return handle

    for key, payload, end, settle in calls:
        task = asyncio.create_task(cache.run(key, payload, handler(key, payload, end)))
        await asyncio.sleep(0)
        if end == "leave":
            task.cancel()
        waiting.append((key, payload, task))
        if settle:
            for _ in range(5):
                await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    for key, payload, task in waiting:
        assert task.done()
        if task.cancelled() or isinstance(task.exception(), ValueError):
            continue
        if task.exception() is not None:
            assert isinstance(task.exception(), AlreadyExists)
        else:
            assert task.result() == payload
            assert effects[key] == [payload]
    assert all(len(done) == 1 for done in effects.values())
    assert len(cache) == len(effects)


async def test_time_number_and_bytes_are_bounded() -> None:
    now = [0.0]
    cache = IdempotencyCache(ttl=10, max_entries=3, max_bytes=3 * 1024 + 100, clock=lambda: now[0])
    runs = []

    async def call(key: str, size: int = 0) -> None:
        async def handle() -> common_pb.ChatMessage:
            runs.append(key)
            return common_pb.ChatMessage(content="x" * size)

        await cache.run(key, b"", handle)

    for key in "abcd":
        await call(key)
    assert len(cache) == 3
    await call("a")  # was forgotten
    assert runs == ["a", "b", "c", "d", "a"]
    now[0] = 11
    await call("a")  # was too old
    assert len(runs) == 6
    assert len(cache) == 1
    await call("big", 90)
    await call("bigger", 2000)
    assert len(cache) == 1


async def test_the_last_caller_to_leave_calls_abandoned_and_close_cancels_running_calls() -> None:
    cache = IdempotencyCache()
    left: list[str] = []

    async def handle() -> str:
        await asyncio.sleep(60)
        return "never"

    first, second = (
        asyncio.create_task(cache.run("k", b"", handle, abandoned=lambda: left.append("gone")))
        for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert left == []
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert left == ["gone"]
    third = asyncio.create_task(cache.run("k", b"", handle))
    await asyncio.sleep(0)
    await cache.close()
    with pytest.raises(Unavailable):
        await third
    assert len(cache) == 0


async def test_answers_in_bytes_are_counted_too() -> None:
    cache = IdempotencyCache(max_bytes=10_000)

    async def call() -> bytes:
        return b"x" * 4000

    for number in range(20):
        await cache.run(str(number), b"", call)
    assert 0 < len(cache) <= 2


async def test_requests_in_flight_are_bounded_in_bytes() -> None:
    cache, go = IdempotencyCache(max_running_bytes=1000), asyncio.Event()

    async def call() -> str:
        await go.wait()
        return "done"

    # A single request of any size is let in: it would wait for ever.
    running = [asyncio.create_task(cache.run("large", b"x", call, size=5000))]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as caught:
        await cache.run("second", b"y" * 10, call)
    assert caught.value.retry_after_ms
    running.append(asyncio.create_task(cache.run("large", b"x", call, size=5000)))
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*running) == ["done", "done"]
    assert await cache.run("second", b"y" * 10, call) == "done"


async def test_an_id_is_short() -> None:
    cache = IdempotencyCache(field="invocation_id")

    async def call() -> str:
        return "done"

    with pytest.raises(InvalidArgument) as caught:
        await cache.run(("Method", "x" * 100_000), b"", call)
    assert caught.value.field == "invocation_id"
    assert len(cache) == 0


async def test_a_cached_answer_does_not_keep_its_request_alive() -> None:
    """A task keeps its context, and with it whatever the call bound there."""
    cache = IdempotencyCache()
    bound: contextvars.ContextVar[Large] = contextvars.ContextVar("bound")
    alive: weakref.WeakSet[Large] = weakref.WeakSet()

    async def ask(number: int) -> None:
        large = Large()
        alive.add(large)
        bound.set(large)

        async def call() -> int:
            return number

        await cache.run(number, b"", call)

    for number in range(5):
        await asyncio.create_task(ask(number))
    gc.collect()
    assert len(cache) == 5
    assert len(alive) <= 1, "a variable remembers its last value"


class Large:
    """PartialState of a request."""
