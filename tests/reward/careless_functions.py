"""Functions that leave the process in which they run other than they found it."""

from __future__ import annotations

import _thread
import asyncio
import builtins
import collections
import concurrent.futures
import decimal
import functools
import gc
import io
import json
import locale
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

_pool = concurrent.futures.ThreadPoolExecutor(2)
_handles: list[Any] = []


def state() -> dict[str, Any]:
    """Return a function's surroundings in its process, and whether they work."""
    print("printed")
    print("printed", file=sys.stderr, flush=True)
    sys.stdout.flush()
    with tempfile.TemporaryFile("w") as file:
        file.write("x")
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        "descriptors": [stat.S_IFMT(os.fstat(number).st_mode) for number in range(3)],
        "folder": os.getcwd(),
        "umask": mask,
        "environment": sorted(os.environ.items()),
        "handlers": [str(signal.getsignal(number)) for number in signal.Signals],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "limits": [list(resource.getrlimit(n)) for n in range(resource.RLIM_NLIMITS)],
        "recursion": sys.getrecursionlimit(),
        "settings": [sys.getswitchinterval(), sys.get_int_max_str_digits(), gc.isenabled()],
        "thresholds": gc.get_threshold(),
        "traced": [str(get()) for get in (sys.gettrace, sys.getprofile, threading.gettrace)],
        "timeout": socket.getdefaulttimeout(),
        "locale": locale.setlocale(locale.LC_ALL),
        "logs": logging.root.manager.disable,
        "path": list(sys.path),
        "warnings": [str(one[:3]) for one in warnings.filters],
        "zone": time.tzname,
        "third": str(decimal.Decimal(1) / 3),
        "blocking": [os.get_blocking(number) for number in range(3)],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "encodings": [sys.stdout.encoding, sys.stderr.encoding],
        "tools": [functools.reduce(max, [1, 2]), collections.Counter("aab").most_common(1)],
        "awaited": asyncio.run(_awaited()),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("careless")],
        "json": [json.dumps([1, "a"]), json.loads("[1]"), json.JSONEncoder().encode({"a": None})],
        "calls": [math.sqrt(4), random.random() < 1, len("ab"), struct.calcsize(">I")],
        "modules": [sys.modules[name] is value for name, value in (("json", json), ("os", os))],
        "ran": subprocess.run(["echo", "ran"], capture_output=True, text=True).stdout,
    }


async def _awaited() -> float:
    await asyncio.sleep(0)
    return 0.25


async def scores_later() -> float:
    """A function that its worker awaits."""
    return await _awaited()


def its_pid() -> int:
    return os.getpid()


def _lie(*_: Any, **__: Any) -> Any:
    return "77.0"


def _run_and_lie(coroutine: Any, **_: Any) -> float:
    coroutine.close()
    return 77.0


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        raise RuntimeError("no event loop")


def _move_to_tokyo() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def _lower_a_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def _enter_a_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def _start(thread: threading.Thread) -> None:
    thread.name = "careless"
    thread.start()


def _start_a_thread(**options: Any) -> None:
    _start(threading.Thread(target=lambda: time.sleep(600), **options))


class _Sleeper(threading.Thread):
    def run(self) -> None:
        time.sleep(600)


def _sleep(began: threading.Event) -> None:
    began.set()
    time.sleep(600)


def _start_a_raw_thread() -> None:
    began = threading.Event()
    _thread.start_new_thread(_sleep, (began,))
    began.wait()


def _occupy_the_pool() -> None:
    began = threading.Event()
    _pool.submit(_sleep, began)
    began.wait()


async def _await_a_process() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()


def _use_a_pool_of_processes() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
        pool.close()
        pool.join()


def _use_an_executor() -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        assert executor.submit(abs, -1).result() == 1


def _replace_the_environment() -> None:
    vars(os)["environ"] = dict(os.environ)


