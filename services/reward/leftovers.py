"""Restoring of a worker process after each call, or the reason why it cannot serve another one.

`sandbox: process` runs calls of several functions in one process, and changes by one call must not
reach the next. The environment, the working directory, the umask, signal handlers, timers, the
import path, the filters of warnings and the interpreter's settings are cheap to restore. After any
other change (a closed descriptor, a replaced function of a module, a thread or process that
continues) the process must be replaced. Effects of imports stay.

Standard library only. worker.py loads it before any user's code, and like that file it refers to
functions of modules by names of its own and has builtins of its own.
"""

from __future__ import annotations

import _locale
import _signal  # type: ignore[import-not-found]
import _socket
import builtins
import ctypes
import gc
import logging
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from os import (
    P_ALL,
    PRIO_PROCESS,
    WEXITED,
    WNOHANG,
    WNOWAIT,
    chdir,
    environ,
    environb,
    get_blocking,
    getcwd,
    getpriority,
    kill,
    listdir,
    set_blocking,
    umask,
    waitid,
    waitpid,
)
from resource import getrlimit
from signal import (
    ITIMER_PROF,
    ITIMER_REAL,
    ITIMER_VIRTUAL,
    SIG_BLOCK,
    SIG_SETMASK,
    SIGKILL,
    Signals,
    pthread_sigmask,
    set_wakeup_fd,
    setitimer,
    signal,
)
from sys import _current_frames
from time import monotonic, sleep, tzset
from types import FrameType, ModuleType
from typing import Any, Final

globals()["__builtins__"] = {**vars(builtins)}

_PR_SET_CHILD_SUBREAPER: Final = 36
# Time limit for killed children to end.
_END_SECONDS: Final = 5.0

# Two short cuts into the library save 60 of 120 us per call: `os.environ` decodes every variable to
# be compared, `signal.getsignal` makes an enum of every answer.
_VARIABLES: Final[dict[bytes, bytes]] = vars(environ)["_data"]
_handler_of: Final[Callable[[int], Any]] = _signal.getsignal

_SIGNALS: Final = tuple(int(number) for number in Signals)
_LIMITS: Final = tuple(
    sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
)
_TIMERS: Final = (ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF)
_on, _off, _thresholds = gc.enable, gc.disable, gc.set_threshold
_locale_of, _ALL_OF_LOCALE, _log_manager = _locale.setlocale, _locale.LC_ALL, logging.root.manager


def _enable_collector(enabled: bool) -> None:
    (_on if enabled else _off)()


def _set_thresholds(given: tuple[int, int, int]) -> None:
    _thresholds(*given)


def _get_locale() -> str:
    return _locale_of(_ALL_OF_LOCALE, None)


def _set_locale(given: str) -> None:
    _locale_of(_ALL_OF_LOCALE, given)


def _get_silenced() -> int:
    return _log_manager.disable


def _set_silenced(level: int) -> None:
    _log_manager.disable = level


# Settings of the whole process: what reads one, and what sets it again.
_SETTINGS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...]] = (
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (threading.gettrace, threading.settrace),
    (threading.getprofile, threading.setprofile),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    (gc.isenabled, _enable_collector),
    (gc.get_threshold, _set_thresholds),
    (_socket.getdefaulttimeout, _socket.setdefaulttimeout),
    (_get_locale, _set_locale),
    (_get_silenced, _set_silenced),
)
# Modules whose functions and classes no call may replace: those that nearly all code depends on,
# and those that run a coroutine of any function.
_MODULES: Final = (
    *("builtins", "os", "os.path", "io", "sys", "time", "threading", "struct", "warnings"),
    *("json", "json.decoder", "json.encoder", "math", "random", "re", "subprocess", "importlib"),
    *("collections", "collections.abc", "functools", "itertools", "operator"),
    *("asyncio", "asyncio.events", "asyncio.runners"),
)
# Objects of modules whose attributes are functions that can be replaced.
_OPEN_OBJECTS: Final = (("json", "_default_encoder"), ("json", "_default_decoder"))
# Names that the classes of these modules give as their module.
_HOMES: Final = frozenset({*_MODULES, "posixpath", "_weakrefset", "_collections_abc"})
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes can be set


