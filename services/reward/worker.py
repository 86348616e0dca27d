"""The program of a worker process: imports and calls users' functions, and reports how calls end.

Standard library only, and run as a file, so that a worker starts in milliseconds without the
service's imports. It reads frames (four bytes of length, JSON) from standard input and answers each
with one, until the input ends; what functions print goes to standard error.

What a function replaces in a module must not change another function's answer. So this file refers
to functions of modules by the names that it imports before any user's code, and has builtins and,
as a program, a `json` of its own (`private_copy`).
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib.util
import json
import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from importlib import import_module
from inspect import isawaitable
from os import _exit, environ, fstat, getpid, stat
from resource import RLIM_INFINITY, RLIMIT_AS, getpagesize, getrlimit, setrlimit
from traceback import format_exception
from types import ModuleType
from typing import Any, Final, NamedTuple

# Of the functions below: Python looks it up when it defines them.
globals()["__builtins__"] = {**vars(builtins)}

OK: Final = "ok"
RAISED: Final = "raised"
OUT_OF_MEMORY: Final = "out_of_memory"
BAD_RESULT: Final = "bad_result"
BAD_ARGUMENTS: Final = "bad_arguments"
NOT_IMPORTABLE: Final = "not_importable"
# An interface outside refuses calls for a while: the text begins with the seconds (-1: not known)
# and a space.
REFUSED: Final = "refused"
# Files of imported modules have changed: the process must be replaced.
STALE: Final = "stale"

_TRACEBACK_LINES: Final = 30
# Characters of an exception's message, and of its traceback.
_TEXT_CHARS: Final = 2000
_TRACEBACK_CHARS: Final = 16 * 2**10
_MAX_RESULT_BYTES: Final = 16 * 2**20
_PR_SET_DUMPABLE: Final = 4

BREAKPOINT: Final = (
    "there is a breakpoint at {place}, and no terminal for its debugger here. Debug it with "
    "`troupe workflow try JOB.yaml`, where breakpoints work."
)

_STDLIB: Final = sysconfig.get_paths()["stdlib"]

_HEADER_BYTES: Final = 4

_functions: dict[str, Callable[..., Any]] = {}
_mtimes: dict[str, int] = {}


class CallAnswer(NamedTuple):
    """How a call ended: one of the kinds above, the result (JSON) or the message, and the
    traceback that concerns the function's author."""

    kind: str
    text: str = ""
    traceback: str = ""
    # Why the process must not run another call; empty: it may.
    unfit: str = ""

    @classmethod
    def of_frame(cls, fields: object) -> CallAnswer:
        """Return the answer that a frame holds. Raises ValueError."""
        if not isinstance(fields, list) or [type(f) for f in fields] != [str] * len(cls._fields):
            raise ValueError("that is not an answer")
        return cls(*fields)