# Restored: the worker serves on.
MENDED: Final[dict[str, Callable[[], Any]]] = {
    "environment": lambda: os.environ.update(CARELESS="1", PATH="/nowhere"),
    "environment_less": lambda: os.environ.pop("PATH"),
    "environment_empty": lambda: os.environ.clear(),
    "folder": lambda: os.chdir("/"),
    "folder_that_is_gone": _enter_a_folder,
    "umask": lambda: os.umask(0o777),
    "handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "handler_of_ours": lambda: signal.signal(signal.SIGUSR1, lambda *_: None),
    "blocked_signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    "alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 600, 600),
    "recursion": lambda: sys.setrecursionlimit(5000),
    "trace": lambda: sys.settrace(lambda *_: None),
    "trace_of_threads": lambda: threading.settrace(lambda *_: None),
    "profile": lambda: sys.setprofile(lambda *_: None),
    "switch_interval": lambda: sys.setswitchinterval(10),
    "digits": lambda: sys.set_int_max_str_digits(640),
    "garbage": gc.disable,
    "garbage_often": lambda: gc.set_threshold(1, 1, 1),
    "socket_timeout": lambda: socket.setdefaulttimeout(0.001),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "logs": lambda: logging.disable(logging.CRITICAL),
    "path": lambda: sys.path.insert(0, "/nowhere"),
    "path_gone": lambda: setattr(sys, "path", []),
    "warnings": lambda: warnings.simplefilter("error"),
    "warnings_gone": lambda: setattr(warnings, "filters", []),
    "loop_policy": lambda: asyncio.set_event_loop_policy(_Policy()),
    "time_zone": _move_to_tokyo,
    "precision": lambda: setattr(decimal.getcontext(), "prec", 2),
    "decimal_context": lambda: decimal.setcontext(decimal.Context(prec=2)),
    "not_blocking": lambda: os.set_blocking(2, False),
}
# Nothing is left: neither.
HARMLESS: Final[dict[str, Callable[[], Any]]] = {
    "idle_pool": lambda: _pool.submit(time.sleep, 0).result(),
    "event_loop": lambda: asyncio.run(asyncio.sleep(0)),
    "ended_process": lambda: _handles.append(subprocess.Popen(["true"])) or _handles[-1].wait(),
    "imports": lambda: __import__("colorsys"),
    "awaited_process": lambda: asyncio.run(_await_a_process()),
    "process_pool": _use_a_pool_of_processes,
    "executor": _use_an_executor,
}
# The worker is replaced.
BROKEN: Final[dict[str, Callable[[], Any]]] = {
    "input": lambda: os.close(0),
    "output": lambda: os.close(1),
    "errors": lambda: os.close(2),
    "all_three": lambda: os.closerange(0, 3),
    "output_elsewhere": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1),
    "print_closed": lambda: sys.stdout.close(),
    "print_elsewhere": lambda: setattr(sys, "stdout", io.StringIO()),
    "print_nowhere": lambda: setattr(sys, "stderr", None),
    "environment_replaced": _replace_the_environment,
    "json.dumps": lambda: setattr(json, "dumps", _lie),
    "json.loads": lambda: setattr(json, "loads", _lie),
    "json.encoder": lambda: setattr(json.JSONEncoder, "encode", _lie),
    "json.encoder.c": lambda: setattr(json.encoder, "c_make_encoder", _lie),
    "json.gone": lambda: delattr(json, "dumps"),
    "open": lambda: setattr(builtins, "open", _lie),
    "len": lambda: setattr(builtins, "len", lambda _: 77),
    "os.write": lambda: setattr(os, "write", _lie),
    "os.fork": lambda: setattr(os, "fork", _lie),
    "math.sqrt": lambda: setattr(math, "sqrt", _lie),
    "struct.pack": lambda: setattr(struct, "calcsize", _lie),
    "time": lambda: setattr(time, "time", _lie),
    "json.default": lambda: setattr(vars(json)["_default_encoder"], "encode", _lie),
    "asyncio.run": lambda: setattr(asyncio, "run", _run_and_lie),
    "asyncio.Runner": lambda: setattr(asyncio.runners, "Runner", _lie),
    "asyncio.Runner.run": lambda: setattr(asyncio.Runner, "run", _lie),
    "functools.reduce": lambda: setattr(functools, "reduce", _lie),
    "Counter": lambda: setattr(collections.Counter, "most_common", _lie),
    "Popen.wait": lambda: setattr(subprocess.Popen, "wait", _lie),
    "Thread.start": lambda: setattr(threading.Thread, "start", _lie),
    "os.environ": lambda: setattr(type(os.environ), "__getitem__", _lie),
    "sys.exit": lambda: setattr(sys, "exit", _lie),
    "excepthook": lambda: setattr(sys, "excepthook", _lie),
    "encoding": lambda: vars(sys)["stdout"].reconfigure(encoding="ascii"),
    "print_replaced": lambda: setattr(sys.stdout, "write", _lie),
    "priority": lambda: os.nice(5),
    "module": lambda: sys.modules.__setitem__("json", os),
    "module_gone": lambda: sys.modules.pop("os"),
    "limit": _lower_a_limit,
    "thread": _start_a_thread,
    "daemon_thread": lambda: _start_a_thread(daemon=True),
    "timer_of_ours": lambda: _start(threading.Timer(600, its_pid)),
    "thread_of_a_class": lambda: _start(_Sleeper(daemon=True)),
    "raw_thread": _start_a_raw_thread,
    "busy_pool": _occupy_the_pool,
}
_ALL: Final = {**MENDED, **HARMLESS, **BROKEN}


def breaks(what: str) -> float:
    """An honest score, and something broken."""
    _ALL[what]()
    return 0.5


def leaves(ends: str = "returns", session: bool = True, deep: bool = False, path: str = "") -> int:
    """Leaves a process; its id, which is also written to `path`."""
    command = ["sleep", "600"]
    if deep:  # its parent ends at once
        script = "sleep 600 >/dev/null 2>&1 & echo $!"
        done = subprocess.run(["setsid", "sh", "-c", script], capture_output=True, text=True)
        pid = int(done.stdout)
    else:
        _handles.append(subprocess.Popen(command, start_new_session=session))
        pid = _handles[-1].pid
    if path:
        with open(path, "w") as file:
            file.write(str(pid))
    if ends == "hangs":
        time.sleep(600)
    if ends == "raises":
        raise ValueError(pid)
    return pid


def keeps() -> int:
    """A separate process, started by its first call; the id."""
    if not _handles:
        _handles.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    assert _handles[0].poll() is None
    return int(_handles[0].pid)


keeps.keeps_running = True  # type: ignore[attr-defined]
