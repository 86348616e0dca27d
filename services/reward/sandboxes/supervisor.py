"""What runs as the first process of a sandbox: each call in a child, everything else left alone.

Standard library only, and run as a file, or from text where a container cannot see this one. It
reads frames (four bytes of length, JSON) from standard input:

    {"id": 1, "call": "ready"}
    {"id": 2, "call": "prepare", "entrypoint": "package.module:function"}
    {"id": 3, "call": "invoke", "entrypoint": .., "arguments_json": .., "memory_mib": ..}
    {"id": 3, "call": "kill"}

and answers each but the last with {"id": .., "answer": [kind, text, traceback], "output": ".."},
as they end: calls may overlap. It ends, and all with it, when standard input does.
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
import selectors
import signal
import struct
import sys
import time
import types
from typing import Any, Final

WORK: Final = "/tmp/work"

_HEADER: Final = struct.Struct(">I")
_READ_BYTES: Final = 1 << 16
_OUTPUT_BYTES: Final = 16 << 10
# An answer is a result of at most 16 MiB, or a short account.
_ANSWER_BYTES: Final = 20 << 20
# Outputs of calls that have ended, which their background processes still write to.
_BACKGROUNDS: Final = 32
# How long the processes of answered calls may take to end, when there is no room for another.
_LEAVING_SECONDS: Final = 1.0
_PR_SET_DUMPABLE: Final = 4
# Of calls, before the supervisor, where memory runs out.
_OOM_SCORE: Final = "500"

DIED: Final = "died"
NO_ROOM: Final = "no_room"


class Call:
    """One child: its answer and its output as far as they have come."""

    def __init__(self, call_id: int, pid: int, answer: int, output: int) -> None:
        self.call_id, self.pid = call_id, pid
        self.answer_fd, self.output_fd = answer, output
        self.answer, self.output = bytearray(), bytearray()
        self.done = False

    def complete(self) -> bytes | None:
        """The answer's JSON, when all of it is there."""
        if len(self.answer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack(self.answer[: _HEADER.size])
        end = _HEADER.size + size
        return bytes(self.answer[_HEADER.size : end]) if len(self.answer) >= end else None


class Supervisor:
    """Frames in, children, frames out; one thread."""

    def __init__(self, worker: types.ModuleType) -> None:
        self._worker = worker
        self._select = selectors.DefaultSelector()
        self._questions, self._answers = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        # What an imported module reads or prints gets between no frames.
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        self._buffer = bytearray()
        # Calls that have not been answered, by id; and all whose output is still open, by file.
        self._calls: dict[int, Call] = {}
        self._open: dict[int, Call] = {}
        # Processes of calls that were answered and have not ended.
        self._leaving: set[int] = set()
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._awake, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _dumpable(False)

    def serve(self) -> None:
        """Until standard input ends."""
        os.makedirs(WORK, exist_ok=True)
        self._select.register(self._questions, selectors.EVENT_READ)
        self._select.register(self._awake, selectors.EVENT_READ)
        while True:
            for key, _ in self._select.select():
                if key.fd == self._questions:
                    if not self._hear():
                        return
                elif key.fd == self._awake:
                    with contextlib.suppress(BlockingIOError):
                        while os.read(self._awake, _READ_BYTES):
                            pass
                else:
                    self._read(key.fd)
            self._reap()

    def _hear(self) -> bool:
        part = os.read(self._questions, _READ_BYTES)
        self._buffer += part
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack(self._buffer[: _HEADER.size])
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            frame = json.loads(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            self._obey(frame)
        return bool(part)

    def _obey(self, frame: dict[str, Any]) -> None:
        call_id, what = frame.pop("id"), frame.pop("call")
        if what == "kill":
            if call_id in self._calls:
                _kill_group(self._calls[call_id].pid)
        elif what == "invoke":
            try:
                self._invoke(call_id, frame)
            except OSError as error:  # processes or files have run out
                self._say(call_id, [NO_ROOM, f"no process could be started: {error}", ""])
        else:
            self._say(call_id, list(getattr(self._worker, what)(**frame)))

    def _invoke(self, call_id: int, frame: dict[str, Any]) -> None:
        answer, answer_end = os.pipe()
        output, output_end = os.pipe()
        try:
            pid = self._fork()
        except OSError:
            for descriptor in (answer, answer_end, output, output_end):
                os.close(descriptor)
            raise
        if pid == 0:
            self._child(frame, answer_end, output_end)
        os.close(answer_end)
        os.close(output_end)
        call = self._calls[call_id] = Call(call_id, pid, answer, output)
        for descriptor in (answer, output):
            os.set_blocking(descriptor, False)
            self._open[descriptor] = call
            self._select.register(descriptor, selectors.EVENT_READ)

    def _fork(self) -> int:
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            try:
                return os.fork()
            except OSError:
                # A call that was answered a moment ago may still be there, and count.
                if not self._leaving or time.monotonic() > deadline:
                    raise
            time.sleep(0.002)
            self._reap()

    def _child(self, frame: dict[str, Any], answers: int, output: int) -> None:
        """Run the call; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(name, signal.SIG_DFL)
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Nothing of the supervisor's, nor of other calls.
            mine = (self._questions, self._answers, self._awake, self._waker)
            for descriptor in (*mine, *self._open):
                os.close(descriptor)
            self._select.close()
            _dumpable(True)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                score.write(_OOM_SCORE)
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

    def _read(self, descriptor: int) -> None:
        call = self._open.get(descriptor)
        if call is None:
            return
        try:
            part = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not part:
            self._close(call, descriptor)
        elif descriptor == call.output_fd:
            call.output += part
            del call.output[:-_OUTPUT_BYTES]
        else:
            call.answer += part
            if len(call.answer) > _ANSWER_BYTES:
                _kill_group(call.pid)
                self._close(call, descriptor)
            elif (body := call.complete()) is not None:
                self._end(call, body)

    def _reap(self) -> None:
        """Answer for calls that died, and bury whoever has nobody else."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._leaving.discard(pid)
            for call in list(self._calls.values()):
                if call.pid == pid:
                    self._died(call, os.waitstatus_to_exitcode(status))

    def _died(self, call: Call, status: int) -> None:
        while self._open.get(call.answer_fd) is call:  # what it wrote before
            before = len(call.answer)
            self._read(call.answer_fd)
            if len(call.answer) == before:
                break
        if call.done:
            return
        how = f"exited with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-status).name}"
        body = json.dumps([DIED, f"the call's process {how}", ""]).encode()
        self._end(call, body, alive=False)

    def _end(self, call: Call, body: bytes, *, alive: bool = True) -> None:
        call.done = True
        for _ in range(2):  # all that it printed itself, though others may print for ever
            if self._open.get(call.output_fd) is call:
                self._read(call.output_fd)
        self._close(call, call.answer_fd)
        del self._calls[call.call_id]
        if alive:
            self._leaving.add(call.pid)
        text, answer = bytes(call.output).decode(errors="replace"), None
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(body)
        if not (isinstance(answer, list) and [type(field) for field in answer] == [str] * 3):
            answer = [DIED, "the call wrote what is no answer", ""]
        self._say(call.call_id, answer, text)
        over = [one for one in self._open.values() if one.done]
        for old in over[: max(0, len(over) - _BACKGROUNDS)]:
            self._close(old, old.output_fd)

    def _say(self, call_id: int, answer: list[Any], output: str = "") -> None:
        body = json.dumps({"id": call_id, "answer": answer, "output": output}).encode()
        view = memoryview(_HEADER.pack(len(body)) + body)
        while view:
            view = view[os.write(self._answers, view) :]

    def _close(self, call: Call, descriptor: int) -> None:
        if self._open.get(descriptor) is call:  # its number may be another's by now
            del self._open[descriptor]
            self._select.unregister(descriptor)
            os.close(descriptor)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # before it had made its group


def _dumpable(may: bool) -> None:
    """Whether others of this user may look into this process: its memory, its files."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(may), 0, 0, 0)


def confine(limits: list[str]) -> None:
    """Set `--{resource}={limit}` for good: nothing that runs here can raise one again."""
    for limit in limits:
        name, _, value = limit.removeprefix("--").partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (int(value), int(value)))


def load(name: str, source: str, path: str) -> types.ModuleType:
    """A module from its text."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


class Fed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports modules from texts: their files are where calls could change them."""

    def __init__(self, root: str, texts: dict[str, str]) -> None:
        """`texts` by path relative to `root`, with "/"."""
        self._root, self._texts = root, texts

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's file, if there is one."""
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


def main(worker_source: str, worker_path: str, limits: list[str], fed: Fed | None = None) -> None:
    """Serve with the worker's code, which knows how a function is called."""
    if fed is not None:
        sys.meta_path.insert(0, fed)
    confine(limits)
    Supervisor(load("troupe_worker", worker_source, worker_path)).serve()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as text:
        main(text.read(), sys.argv[1], sys.argv[2:])