def initialize(service_pid: int) -> None:
    """Have this process die with the service, and ignore Ctrl-C, which the service handles.

    `service_pid` 0: in a sandbox, which ends with the service by itself. There, nothing that a
    function starts may look into this process (its memory, the file that answers are written to).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not service_pid:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        return
    tether = load_file("../../troupe/processes/tether.py")
    tether.end_with_parent(service_pid, signal.SIGKILL)


def refuse_breakpoint(*_: object, **__: object) -> None:
    """Stand in for `breakpoint()`: nobody could answer a debugger. Raises RuntimeError."""
    frame = sys._getframe(1)
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    raise RuntimeError(BREAKPOINT.format(place=place))


def confine(limits: list[str]) -> None:
    """Set `--{resource}={limit}` and `--landlock={paths}`; nothing that runs here can undo them.

    `--source={folder}` comes first on the import path from now on: what is uploaded must not run
    before this (a `sitecustomize`), nor replace a module that this imports (a `json`).
    """
    for limit in limits:
        name, _, value = limit.removeprefix("--").partition("=")
        if name == "source":
            sys.path.insert(0, value)
            paths = [value, environ.get("PYTHONPATH", "")]
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            continue
        if name == "landlock":
            load_file("sandboxes/landlock.py").confine(*json.loads(value))
            continue
        setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (int(value), int(value)))


def load_file(path: str) -> ModuleType:
    """Return a module of the service by its path from here: uploaded source, which comes first on
    the import path, may have modules of any name."""
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
    spec = importlib.util.spec_from_file_location(f"troupe_{os.path.basename(path)[:-3]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def private_copy(package: str) -> ModuleType:
    """Return the imported package, for its importer alone: from now on `import` finds another
    copy."""
    ours = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name == package or name.startswith(f"{package}.")
    }
    import_module(package)
    return ours[package]


def serve(keeper: Any = None) -> None:
    """Answer requests until standard input ends.

    `keeper` (leftovers.py: `StateKeeper`) restores the process after each call; None: it serves one
    call only.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Functions can neither read nor write between the frames.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    # Nor can the processes that they fork.
    os.register_at_fork(after_in_child=requests.raw.close)  # `requests` may be locked by its reader
    os.register_at_fork(after_in_child=answers.raw.close)
    me, channel = getpid(), file_of(answers.fileno())
    if keeper is not None:
        keeper.begin([requests.fileno(), answers.fileno()])
    while header := requests.read(_HEADER_BYTES):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        call = request.pop("call")
        answer = _CALLS[call](**request)
        if getpid() != me:  # a child that a function forked, and that came back from its code
            _exit(0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed or replaced: they are the function's
                stream.flush()
        if keeper is not None:
            if call == "prepare":
                keeper.take()
            elif call == "invoke":
                answer = answer._replace(unfit=keeper.restore(_keeps_running(request)))
        if file_of(answers.fileno()) != channel:
            _exit(1)  # else the answer would go into some file of the function
        answers.write(frame(json.dumps(answer).encode()))
        answers.flush()
        if answer.unfit:
            _exit(0)


def frame(body: bytes) -> bytes:
    """Return the frame with this body, in the format of troupe/processes/frames.py."""
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove the first frame from `buffer` and return its body; None until all of it is there."""
    end = _HEADER_BYTES + int.from_bytes(buffer[:_HEADER_BYTES], "big")
    if len(buffer) < max(end, _HEADER_BYTES):
        return None
    body = bytes(buffer[_HEADER_BYTES:end])
    del buffer[:end]
    return body


def file_of(descriptor: int) -> tuple[int, int]:
    """Return the device and inode of an open file, pipe or socket; zeros: it is closed."""
    with suppress(OSError):
        found = fstat(descriptor)
        return found.st_dev, found.st_ino
    return (0, 0)


def _keeps_running(request: dict[str, Any]) -> bool:
    """Return whether a function declares that what its calls start serves later ones (an MCP
    server)."""
    function = _functions.get(request["entrypoint"])
    return getattr(function, "keeps_running", False) is True


def ready() -> CallAnswer:
    """Answer with the process id."""
    return CallAnswer(OK, str(getpid()))


def prepare(entrypoint: str) -> CallAnswer:
    """Import "package.module:attribute" ahead of its calls.

    STALE when a module that this process has imported was edited since: old code must not score.
    """
    if _edited():
        return CallAnswer(STALE)
    try:
        _functions[entrypoint] = _load(entrypoint)
    except BaseException as error:  # an import may raise anything, SystemExit included
        return CallAnswer(NOT_IMPORTABLE, f"{entrypoint}: {_message(error)}", _author_view(error))
    _remember_mtimes()
    return CallAnswer(OK)


def invoke(
    entrypoint: str,
    arguments_json: str,
    memory_mib: int,
    environment: dict[str, str] | None = None,
) -> CallAnswer:
    """Call a prepared function with JSON keyword arguments; async functions are awaited.

    `memory_mib` bounds the address space that the call may add to the process; 0: no bound.
    `environment` is added to `os.environ`. Context variables that the call sets (numpy's handling
    of errors among them) end with it, and so does what it does to decimal's context.
    """
    return copy_context().run(_invoke, entrypoint, arguments_json, memory_mib, environment)


def _invoke(
    entrypoint: str, arguments_json: str, memory_mib: int, environment: dict[str, str] | None
) -> CallAnswer:
    if (decimal := sys.modules.get("decimal")) is not None:
        with suppress(Exception):  # a module of the user's
            decimal.setcontext(decimal.getcontext().copy())
    environ.update(environment or {})
    try:
        arguments = json.loads(arguments_json) if arguments_json else {}
    except (ValueError, RecursionError) as error:
        return CallAnswer(BAD_ARGUMENTS, str(error))
    if not isinstance(arguments, dict):
        return CallAnswer(BAD_ARGUMENTS, f"a JSON object is needed, not {type(arguments).__name__}")
    try:
        with _memory_limit(memory_mib):
            result = _functions[entrypoint](**arguments)
            if isawaitable(result):
                import asyncio

                result = asyncio.run(_await(result))
            return _encode(result)
    except MemoryError as error:
        view = _author_view(error)
        del error
        gc.collect()
        limit = f"needed more than {memory_mib} MiB" if memory_mib else "the machine has no more"
        return CallAnswer(OUT_OF_MEMORY, limit, view)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the function's too
        text, view = _message(error), _author_view(error)
        seconds = _retry_after(error)
        if seconds is not None:
            return CallAnswer(REFUSED, f"{seconds:g} {text}", view)
        return CallAnswer(RAISED, text, view)


# Longer pauses are not plausible, and count as not known.
MOST_SECONDS = 86_400.0


def _retry_after(error: BaseException) -> float | None:
    """Return the seconds until an external interface takes calls again, -1 if unknown, None if
    `error` is not about that: by an attribute `retry_after`, or by a response with status 429 (503
    with a Retry-After) that httpx, requests and OpenAI's client keep in their errors."""
    with suppress(BaseException):  # attributes of a user's error may raise, too
        seconds = getattr(error, "retry_after", None)
        if isinstance(seconds, (int, float)) and seconds >= 0:
            return float(seconds) if 0 < seconds <= MOST_SECONDS else -1.0
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", getattr(error, "status_code", None))
        headers = getattr(response, "headers", None) or {}
        value = headers.get("retry-after") or headers.get("Retry-After")
        if status == 429 or (status == 503 and value):
            return _seconds_until(value)
    return None


def _seconds_until(value: str | None) -> float:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3); -1 if not
    known."""
    if not value:
        return -1.0
    try:
        seconds = float(value)
        return max(0.001, seconds) if seconds <= MOST_SECONDS else -1.0
    except ValueError:
        import email.utils
        import time

        with suppress(TypeError, ValueError):
            until = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
            return max(0.001, until) if until <= MOST_SECONDS else -1.0
    return -1.0


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _load(entrypoint: str) -> Callable[..., Any]:
    module, _, path = entrypoint.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _encode(result: Any) -> CallAnswer:
    try:
        text = json.dumps(result, allow_nan=False, default=_plain)
    except MemoryError:
        raise
    except BaseException as error:  # an object of the user's may raise anything
        why = (
            error if isinstance(error, (ValueError, TypeError, RecursionError)) else _message(error)
        )
        return CallAnswer(BAD_RESULT, f"{why}: the function returned {_shown(result)}")
    if len(text) > _MAX_RESULT_BYTES:
        return CallAnswer(BAD_RESULT, f"{len(text):,} bytes of JSON; {_MAX_RESULT_BYTES:,} at most")
    return CallAnswer(OK, text)


def _shown(result: Any) -> str:
    try:
        shown = repr(result)
    except BaseException:
        return f"a {type(result).__name__} that cannot be shown"
    return shown if len(shown) < 200 else shown[:197] + "..."


def _plain(value: Any) -> Any:
    """Convert numpy and torch scalars and arrays to numbers."""
    for name in ("tolist", "item"):
        method = getattr(value, name, None)
        if callable(method):
            return method()
    raise TypeError(f"{type(value).__name__} is not JSON")


@contextmanager
def _memory_limit(mib: int) -> Iterator[None]:
    if mib <= 0:
        yield
        return
    try:
        with open("/proc/self/statm", "rb") as statm:
            used = int(statm.read().split()[0]) * getpagesize()
    except OSError:  # no /proc: the memory in use is not known
        yield
        return
    soft, hard = getrlimit(RLIMIT_AS)
    limit = used + mib * 2**20
    if hard != RLIM_INFINITY:
        limit = min(limit, hard)
    setrlimit(RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):  # the function lowered what nothing can raise
            setrlimit(RLIMIT_AS, (soft, hard))


def _message(error: BaseException) -> str:
    """Return the type and message of an exception, which may itself raise when it is asked."""
    try:
        if type(error).__name__ == "BdbQuit":  # `pdb.set_trace()` has read the end of its input
            return BREAKPOINT.format(place=_last_place(error))
        return f"{type(error).__name__}: {error}"[:_TEXT_CHARS]
    except BaseException:
        return type(error).__name__[:_TEXT_CHARS]


def _last_place(error: BaseException) -> str:
    """Return the innermost place outside of the standard library in an exception's traceback."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_STDLIB):
            place = f"{os.path.basename(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _author_view(error: BaseException) -> str:
    """Return the last lines of the traceback, without frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        lines = "".join(format_exception(type(error), error, frames)).splitlines()
    except BaseException:  # an exception whose own text raises
        return _message(error)
    lines = [line[:_TEXT_CHARS] for line in lines[-_TRACEBACK_LINES:]]
    return "\n".join(lines)[-_TRACEBACK_CHARS:]


def _user_files() -> Iterator[tuple[str, int]]:
    """Yield the path and mtime of imported modules' files, without the interpreter's and installed
    ones."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and is_users(path):
            with suppress(OSError):
                yield path, stat(path).st_mtime_ns


def is_users(path: str) -> bool:
    """Return whether a file with code belongs neither to the interpreter nor to an installed
    package."""
    return not ("site-packages" in path or path.startswith((_STDLIB, "<frozen ")))


def _remember_mtimes() -> None:
    for path, mtime in _user_files():
        _mtimes.setdefault(path, mtime)


def _edited() -> bool:
    return any(_mtimes.get(path, mtime) != mtime for path, mtime in _user_files())


_CALLS: Final[dict[str, Callable[..., CallAnswer]]] = {
    "ready": ready,
    "prepare": prepare,
    "invoke": invoke,
}

if __name__ == "__main__":
    _, *options = sys.argv
    parent = 0  # in a sandbox, which ends by itself and runs one call
    if options[0].startswith("--parent="):
        parent = int(options.pop(0).removeprefix("--parent="))
    initialize(parent)
    if environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):
        sys.breakpointhook = refuse_breakpoint
    keeper = None
    if parent:
        keeper = load_file("leftovers.py").StateKeeper(is_users, file_of)
    json = private_copy("json")  # type: ignore[assignment]
    confine(options)
    serve(keeper)
