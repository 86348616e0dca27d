"""Functions that start other processes in every way, each of which tries to answer for them.

Standard library only: they run in sandboxes, too.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pty
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import Final

FORGED: Final = 77.0
TRUE: Final = 0.25
# Descriptors that a process may find a channel under.
_DESCRIPTORS: Final = range(3, 64)

# The program that a function starts does the same as `forge`.
PROGRAM: Final = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from forking_functions import forge
forge(int(sys.argv[2]))
"""


def forge(function_pid: int) -> None:
    """Write the frame of an answer into all that is open, also under the function's name."""
    body = b'["ok", "%.1f", "", ""]' % FORGED
    frame = struct.pack(">I", len(body)) + body
    for descriptor in _DESCRIPTORS:
        try:
            os.write(descriptor, frame)
        except OSError:
            continue
        if os.getuid() == 0:  # may name any process as the sender, and is in no sandbox
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as channel:
                claimed = struct.pack("3i", function_pid, os.getuid(), os.getgid())
                message = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, claimed)
                channel.sendmsg([frame], [message], socket.MSG_DONTWAIT)
        except OSError:
            continue


def _program() -> list[str]:
    return [sys.executable, "-c", PROGRAM, os.path.dirname(__file__), str(os.getpid())]


def _make_inheritable() -> None:
    for descriptor in _DESCRIPTORS:
        try:
            os.set_inheritable(descriptor, True)
        except OSError:
            continue


def _await(pid: int) -> None:
    os.waitpid(pid, 0)


def _fork() -> None:
    me = os.getpid()
    if (pid := os.fork()) == 0:
        forge(me)
        os._exit(0)
    _await(pid)


def _fork_that_returns() -> None:
    """The child returns from the function like its parent."""
    me = os.getpid()
    if (pid := os.fork()) == 0:
        forge(me)
        return
    _await(pid)


def _fork_that_raises() -> None:
    if (pid := os.fork()) == 0:
        raise SystemExit(0)
    _await(pid)


def _multiprocessing(method: str) -> None:
    context = multiprocessing.get_context(method)
    process = context.Process(target=forge, args=(os.getpid(),))
    process.start()
    process.join()


def _subprocess() -> None:
    _make_inheritable()
    subprocess.run(_program(), close_fds=False, check=True)


def _subprocess_passed() -> None:
    kept = []
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
            kept.append(descriptor)
        except OSError:
            continue
    subprocess.run(_program(), pass_fds=kept, check=True)


def _posix_spawn() -> None:
    _make_inheritable()
    command = _program()
    _await(os.posix_spawn(command[0], command, os.environ))


def _libc(name: str, *arguments: int) -> None:
    """A fork that Python does not see."""
    me = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    pid = libc[name](*map(ctypes.c_long, arguments))
    if pid == 0:
        forge(me)
        libc._exit(0)
    if pid > 0:
        _await(pid)


def _clone() -> None:
    """clone(SIGCHLD | CLONE_FILES): the child has its parent's table of descriptors."""
    number = 56 if os.uname().machine == "x86_64" else 220
    _libc("syscall", number, signal.SIGCHLD | 0x400, 0, 0, 0, 0)


def _pty() -> None:
    me = os.getpid()
    pid, terminal = pty.fork()
    if pid == 0:
        forge(me)
        os._exit(0)
    _await(pid)
    os.close(terminal)


def _daemon() -> None:
    """Fork twice, in a separate session, and continue forging until the end."""
    me = os.getpid()
    ready, told = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            forge(me)
            os.write(told, b"x")
            while True:
                forge(me)
                time.sleep(0.001)
        os._exit(0)
    _await(pid)
    os.read(ready, 1)


def _passed_over_a_socket() -> None:
    """A child gets the descriptors themselves (SCM_RIGHTS)."""
    me = os.getpid()
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        _, attached, _, _ = theirs.recvmsg(1, socket.CMSG_SPACE(4 * len(_DESCRIPTORS)))
        assert attached
        forge(me)
        os._exit(0)
    sent = array("i")
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
            sent.append(descriptor)
        except OSError:
            continue
    ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
    _await(pid)
    ours.close()
    theirs.close()


def _in_a_thread() -> None:
    thread = threading.Thread(target=_fork)
    thread.start()
    thread.join()


WAYS: Final[dict[str, Callable[[], None]]] = {
    "fork": _fork,
    "fork_that_returns": _fork_that_returns,
    "fork_that_raises": _fork_that_raises,
    "multiprocessing_fork": lambda: _multiprocessing("fork"),
    "multiprocessing_forkserver": lambda: _multiprocessing("forkserver"),
    "multiprocessing_spawn": lambda: _multiprocessing("spawn"),
    "subprocess": _subprocess,
    "subprocess_passed": _subprocess_passed,
    "posix_spawn": _posix_spawn,
    "libc_fork": lambda: _libc("fork"),
    "clone": _clone,
    "pty": _pty,
    "daemon": _daemon,
    "passed_over_a_socket": _passed_over_a_socket,
    "thread_forks": _in_a_thread,
}


def forks(way: str) -> float:
    """TRUE, after a process that was started so has tried to answer FORGED."""
    WAYS[way]()
    return TRUE


def becomes_another_program() -> float:
    """The function's own process runs another program, which has its id."""
    command = _program()
    os.execv(command[0], command)


def floods(mib: int) -> float:
    """A child writes so much into every socket that is open."""
    libc = ctypes.CDLL(None)
    if (pid := libc.fork()) == 0:
        for descriptor in _DESCRIPTORS:
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    for _ in range(mib << 4):
                        os.write(descriptor, bytes(1 << 16))
            except OSError:
                continue
        libc._exit(0)
    _await(pid)
    return TRUE
