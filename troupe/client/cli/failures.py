"""The ends of a command: errors as lines on stderr, exit statuses, and signals."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Self, TypeVar

import typer
from typer.core import TyperGroup

from troupe.rpc.addresses import without_secrets
from troupe.rpc.errors import AlreadyExists, InvalidArgument, NotFound, TroupeError

T = TypeVar("T")

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
TRACEBACK_VARIABLE = "TROUPE_TRACEBACK"
# The input is invalid, or names something that does not exist: repeating does not help.
_INPUT_ERRORS = (InvalidArgument, NotFound, AlreadyExists)
# Commands that an error proposes for an unknown one, at most.
_HINTS = 3
# Errors of a path that the user gave, or of its disk, with the remedy; not bugs of Troupe.
_FILE_ERRORS = {
    errno.EACCES: "Choose a place that you may write to, or read from.",
    errno.EPERM: "Choose a place that you may write to, or read from.",
    errno.EROFS: "Choose a place that can be written to.",
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "Check the path.",
    errno.EISDIR: "Check the path.",
    errno.ENAMETOOLONG: "Check the path.",
    errno.ENOSPC: "Make room on its disk, or choose another.",
    errno.EDQUOT: "Make room on its disk, or choose another.",
}


def explain(error: BaseException) -> tuple[list[str], int]:
    """Return lines for stderr, one per problem, and the exit status."""
    # Without the data model of jobs, which most commands do not import, there is no such error.
    loading: Any = sys.modules.get("troupe.job.loading")
    if loading is not None and isinstance(error, loading.JobSpecError):
        return [_line(str(problem)) for problem in error.problems], BAD_INPUT  # type: ignore[attr-defined]
    match error:
        case TroupeError():
            return [_line(str(error))], BAD_INPUT if isinstance(error, _INPUT_ERRORS) else FAILED
        case typer.Exit():
            return [], error.exit_code
        case KeyboardInterrupt() | typer.Abort():
            return [_line("interrupted.")], INTERRUPTED
        case SystemExit():
            return [], error.code if isinstance(error.code, int) else FAILED
        case BrokenPipeError():
            # The reader of our output closed the pipe; the interpreter must not report that.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return [], FAILED
    if hasattr(error, "format_message"):  # from typer: a wrong option, a missing argument
        return _usage(error), BAD_INPUT
    if os.environ.get(TRACEBACK_VARIABLE):
        return [without_secrets(line) for line in traceback.format_exception(error)], FAILED
    if isinstance(error, OSError) and error.errno in _FILE_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        what = f"{where}{str(error.strerror).rstrip('.')}."
        return [_line(f"{what} {_FILE_ERRORS[error.errno]}")], FAILED
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    remedy = f"This is a bug of Troupe; {TRACEBACK_VARIABLE}=1 shows where."
    return [_line(f"unexpected {what}. {remedy}")], FAILED


def _usage(error: BaseException) -> list[str]:
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if context is None or not message:
        return [_line(message)] if message else []
    stop = "" if message.endswith("?") else "."
    return [_line(f"{message.rstrip('.')}{stop} See `{context.command_path} --help`.")]


class HintingGroup(TyperGroup):
    """A group of commands that, for an unknown command, names the groups that have it: `troupe job
    list` hints at `troupe jobs list`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` begin with. Raises the usage error, with a hint."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            root = ctx.find_root()
            found = [
                f"`{root.info_name} {name} {args[0]}`"
                for name, group in root.command.commands.items()
                if group is not self and args[0] in getattr(group, "commands", ())
            ]
            if args[0] in root.command.commands:
                found.insert(0, f"`{root.info_name} {args[0]}`")
            if found and hasattr(error, "message"):
                given = f"`{ctx.command_path} {args[0]}`"
                # `jobs` for `job`; else all that have it.
                closest = get_close_matches(given, found, 1, 0.9) or found[:_HINTS]
                what = str(error.message).partition(" Did you mean")[0].rstrip(".")
                error.message = f"{what}. Did you mean {' or '.join(closest)}?"
            raise


def _line(text: str) -> str:
    return "error: " + without_secrets(" ".join(text.split()))


# Each signal interrupts the work in progress: the first allows an orderly end, the second forces
# one.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """Raised by `Interrupts.guard` when a signal came before the work was done."""


class Interrupts:
    """A context manager that handles SIGINT, SIGTERM and SIGHUP (main thread only). In another
    thread, `receive` is called in its place.

    A signal cancels the work that `guard` awaits; between guards it is kept for the next guard.
    """

    def __init__(self) -> None:
        """Install nothing yet: `__enter__` installs the handlers."""
        self.signal: signal.Signals | None = None
        self._pending = asyncio.Event()

    @property
    def status(self) -> int:
        """The exit status by the shell's convention, such as 130 after Ctrl-C."""
        return 128 + (self.signal or signal.SIGINT)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises `Interrupted` if a signal comes first.

        In that case `work` is cancelled and awaited, so its clean-up is complete.
        """
        task = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._pending.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._pending.clear()
            raise Interrupted
        finally:
            waiting.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def receive(self, number: signal.Signals) -> None:
        """Handle a signal. Called in the thread of the event loop."""
        self.signal = self.signal or number
        self._pending.set()
