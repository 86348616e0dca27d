"""Calls of user code, in place, awaited and in threads: they raise nothing but exceptions."""

from __future__ import annotations

import asyncio
import inspect
import threading
import types
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings

from tests.support.hostile import BothError, errors, leaf_errors, nested_group
from tests.support.waiting import PATIENCE, until
from troupe.outcomes import described, type_name
from troupe.user_code import (
    DaemonThreads,
    UserCodeExit,
    UserCodeTimeout,
    as_exception,
    await_contained,
    call_contained,
    call_in_thread,
)

_STOPS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration)


def _raise(error: BaseException) -> Any:
    raise error


async def _raise_later(error: BaseException) -> Any:
    await asyncio.sleep(0)
    raise error


def _check(raised: BaseException, error: BaseException) -> None:
    assert isinstance(raised, Exception)
    assert not isinstance(raised, _STOPS)
    if raised is not error and type(raised) is not type(error):
        assert isinstance(raised, UserCodeExit)
        assert raised.raised is error
        str(raised).encode()


@given(errors())
def test_anything_that_user_code_raises_becomes_an_exception(error: BaseException) -> None:
    _check(as_exception(error), error)
    with pytest.raises(Exception) as found:  # noqa: PT011
        call_contained(_raise, error)
    _check(found.value, error)


@settings(deadline=None, max_examples=60)
@given(errors())
def test_neither_a_task_nor_a_thread_ends_the_event_loop(error: BaseException) -> None:
    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        calls = [
            asyncio.create_task(await_contained(_raise_later(error))),
            asyncio.create_task(call_in_thread(_raise, error)),
            asyncio.create_task(asyncio.to_thread(_raise, error)),
        ]
        async with asyncio.timeout(PATIENCE):
            found = await asyncio.gather(*calls, return_exceptions=True)
        for raised in found:
            # A coroutine that raises StopIteration raises the interpreter's own replacement.
            if "coroutine raised Stop" not in described(raised):
                _check(raised, error)

    asyncio.run(body())


@pytest.mark.parametrize("error", [*leaf_errors(), nested_group(SystemExit(1), 3)], ids=type_name)
async def test_every_kind_in_a_thread(error: BaseException) -> None:
    with pytest.raises(Exception) as found:  # noqa: PT011
        async with asyncio.timeout(PATIENCE):
            await call_in_thread(_raise, error)
    _check(found.value, error)


async def test_results_and_contexts_come_through() -> None:
    assert await call_in_thread(lambda a, b: a + b, 1, 2) == 3
    assert call_contained(int, "7", base=8) == 7
    assert await await_contained(asyncio.sleep(0, 5)) == 5


async def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(UserCodeTimeout, match=r"did not end within 0\.1 s"):
        await call_in_thread(release.wait, seconds=0.1)
    release.set()


async def test_a_timeout_of_user_code_is_not_the_deadline() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        await call_in_thread(_raise, TimeoutError("its own"), seconds=PATIENCE)


async def test_a_cancelled_caller_gets_its_cancellation() -> None:
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait()

    task = asyncio.create_task(call_in_thread(hang))
    other = asyncio.create_task(await_contained(asyncio.sleep(60)))
    await until(begun.is_set)
    for one in (task, other):
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert one.cancelled()
    release.set()


@types.coroutine
def suspended() -> Generator[None, None, None]:
    """Waits for ever, without an event loop."""
    while True:
        yield


async def exits_when_closed() -> None:
    try:
        await suspended()
    finally:
        raise GeneratorExit("its own")


@pytest.mark.parametrize("user_code", [suspended, exits_when_closed])
@pytest.mark.parametrize("depth", [1, 2])
def test_closing_a_coroutine_does_not_count_as_an_exit_of_user_code(
    user_code: Any, depth: int
) -> None:
    coroutine: Any = user_code()
    for _ in range(depth):
        coroutine = await_contained(coroutine)
    coroutine.send(None)
    coroutine.close()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


async def test_a_cancellation_that_user_code_raises_itself_is_a_fault() -> None:
    task = asyncio.create_task(await_contained(_raise_later(asyncio.CancelledError("mine"))))
    with pytest.raises(UserCodeExit, match="CancelledError: mine"):
        await task
    assert not task.cancelled()


def test_caught_by_two_names() -> None:
    error = BothError(3)
    assert isinstance(error, Exception)
    assert isinstance(as_exception(error), UserCodeExit)
