"""Calls of user code from services, contained so that its exceptions cannot end a task, the event
loop or the process, and bounded in time.

In a task, `SystemExit` and `KeyboardInterrupt` end the event loop and `CancelledError` looks like a
cancellation by the service; in a future, `StopIteration` is lost. User code may raise any of them,
alone or in groups. Here they become a `UserCodeExit`, which is an `Exception` like other faults.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from troupe.outcomes import Interruption, described

P = ParamSpec("P")
T = TypeVar("T")

# Exceptions to which event loops, futures and generators give another meaning.
_MISREAD: Final = (
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    StopIteration,
    StopAsyncIteration,
)


DEBUG_REMEDY: Final = "Debug it with `troupe workflow try JOB.yaml`, where breakpoints work."
"""The remedy for a breakpoint in the code of a job."""


class UserCodeExit(RuntimeError):
    """User code raised an exception that would end a thread, task or process: SystemExit,
    KeyboardInterrupt, GeneratorExit, a cancellation without a canceller, or a group with one of
    these."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(described(raised))
        self.raised = raised


class BreakpointReached(RuntimeError):
    """User code reached a breakpoint in a process that has no terminal."""


class UserCodeTimeout(Exception):
    """User code did not end in time; it still runs in its thread."""


def as_exception(error: BaseException) -> Exception:
    """Return user code's `error` if a service may raise it; a `UserCodeExit` if it would end a
    thread, task, event loop or process, or look like a cancellation."""
    if _passes(error):
        return error  # type: ignore[return-value]
    replacement = UserCodeExit(error)
    replacement.__cause__ = error
    return replacement


def _passes(error: BaseException) -> bool:
    return issubclass(type(error), Exception) and not issubclass(type(error), _MISREAD)


def is_closing(error: BaseException) -> bool:
    """Return whether `error` closes the coroutine whose `await` raised it, which must let it pass.
    A GeneratorExit that the awaited user code raised has a frame of that code in its traceback.

    Only for the frame that awaits and catches.
    """
    trace = error.__traceback__
    return isinstance(error, GeneratorExit) and trace is not None and trace.tb_next is None


def call_contained(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call user code. Raises only `Exception` (see `as_exception`) and Troupe's `Interruption`."""
    try:
        return function(*args, **kwargs)
    except Interruption:
        raise
    except BaseException as error:
        if _passes(error):
            raise
        raise UserCodeExit(error) from error


async def await_contained(awaitable: Awaitable[T]) -> T:
    """Await user code. Raises only `Exception` and Troupe's `Interruption`, `CancelledError` when
    the calling task is being cancelled, and GeneratorExit when this coroutine is being closed."""
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
        if _passes(error) or is_closing(error):
            raise
        raise UserCodeExit(error) from error


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While this is active, Ctrl-C interrupts even user code that catches its own exceptions, and
    raises KeyboardInterrupt. For programs that call user code in their main thread."""
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
    """Call user code that may block, in a daemon thread of its own.

    Raises only `Exception` (see `as_exception`), and `UserCodeTimeout` after `seconds`. A thread
    cannot be ended: it keeps running if it is late or its caller was cancelled.
    """
    context = contextvars.copy_context()
    call = asyncio.wrap_future(_started(lambda: context.run(function, *args)))
    # Marks its exception as seen: the caller may have left.
    call.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({call}, timeout=seconds)
        if not call.done():
            raise UserCodeTimeout(f"did not end within {seconds:g} s")
        return call.result()
    finally:
        call.cancel()
        del call  # its exception refers to this frame: break the cycle


def call_within(function: Callable[..., T], /, *args: Any, seconds: float) -> T:
    """Do the same as `call_in_thread`, for a caller that may block."""
    call = _started(lambda: function(*args))
    concurrent.futures.wait([call], timeout=seconds)
    if not call.done():
        raise UserCodeTimeout(f"did not end within {seconds:g} s")
    return call.result()


class DaemonThreads(ThreadPoolExecutor):
    """An executor that runs each call in a daemon thread of its own, for
    `loop.set_default_executor`, which demands this base class.

    A call may never return: in a pool it would occupy a thread for good, and the process would wait
    for it at its end. Exceptions are contained (`as_exception`): SystemExit, raised where the
    result is awaited, would end the event loop.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread of its own."""
        return _started(lambda: fn(*args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to do: threads end with their calls, or with the process."""


def refuse_breakpoints(remedy: str) -> None:
    """Have `breakpoint()` and `pdb.set_trace()` raise `BreakpointReached`, which says where they
    stand and ends with `remedy`, in this process of a cluster: nobody could answer a debugger.

    A debugger that `PYTHONBREAKPOINT` names, such as one that waits for a connection, is used.
    """

    import pdb  # unused by programs without user code

    def refuse(*_: object, **__: object) -> None:
        frame = sys._getframe(1)
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        raise BreakpointReached(
            f"there is a breakpoint at {place} in {frame.f_code.co_name}, and no terminal for its "
            f"debugger here. {remedy}"
        )

    pdb.set_trace = refuse
    if os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):
        sys.breakpointhook = refuse


def _started(call: Callable[[], T]) -> Future[T]:
    """Return a future of `call`, which runs in its own daemon thread."""
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
