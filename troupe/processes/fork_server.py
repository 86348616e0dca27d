"""A process that imports modules once and forks programs that need them.

    python -m troupe.processes.fork_server [MODULE...] -- FD[,SECONDS] MODULE... [-- ...]

It imports the first modules, and becomes one server for each following group: the first by itself,
the others as forks, so that groups are imported at the same time and share the first modules. A
server imports its modules, those that a request waits for first. On FD, a Unix socket of whole
messages, it receives `ForkRequest`s as JSON, forks a child for each as soon as the modules that the
request names are imported, and answers `{"forked": request id, "pid": ...}` with a pidfd of the
child, and `{"ended": pid, "status": ...}` when a child ends. The child runs its module as
`python -m` does.

A fork copies one thread only, so the modules must not start threads when imported. The server
itself has none and never calls what it has imported. When the socket is closed, its owner has
ended: the server sends SIGTERM to its children and exits.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

# The kernel accepts messages of about 200 KiB on such a socket by default.
MOST_BYTES: Final = 1 << 20
# Stands between groups of modules, which have no blanks in their names.
SEPARATOR: Final = "--"
_HANDLED: Final = (signal.SIGCHLD, signal.SIGTERM)
_NAME: Final = "troupe.processes.fork_server"
_RESUME: Final = "--resume"
# A parameter of mallopt, from malloc.h.
_ARENA_MAX: Final = -8
# Fields of /proc/self/stat after the program's name: proc(5), arg_start and arg_end.
_ARGUMENT_FIELDS: Final = slice(45, 47)


@dataclass(frozen=True)
class ForkRequest:
    """The program that a child becomes."""

    id: int
    module: str
    environment: dict[str, str]
    """The whole environment."""
    log: str
    """File to which its output is appended."""
    needs: tuple[str, ...]
    """Modules that the server imports before it forks."""


@dataclass(frozen=True)
class _State:
    """State of a server, which it keeps when it replaces itself. `others`: servers that this
    process has forked."""

    control: int
    modules: list[str]
    seconds: float | None = None
    others: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


class _Server:
    """The loop of the server: imports, requests, ended children."""

    def __init__(self, state: _State, imported: list[str], *, resumed: bool = False) -> None:
        """`imported`: the modules of the state that this process has imported. It imports the
        others at once or, if it has `resumed`, when a request needs them."""
        self._state = state
        self._control = socket.socket(fileno=state.control)
        self._control.set_inheritable(False)
        self._eager = not resumed
        self._unimported = [module for module in state.modules if module not in imported]
        self._waiting: list[ForkRequest] = []
        self._children = set(state.children)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()

    def run(self) -> ForkRequest | None:
        """Serve; return a request in the child forked for it, None in the server at its end."""
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, lambda number, frame: None)
        for source in (self._control, self._wake):
            self._selector.register(source, selectors.EVENT_READ)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        self._reap()
        while True:
            if (request := self._fork_ready()) is not None:
                return request
            importing = self._unimported and (self._eager or self._waiting)
            events = self._selector.select(0 if importing else self._rest_seconds())
            ready = {key.fileobj for key, _ in events}
            if self._wake in ready and signal.SIGTERM in self._wake.recv(4096):
                break
            self._reap()
            if self._control in ready and not self._receive():
                break
            if not ready and importing:
                self._import_next()
            elif not ready:
                self._replace()
        for child in [*self._children, *self._state.others]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        for other in self._state.others:
            with suppress(ChildProcessError):  # it has ended before
                os.waitpid(other, 0)
        return None

    def _rest_seconds(self) -> float | None:
        """Return after how long without work this process is to be replaced; None: not."""
        something = len(self._unimported) < len(self._state.modules)
        return self._state.seconds if self._children and something else None

    def _replace(self) -> None:
        """Become a fresh interpreter that serves on; return if there is work, or if it fails."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # until it has its handlers
        if not self._selector.select(0):
            state = replace(self._state, children=sorted(self._children))
            command = [sys.executable, "-m", _NAME, _RESUME, json.dumps(asdict(state))]
            self._control.set_inheritable(True)
            with suppress(OSError):
                os.execv(command[0], command)
            self._control.set_inheritable(False)
            self._state = replace(self._state, seconds=None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _receive(self) -> bool:
        """Keep the next request; return False when the owner has closed the socket."""
        try:
            message = self._control.recv(MOST_BYTES)
        except ConnectionError:
            return False
        if not message:
            return False
        values = json.loads(message)
        self._waiting.append(ForkRequest(**{**values, "needs": tuple(values["needs"])}))
        return True

    def _fork_ready(self) -> ForkRequest | None:
        """Fork the children whose modules are imported; return the request in a child."""
        for request in list(self._waiting):
            if not set(request.needs).isdisjoint(self._unimported):
                continue
            self._waiting.remove(request)
            # Objects that exist now stay: without this, the children's collections would write to
            # all of them, and so copy the pages that they share.
            gc.freeze()
            # A child must not lose a signal that comes before it has its own handlers.
            signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in _HANDLED:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            if pid == 0:
                for inherited in (self._control, self._wake, self._woken, self._selector):
                    inherited.close()
                return request
            self._children.add(pid)
            # Not reaped yet, so the number still is this child's.
            descriptor = os.pidfd_open(pid)
            self._tell({"forked": request.id, "pid": pid}, [descriptor])
            os.close(descriptor)
        return None

    def _import_next(self) -> None:
        """Import one module: the next that a request waits for, else the next in order."""
        wanted = (name for request in self._waiting for name in request.needs)
        module = next((name for name in wanted if name in self._unimported), self._unimported[0])
        self._unimported.remove(module)
        _import(module)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._children:  # no other server
                self._children.discard(pid)
                self._tell({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, int], descriptors: list[int] | None = None) -> None:
        with suppress(ConnectionError):  # the owner has ended: the next receive says so
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors or [])


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:
        # The program that needs it meets the same error and reports it.
        print(f"{module} cannot be imported:", file=sys.stderr)
        traceback.print_exc()


