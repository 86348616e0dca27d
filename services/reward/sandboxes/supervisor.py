"""The first process of a sandbox: runs one call at a time, each in a child process of its own.

Between two calls only this process and files are left: what a call had started is killed before its
answer is sent, so that nothing of an earlier call can look into a later one, change its answer or
race with it for a file. What a function starts can look neither into this process nor into the
function's (memory, open files), although it is of the same user. Nor can it answer for the
function: the kernel names the sender of every byte of an answer (`received`).

Standard library only, and run as a file with the worker's file and its limits as arguments. With
`--texts={folder}` the function's code is imported from texts that are read once, because calls
could change the files. It reads frames (four bytes of length, JSON) from standard input:

    {"id": 1, "call": "ready"}
    {"id": 2, "call": "prepare", "entrypoint": "package.module:function"}
    {"id": 3, "call": "invoke", "entrypoint": .., "arguments_json": .., "memory_mib": ..}
    {"id": 3, "call": "kill"}

and answers each but the last with {"id": .., "answer": [kind, text, traceback], "output": ".."}.
A call that comes while another runs is refused. It ends, and all with it, when standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator
from typing import Any, Final

WORK: Final = "/tmp/work"
# Home directory of calls; this process has none, so that it imports nothing that a call wrote.
HOME: Final = "/tmp"

# Process, user and group that sent something (SCM_CREDENTIALS).
_SENDER: Final = struct.Struct("3i")
_READ_BYTES: Final = 1 << 16
_OUTPUT_BYTES: Final = 16 << 10
# An answer is a result of at most 16 MiB, or an error. So much may others send, too, before the
# call ends.
_ANSWER_BYTES: Final = 20 << 20
# How long killed processes may take to end; then the whole sandbox ends.
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_PR_SET_DUMPABLE: Final = 4
# Of calls: the kernel kills them before the supervisor where memory runs out.
_OOM_SCORE: Final = "500"

# Its exit status when something in the sandbox cannot be ended.
_STUCK: Final = 75

DIED: Final = "died"
NO_ROOM: Final = "no_room"
# Why a call died.
FOREIGN: Final = "processes that the call started wrote too much where its answer is read"


def answer_channel() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection: `received` reads from the first what was written to the second."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


def received(channel: socket.socket) -> tuple[bytes, int]:
    """Receive the bytes that one process has sent so far, with the id of that process.

    The kernel attests the id (unix(7), SCM_CREDENTIALS). Only CAP_SYS_ADMIN, which no sandbox has,
    lets a process name another one: a forked child has all that its parent knows and has open, but
    not its id. Raises BlockingIOError.
    """
    part, attached, _, _ = channel.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_SENDER.size))
    for level, kind, content in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return part, _SENDER.unpack(content)[0]
    return part, 0


class ChildCall:
    """The child process of a call, and what has been read of its answer and output."""

    def __init__(self, call_id: int, pid: int, channel: socket.socket, output: int) -> None:
        self.call_id, self.pid = call_id, pid
        self.channel = channel
        self.answer_fd, self.output_fd = channel.fileno(), output
        self.answer, self.output = bytearray(), bytearray()
        # Bytes that other processes sent to the channel.
        self.foreign = 0

    def read_answer(self) -> bytes:
        """Read the channel, and keep for the answer the bytes that the call's own process sent.
        Raises BlockingIOError."""
        part, sender = received(self.channel)
        if sender == self.pid:
            self.answer += part
        else:
            self.foreign += len(part)
        return part


class SandboxSupervisor:
    """Reads requests, runs them in child processes, and writes the answers; single-threaded."""

    def __init__(self, worker: types.ModuleType) -> None:
        self._worker = worker
        self._select = selectors.DefaultSelector()
        self._requests, self._answers = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        # Imported modules can neither read nor write between the frames.
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        self._buffer = bytearray()
        # Whether this process is not a child that was forked from it.
        self._first = True
        os.register_at_fork(after_in_child=self._leave)
        # The call that runs, and its descriptors that are still open.
        self._call: ChildCall | None = None
        self._open: set[int] = set()
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._awake, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _dumpable(False)

    def _leave(self) -> None:
        """Close the supervisor's descriptors in a child of it, once: a later child of that child
        may have other files under their numbers."""
        if self._first:
            self._first = False
            for descriptor in (self._requests, self._answers, self._awake, self._waker):
                os.close(descriptor)
            self._select.close()

    def serve(self) -> None:
        """Serve requests until standard input ends."""
        os.makedirs(WORK, exist_ok=True)
        self._select.register(self._requests, selectors.EVENT_READ)
        self._select.register(self._awake, selectors.EVENT_READ)
        while True:
            for key, _ in self._select.select():
                if key.fd == self._requests:
                    if not self._receive():
                        return
                elif key.fd == self._awake:
                    with contextlib.suppress(BlockingIOError):
                        while os.read(self._awake, _READ_BYTES):
                            pass
                else:
                    self._read(key.fd)
            self._reap()

    def _receive(self) -> bool:
        part = os.read(self._requests, _READ_BYTES)
        self._buffer += part
        while (body := self._worker.take_frame(self._buffer)) is not None:
            self._handle(json.loads(body))
        return bool(part)

    def _handle(self, frame: dict[str, Any]) -> None:
        call_id, what = frame.pop("id"), frame.pop("call")
        if what == "kill":
            if self._call is not None and self._call.call_id == call_id:
                _end_all()
                self._died(self._call, -signal.SIGKILL)
        elif what == "invoke":
            if self._call is not None:
                self._answer(call_id, NO_ROOM, "another call runs in the sandbox")
                return
            try:
                self._invoke(call_id, frame)
            except OSError as error:  # processes or files have run out
                self._answer(call_id, NO_ROOM, f"no process could be started: {error}")
        else:
            with self._watched():
                answer = getattr(self._worker, what)(**frame)
            self._answer(call_id, *answer)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """While an import runs, exit as soon as standard input ends: an import may hang."""
        asked = select.poll()
        asked.register(self._requests, select.POLLIN)

        def look(*_: object) -> None:
            if any(event & select.POLLHUP for _, event in asked.poll(0)):
                os._exit(0)

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _invoke(self, call_id: int, frame: dict[str, Any]) -> None:
        output, output_end = os.pipe()
        try:
            channel, channel_end = answer_channel()
            try:
                pid = os.fork()
            except OSError:
                channel.close()
                channel_end.close()
                raise
        except OSError:
            os.close(output)
            os.close(output_end)
            raise
        if pid == 0:
            channel.close()
            os.close(output)
            self._child(frame, channel_end, output_end)
        channel_end.close()
        os.close(output_end)
        os.set_blocking(output, False)
        self._call = ChildCall(call_id, pid, channel, output)
        for descriptor in (channel.fileno(), output):
            self._open.add(descriptor)
            self._select.register(descriptor, selectors.EVENT_READ)

    def _child(self, frame: dict[str, Any], answers: socket.socket, output: int) -> None:
        """Run the call; never returns."""
        try:
            os.register_at_fork(after_in_child=answers.close)
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(name, signal.SIG_DFL)
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["HOME"] = HOME
            _dumpable(True)  # else its own files in /proc are not writable
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                score.write(_OOM_SCORE)
            # Model-written code that the function starts reaches neither the function's memory nor
            # the file that the answer is written to.
            _dumpable(False)
            os.makedirs(WORK, exist_ok=True)
            os.chdir(WORK)
            answer = self._worker.invoke(**frame)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed or replaced: they are the function's
                    stream.flush()
            answers.sendall(self._worker.frame(json.dumps(answer).encode()))
        finally:
            os._exit(0)

    def _read(self, descriptor: int) -> bool:
        """Read what is available from `descriptor`; False if that was nothing."""
        call = self._call
        if call is None or descriptor not in self._open:
            return False
        answers = descriptor == call.answer_fd
        try:
            part = call.read_answer() if answers else os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not part:
            self._close(descriptor)
        elif not answers:
            call.output += part
            del call.output[:-_OUTPUT_BYTES]
        elif (body := self._worker.take_frame(call.answer)) is not None:
            self._end(call, body)
        elif len(call.answer) > _ANSWER_BYTES:
            self._end(call, b"")
        elif call.foreign > _ANSWER_BYTES:
            self._fail(call, FOREIGN)
        return bool(part)

    def _reap(self) -> None:
        """Report a call whose process died without an answer, and wait for ended children."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if self._call is None or ended.si_pid != self._call.pid:
                    os.waitpid(ended.si_pid, 0)
                    continue
                # Before it is waited for: no other process has its id yet, and can answer for it.
                killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._died(self._call, -ended.si_status if killed else ended.si_status)

    def _died(self, call: ChildCall, status: int) -> None:
        while self._call is call and self._read(call.answer_fd):  # what it wrote before it died
            pass
        if self._call is not call:
            return
        how = f"exited with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-status).name}"
        self._fail(call, f"the call's process {how}")

    def _fail(self, call: ChildCall, why: str) -> None:
        self._end(call, json.dumps(self._worker.CallAnswer(DIED, why)).encode())

    def _end(self, call: ChildCall, body: bytes) -> None:
        """Kill all that is left of a call, then send its answer."""
        _end_all()
        while self._read(call.output_fd):
            pass
        for descriptor in list(self._open):
            self._close(descriptor)
        self._call = None
        text = bytes(call.output).decode(errors="replace")
        try:
            answer = self._worker.CallAnswer.of_frame(json.loads(body))
        except (ValueError, RecursionError):
            answer = self._worker.CallAnswer(DIED, "the call wrote what is no answer")
        self._answer(call.call_id, *answer, output=text)

    def _answer(self, call_id: int, *fields: str, output: str = "") -> None:
        answer = self._worker.CallAnswer(*fields)
        body = json.dumps({"id": call_id, "answer": answer, "output": output}).encode()
        view = memoryview(self._worker.frame(body))
        while view:
            view = view[os.write(self._answers, view) :]

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            self._select.unregister(descriptor)
            if self._call is not None and descriptor == self._call.answer_fd:
                self._call.channel.close()
            else:
                os.close(descriptor)


