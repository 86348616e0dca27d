"""The first process of a sandbox: runs one call at a time, each in a child process of its own.

Between two calls only this process and files are left: what a call had started is killed before its
answer is sent, so that nothing of an earlier call can look into a later one, change its answer or
race with it for a file. What a function starts can look neither into this process nor into that of
the function (memory, open files), although it is of the same user.

Standard library only, and run as a file, or from text where a container cannot see the file. It
reads frames (four bytes of length, JSON) from standard input:

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
import resource
import select
import selectors
import signal
import struct
import sys
import time
import types
from collections.abc import Iterator
from typing import Any, Final

WORK: Final = "/tmp/work"
# Home directory of calls; this process has none, so that it imports nothing that a call wrote.
HOME: Final = "/tmp"

_HEADER: Final = struct.Struct(">I")
_READ_BYTES: Final = 1 << 16
_OUTPUT_BYTES: Final = 16 << 10
# An answer is a result of at most 16 MiB, or an error.
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


class ChildCall:
    """The child process of a call, and what has been read of its answer and output."""

    def __init__(self, call_id: int, pid: int, answer: int, output: int) -> None:
        self.call_id, self.pid = call_id, pid
        self.answer_fd, self.output_fd = answer, output
        self.answer, self.output = bytearray(), bytearray()

    def complete(self) -> bytes | None:
        """The answer's JSON once all of it has been read, else None."""
        if len(self.answer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack(self.answer[: _HEADER.size])
        end = _HEADER.size + size
        return bytes(self.answer[_HEADER.size : end]) if len(self.answer) >= end else None


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
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack(self._buffer[: _HEADER.size])
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            frame = json.loads(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            self._handle(frame)
        return bool(part)

    def _handle(self, frame: dict[str, Any]) -> None:
        call_id, what = frame.pop("id"), frame.pop("call")
        if what == "kill":
            if self._call is not None and self._call.call_id == call_id:
                _end_all()
                self._died(self._call, -signal.SIGKILL)
        elif what == "invoke":
            if self._call is not None:
                self._answer(call_id, [NO_ROOM, "another call runs in the sandbox", ""])
                return
            try:
                self._invoke(call_id, frame)
            except OSError as error:  # processes or files have run out
                self._answer(call_id, [NO_ROOM, f"no process could be started: {error}", ""])
        else:
            with self._watched():
                answer = list(getattr(self._worker, what)(**frame))
            self._answer(call_id, answer)

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
        answer, answer_end = os.pipe()
        output, output_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            for descriptor in (answer, answer_end, output, output_end):
                os.close(descriptor)
            raise
        if pid == 0:
            os.close(answer)
            os.close(output)
            self._child(frame, answer_end, output_end)
        os.close(answer_end)
        os.close(output_end)
        self._call = ChildCall(call_id, pid, answer, output)
        for descriptor in (answer, output):
            os.set_blocking(descriptor, False)
            self._open.add(descriptor)
            self._select.register(descriptor, selectors.EVENT_READ)

    def _child(self, frame: dict[str, Any], answers: int, output: int) -> None:
        """Run the call; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(name, signal.SIG_DFL)
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Close the descriptors of the supervisor.
            for descriptor in (self._requests, self._answers, self._awake, self._waker):
                os.close(descriptor)
            self._select.close()
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
            body = json.dumps(answer).encode()
            with os.fdopen(answers, "wb") as file:
                file.write(_HEADER.pack(len(body)) + body)
        finally:
            os._exit(0)

    def _read(self, descriptor: int) -> bool:
        """Read what is available from `descriptor`; False if that was nothing."""
        call = self._call
        if call is None or descriptor not in self._open:
            return False
        try:
            part = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not part:
            self._close(descriptor)
        elif descriptor == call.output_fd:
            call.output += part
            del call.output[:-_OUTPUT_BYTES]
        else:
            call.answer += part
            if len(call.answer) > _ANSWER_BYTES:
                _end_all()
                self._close(descriptor)
            elif (body := call.complete()) is not None:
                self._end(call, body)
        return bool(part)

    def _reap(self) -> None:
        """Wait for ended children; report a call whose process died without an answer."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._call is not None and self._call.pid == pid:
                self._died(self._call, os.waitstatus_to_exitcode(status))

    def _died(self, call: ChildCall, status: int) -> None:
        while self._call is call and self._read(call.answer_fd):  # what it wrote before it died
            pass
        if self._call is not call:
            return
        how = f"exited with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-status).name}"
        self._end(call, json.dumps([DIED, f"the call's process {how}", ""]).encode())

    def _end(self, call: ChildCall, body: bytes) -> None:
        """Kill all that is left of a call, then send its answer."""
        _end_all()
        while self._read(call.output_fd):
            pass
        for descriptor in list(self._open):
            self._close(descriptor)
        self._call = None
        text, answer = bytes(call.output).decode(errors="replace"), None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(body)
        if not (isinstance(answer, list) and [type(field) for field in answer] == [str] * 3):
            answer = [DIED, "the call wrote what is no answer", ""]
        self._answer(call.call_id, answer, text)

    def _answer(self, call_id: int, answer: list[Any], output: str = "") -> None:
        body = json.dumps({"id": call_id, "answer": answer, "output": output}).encode()
        view = memoryview(_HEADER.pack(len(body)) + body)
        while view:
            view = view[os.write(self._answers, view) :]

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            self._select.unregister(descriptor)
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


def confine(limits: list[str]) -> None:
    """Set the limits `--{resource}={limit}`, which nothing that runs here can raise again."""
    for limit in limits:
        name, _, value = limit.removeprefix("--").partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (int(value), int(value)))


def load(name: str, source: str, path: str) -> types.ModuleType:
    """Make a module from its source text."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


class TextImporter(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports modules from source texts: their files lie where calls could change them."""

    def __init__(self, root: str, texts: dict[str, str]) -> None:
        """`texts` by path relative to `root`, with "/"."""
        self._root, self._texts = root, texts

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that is among the texts."""
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
        """The module's text."""
        spec = self.find_spec(fullname)
        if spec is None or spec.loader is None:
            raise ImportError(fullname)
        return self._texts[spec.loader_state]


def main(
    worker_source: str, worker_path: str, limits: list[str], fed: TextImporter | None = None
) -> None:
    """Serve with the worker's code, which imports and calls functions.

    Raises RuntimeError where this is not the first process of a sandbox: it kills all others.
    """
    if os.getpid() != 1:
        raise RuntimeError("the supervisor must be the first process of its sandbox")
    os.environ["HOME"] = "/nonexistent"
    if fed is not None:
        sys.meta_path.insert(0, fed)
    confine(limits)
    SandboxSupervisor(load("troupe_worker", worker_source, worker_path)).serve()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as text:
        main(text.read(), sys.argv[1], sys.argv[2:])
