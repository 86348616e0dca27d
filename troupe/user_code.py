"""Calls of user code from services: whatever it raises, it ends neither a thread's caller nor the
event loop nor the process, and the caller's wait for it can be bounded.

`SystemExit` and `KeyboardInterrupt` that are raised in a task end its event loop, `CancelledError`
is taken for a cancellation by a service, and a `StopIteration` in a future is never heard of. User
code may raise any of them, alone or in groups. Here they become a `UserCodeExit`, which is an
`Exception` like every other fault.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from troupe.outcomes import Interruption, described

P = ParamSpec("P")
T = TypeVar("T")

# Subclasses of Exception that event loops, futures and generators take for something else; and what
# is caught as one of the first three whatever else it is.
_MISREAD: Final = (
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    StopIteration,
    StopAsyncIteration,
)


class UserCodeExit(RuntimeError):
    """User code raised what ends threads, tasks or processes: SystemExit, KeyboardInterrupt,
    GeneratorExit, a cancellation of nobody's, or a group with one of these."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(described(raised))
        self.raised = raised


class UserCodeTimeout(Exception):
    """User code did not end in time, and was left behind in its thread."""


def as_exception(error: BaseException) -> Exception:
    """What may be raised in a service in place of `error`, which user code raised: itself, unless
    that would end a thread, a task, an event loop or a process, or be taken for a cancellation."""
    if _passes(error):
        return error  # type: ignore[return-value]
    replacement = UserCodeExit(error)
    replacement.__cause__ = error
    return replacement


def _passes(error: BaseException) -> bool:
    return issubclass(type(error), Exception) and not issubclass(type(error), _MISREAD)


def call_contained(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)`, which is user code. Raises nothing but what is an `Exception`
    (`as_exception`), or is an `Interruption` of Troupe's own."""
    try:
        return function(*args, **kwargs)
    except Interruption:
        raise
    except BaseException as error:
        if _passes(error):
            raise
        raise UserCodeExit(error) from error


async def await_contained(awaitable: Awaitable[T]) -> T:
    """The result of a user's awaitable. Raises nothing but what is an `Exception`, and
    `CancelledError` where the calling task is being cancelled."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UserCodeExit(error) from error
    except Interruption:
        raise
    except BaseException as error:
        if _passes(error):
            raise
        raise UserCodeExit(error) from error


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends what runs inside, user code that catches whatever it raises itself included.
    Raises KeyboardInterrupt then. For programs that call user code in their main thread."""
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or handler is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: object) -> None:
        raise Interruption("interrupted")

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Interruption as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, handler)


async def call_in_thread(
    function: Callable[..., T], /, *args: Any, seconds: float | None = None
) -> T:
    """`function(*args)`, which is user code that may block, in a thread of its own that
    keeps no process alive.

    Raises nothing but what is an `Exception` (`as_exception`), and `UserCodeTimeout` when it has
    not ended after `seconds`. A thread cannot be ended: one that is late, or whose caller was
    cancelled, is left behind.
    """
    context = contextvars.copy_context()
    call = asyncio.wrap_future(_started(lambda: context.run(function, *args)))
    # What it raises concerns nobody once its caller has left: asking marks it as seen.
    call.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({call}, timeout=seconds)
        if not call.done():
            raise UserCodeTimeout(f"did not end within {seconds:g} s")
        return call.result()
    finally:
        call.cancel()
        del call  # what it raised keeps this frame, which is not to keep it


def call_within(function: Callable[..., T], /, *args: Any, seconds: float) -> T:
    """As `call_in_thread`, for a caller in a thread of its own: blocking."""
    call = _started(lambda: function(*args))
    concurrent.futures.wait([call], timeout=seconds)
    if not call.done():
        raise UserCodeTimeout(f"did not end within {seconds:g} s")
    return call.result()


class DaemonThreads(ThreadPoolExecutor):
    """An executor for `loop.set_default_executor`, which insists on this base class; it pools
    nothing.

    What runs in a thread may never return. In a pool each such call would take a thread from
    everybody for good, and at last the process would wait for it instead of ending. Exceptions are
    contained (`as_exception`): SystemExit, raised where the result is awaited, would end the event
    loop.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread of its own."""
        return _started(lambda: fn(*args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The threads end with their calls, or with the process."""


def _started(call: Callable[[], T]) -> Future[T]:
    """`call` in a daemon thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(as_exception(error))
        else:
            future.set_result(result)

    threading.Thread(target=run, name="blocking-call", daemon=True).start()
    return future