class HeldModule:
    """A module and the functions and classes that it has at present."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self._functions = {name: v for name, v in vars(module).items() if callable(v)}
        # Far quicker to compare than by names; a difference may be some variable of the module.
        self._values = [*vars(module).values()]

    def replaced(self) -> str:
        """Return the name of a function or class that is another one now, or has gone; "": none
        is."""
        now = vars(self.module)
        values = [*now.values()]
        if values == self._values:
            return ""
        for name, function in self._functions.items():
            if now.get(name) is not function:
                return name
        self._values = values
        return ""


class StateKeeper:
    """The state of this process that no call may change for the next one."""

    def __init__(
        self, is_users: Callable[[str], bool], file_of: Callable[[int], tuple[int, int]]
    ) -> None:
        """`is_users`: whether a file with code is the user's. `file_of`: what is open under the
        number of a descriptor."""
        self._is_users, self._file_of = is_users, file_of
        for (
            name
        ) in _MODULES:  # a call could replace a function of a module that it is the first to import
            import_module(name)

    def begin(self, channels: Sequence[int]) -> None:
        """Begin, before any user's code. `channels`: descriptors to the service."""
        # A process whose parent has ended becomes a child of this one, and so is found.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._channels = (0, 1, 2, *channels)
        self.take()

    def take(self) -> None:
        """Take the present state, after an import, as what calls must leave."""
        self._descriptors = {number: self._file_of(number) for number in self._channels}
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._modules = {
            name: HeldModule(module)
            for name in _MODULES
            if (module := sys.modules.get(name)) is not None  # an import may have removed it
        }
        # Classes that are written in Python have attributes that can be replaced, too.
        classes = {
            one
            for name in self._modules
            for one in vars(sys.modules[name]).values()
            if isinstance(one, type) and one.__flags__ & _HEAP_TYPE
            if one.__module__ in _HOMES
        }
        self._classes = [(one, dict(vars(one))) for one in classes]
        self._objects = [
            (f"{module}.{name}", one, dict(vars(one)))
            for module, name in _OPEN_OBJECTS
            if (one := getattr(sys.modules.get(module), name, None)) is not None
        ]
        self._environment = dict(_VARIABLES)
        self._folder = getcwd()
        self._umask = umask(0o077)
        umask(self._umask)
        self._handlers = [*map(_handler_of, _SIGNALS)]
        self._mask = pthread_sigmask(SIG_BLOCK, ())
        self._settings = [get() for get, _ in _SETTINGS]
        self._blocking = [*map(get_blocking, range(3))]
        self._priority = getpriority(PRIO_PROCESS, 0)
        self._formats = _formats(self._streams)
        self._path, self._entries = sys.path, [*sys.path]
        self._filters: list[Any] = vars(warnings)["filters"]
        self._warnings = [*self._filters]
        self._loop_policy = vars(_events())["_event_loop_policy"]
        self._limits = [*map(getrlimit, _LIMITS)]
        self._take_running()

    def restore(self, keeps_running: bool) -> str:
        """Restore the state after a call; return why the process cannot serve another, or "".

        `keeps_running`: threads and processes that the call started serve later calls. Else they
        end with it; so do all children of a process that is to be replaced.
        """
        try:
            why = self._changed() or self._restored() or self._running(keeps_running)
        except BaseException as error:  # its own code was replaced, or a handler of the user's ran
            why = f"its state cannot be told: {type(error).__name__}"
        if why:
            with suppress(BaseException):
                end_children()
        return why

    def _changed(self) -> str:
        """Name a change of the call that cannot be restored; empty: there is none."""
        for number, file in self._descriptors.items():
            if self._file_of(number) != file:
                return f"descriptor {number} was closed or replaced"
        streams = (sys.stdin, sys.stdout, sys.stderr)
        if streams != self._streams:
            return "sys.stdin, sys.stdout or sys.stderr was replaced"
        if any(stream is not None and stream.closed for stream in streams):
            return "sys.stdin, sys.stdout or sys.stderr was closed"
        if _formats(streams) != self._formats:
            return "the encoding or buffering of sys.stdin, sys.stdout or sys.stderr was changed"
        if sys.modules["os"].environ is not environ:
            return "os.environ was replaced"
        for name, held in self._modules.items():
            if sys.modules.get(name) is not held.module:
                return f"the module {name} was replaced"
            if replaced := held.replaced():
                return f"{name}.{replaced} was replaced"
        for one, attributes in self._classes:
            if vars(one) != attributes:
                return f"an attribute of {one.__module__}.{one.__qualname__} was replaced"
        for where, owner, attributes in self._objects:
            if vars(owner) != attributes:
                return f"an attribute of {where} was replaced"
        if [*map(getrlimit, _LIMITS)] != self._limits:
            return "resource limits were changed"
        if getpriority(PRIO_PROCESS, 0) != self._priority:
            return "the priority was changed"
        return ""

    def _restored(self) -> str:
        """Restore what can be; return what could not."""
        for timer in _TIMERS:
            setitimer(timer, 0)
        handlers = [*map(_handler_of, _SIGNALS)]
        if handlers != self._handlers:
            for number, now, handler in zip(_SIGNALS, handlers, self._handlers, strict=True):
                if now != handler:
                    if handler is None:  # not of Python
                        return f"the handler of {Signals(number).name} was replaced"
                    signal(number, handler)
        pthread_sigmask(SIG_SETMASK, self._mask)
        set_wakeup_fd(-1)
        for number, blocking in enumerate(self._blocking):
            set_blocking(number, blocking)
        umask(self._umask)
        for (get, set_to), given in zip(_SETTINGS, self._settings, strict=True):
            if get() != given:
                set_to(given)
        self._restore_imports_and_warnings()
        here = ""
        with suppress(OSError):  # it was removed
            here = getcwd()
        if here != self._folder:
            try:
                chdir(self._folder)
            except OSError as error:
                return f"the working directory {self._folder} cannot be entered: {error.strerror}"
        if self._environment != _VARIABLES:
            for name in [*environb]:
                if name not in self._environment:
                    del environb[name]
            environb.update(self._environment)
            tzset()
        return ""

    def _restore_imports_and_warnings(self) -> None:
        """Restore the order in which modules are found, the filters of warnings and what makes
        event loops. Folders that imports appended to the path stay, at its end."""
        entries = self._entries
        if sys.path is not self._path or self._path[: len(entries)] != entries:
            added = [one for one in sys.path if one not in entries]
            sys.path = self._path
            self._path[:] = [*entries, *added]
        if vars(warnings)["filters"] is not self._filters or self._filters != self._warnings:
            self._filters[:] = self._warnings
            vars(warnings)["filters"] = self._filters
            warnings._filters_mutated()  # type: ignore[attr-defined]
        events = _events()
        if vars(events)["_event_loop_policy"] is not self._loop_policy:
            vars(events)["_event_loop_policy"] = self._loop_policy

    def _take_running(self) -> None:
        self._children = children()
        self._threads = {*threading.enumerate()}  # this one among them

    def _running(self, keeps_running: bool) -> str:
        """Name a process or thread that the call left running; empty: there is none."""
        if keeps_running:
            self._take_running()
            return ""
        for pid in children() - self._children:
            try:
                ended, _ = waitpid(pid, WNOHANG)
            except ChildProcessError:
                continue
            if not ended:
                return "a process that it started went on"
        frames = _current_frames()
        if len(frames) > 1:
            for thread in threading.enumerate():
                frame = frames.pop(thread.ident or 0, None)
                if thread not in self._threads and self._is_at_work(thread, frame):
                    return "a thread that it started went on"
            if any(self._in_users_code(frame) for frame in frames.values()):
                return "a thread that it started went on"
        return ""

    def _is_at_work(self, thread: threading.Thread, frame: FrameType | None) -> bool:
        """Return whether a thread was made for a function of the user's, or runs one at present:
        idle threads of a pool, and helpers of libraries, do neither."""
        for name in ("_target", "function", "run"):  # of a thread, a timer, a class of the user's
            function = getattr(thread, name, None)
            code = getattr(function, "__code__", None)  # a method has its function's
            if code is not None and self._is_users(code.co_filename):
                return True
        return self._in_users_code(frame)

    def _in_users_code(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if self._is_users(frame.f_code.co_filename):
                return True
            frame = frame.f_back
        return False


def _events() -> ModuleType:
    return sys.modules["asyncio.events"]


def _formats(streams: Sequence[Any]) -> list[Any]:
    """Return how streams encode and buffer text, and attributes that were set on them."""
    return [
        None
        if one is None
        else (one.encoding, one.errors, one.line_buffering, one.write_through, {**vars(one)})
        for one in streams
    ]


def children() -> set[int]:
    """Return the ids of the children of this process, also of ended ones that were not waited
    for."""
    try:
        waitid(P_ALL, 0, WEXITED | WNOHANG | WNOWAIT)
    except ChildProcessError:  # by far the cheapest way to know that there are none
        return set()
    found: set[int] = set()
    for task in listdir("/proc/self/task"):
        with suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as listed:
            found.update(map(int, listed.read().split()))
    return found


def end_children() -> None:
    """Kill all that descends from this process, which adopts what its children leave."""
    deadline = monotonic() + _END_SECONDS
    while (left := children()) and monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, SIGKILL)
            with suppress(ChildProcessError):
                waitpid(pid, WNOHANG)
        sleep(0.001)