def _end_all() -> None:
    """Kill and wait for every process of the sandbox but this one, whatever session it is in. If
    one does not end, exit: with its first process all others of a sandbox end."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            os._exit(_STUCK)
        time.sleep(0.001)


def _dumpable(may: bool) -> None:
    """Set whether processes of this user may look into this one (memory, open files)."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(may), 0, 0, 0)


def load(name: str, source: str, path: str) -> types.ModuleType:
    """Make a module from its source text."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


class TextImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports modules from source texts: their files lie where calls could change them."""

    def __init__(self, folder: str) -> None:
        """Read the texts of all modules below `folder`, which need not exist."""
        self._root, self._texts = os.path.abspath(folder), {}
        for path, _, names in os.walk(self._root):
            for file in (os.path.join(path, name) for name in names if name.endswith(".py")):
                with open(file, encoding="utf-8") as text:
                    self._texts[os.path.relpath(file, self._root)] = text.read()

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is among the texts."""
        place = fullname.replace(".", "/")
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if file in self._texts:
                package = file.endswith("/__init__.py")
                origin = os.path.join(self._root, file)
                spec = importlib.util.spec_from_loader(
                    fullname, self, origin=origin, is_package=package
                )
                if spec is not None:
                    spec.loader_state, spec.has_location = file, True
                return spec
        if any(file.startswith(f"{place}/") for file in self._texts):  # without __init__.py
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [os.path.join(self._root, place)]
            return spec
        return None

    def get_source(self, fullname: str) -> str:
        """Return the module's text."""
        spec = self.find_spec(fullname)
        if spec is None or spec.loader is None:
            raise ImportError(fullname)
        return self._texts[spec.loader_state]


def main(worker_path: str, options: list[str]) -> None:
    """Serve with the worker's code, which imports and calls functions.

    Raises RuntimeError where this is not the first process of a sandbox: it kills all others.
    """
    if os.getpid() != 1:
        raise RuntimeError("the supervisor must be the first process of its sandbox")
    os.environ["HOME"] = "/nonexistent"
    with open(worker_path, encoding="utf-8") as text:
        worker = load("troupe_worker", text.read(), worker_path)
    globals()["json"] = vars(worker)["json"] = worker.private_copy("json")
    limits = [option for option in options if not option.startswith("--texts=")]
    worker.confine(limits)
    for option in options:
        if option not in limits:
            # Nothing may be imported from where this file lies, either.
            own = os.path.dirname(os.path.abspath(__file__))
            sys.path[:] = [path for path in sys.path if os.path.abspath(path) != own]
            sys.meta_path.insert(0, TextImporter(option.removeprefix("--texts=")))
    SandboxSupervisor(worker).serve()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