def _become(request: ForkRequest) -> None:
    """Turn this forked process into the program of `request`, and run it to its end."""
    os.setsid()
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request.environment)
    _show_as(f"{sys.executable} -m {request.module}")
    _apply_environment(threads)
    sys.argv[:] = sys.argv[:1]
    gc.enable()
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _apply_environment(threads: str | None) -> None:
    """Apply the variables that libraries have read before the fork, with the server's values."""
    if arenas := os.environ.get("MALLOC_ARENA_MAX"):
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(_ARENA_MAX, int(arenas))
    modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
    own = os.environ.get("OMP_NUM_THREADS")
    if own is not None and own != threads and "torch" in modules:
        modules["torch"].set_num_threads(int(own))
    if "numpy.random" in modules:
        modules["numpy"].random.seed()  # else all children draw the same numbers


def _show_as(command: str) -> None:
    """Show `command` as this process's arguments in `ps`, as far as the server's leave room."""
    with suppress(OSError, ValueError):
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        start, end = map(int, stat.rpartition(")")[2].split()[_ARGUMENT_FIELDS])
        words = command.encode().replace(b" ", b"\0") + b"\0"
        ctypes.memmove(start, words[: end - start - 1].ljust(end - start, b"\0"), end - start)


def main() -> None:
    """Serve; in a child, run its program."""
    # Collections take a tenth of the time of imports. Children enable them again.
    gc.disable()
    if sys.argv[1] == _RESUME:
        server = _Server(_State(**json.loads(sys.argv[2])), [], resumed=True)
    else:
        server = _first_server(sys.argv[1:])
    request = server.run()
    if request is not None:
        _become(request)


def _first_server(arguments: list[str]) -> _Server:
    """Import the common modules and fork the servers; return the one of this process."""
    common, *groups = (text.split() for text in " ".join(arguments).split(SEPARATOR))
    for module in common:
        _import(module)
    gc.freeze()
    states = []
    for place, *modules in groups:
        descriptor, _, seconds = place.partition(",")
        rest = float(seconds) if seconds else None
        states.append(_State(int(descriptor), common + modules, rest))
    mine = states[0]
    for state in states[1:]:
        if (pid := os.fork()) == 0:
            mine = replace(state, others=[])
            break
        mine.others.append(pid)
    for state in states:
        if state.control != mine.control:
            os.close(state.control)
    return _Server(mine, common)


if __name__ == "__main__":
    main()
