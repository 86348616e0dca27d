"""Child processes with an environment of the `verifiers` library, and their pool.

The interpreter that the job names runs their program, verifiers_host.py. Threads pass requests and
answers, so tasks can be read from any thread and episodes awaited in any event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, BinaryIO, Final

from troupe.contracts import kinds
from troupe.functions import shipped
from troupe.job.sections.data import VerifiersSpec
from troupe.processes.ending import exit_text, kill_tree
from troupe.user_code import call_in_thread
from troupe.workflow.environments.host import COUNTERS
from troupe.workflow.environments.process import THREADS
from troupe.workflow.errors import EntrypointError, EnvironmentFault, FaultReason, TurnError

_HOST: Final = Path(__file__).with_name("verifiers_host.py")
# Limit of one answer: the data of a task, or the result of an episode.
_MOST_BYTES: Final = 64 << 20
_TAIL_BYTES: Final = 4096
# If a cancelled episode continues for longer, its process hangs.
_CANCEL_SECONDS: Final = 10.0
# Loading an environment again may cost minutes, but an idle process costs memory.
_IDLE_SECONDS: Final = 300.0
# Episodes of one process before another process is started.
_EPISODES: Final = 64
# Variables of another Python environment, or without relevance for this one.
_NOT_PASSED: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")


class VerifiersProcess:
    """A child process with one environment, which answers many requests concurrently."""

    def __init__(self, spec: VerifiersSpec, field: str) -> None:
        """Create the handle. `field`: the job's field, for errors."""
        self._spec, self._field = spec, field
        self.name = f"verifiers:{spec.environment}"
        self.roles: Sequence[str] = ()
        self.fixed_roles: Sequence[str] = ()
        """Roles that a model of their own plays, according to `args`."""
        self.version = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._tail = b""
        self._draining: threading.Thread | None = None
        self._idle: threading.Timer | None = None
        self.alive = False
        self.playing = 0
        """Number of running episodes."""

    def start(self) -> None:
        """Start the process and load the environment. Blocking. Raises `EntrypointError` for faults
        in the job, else `EnvironmentFault`."""
        python = self._spec.python or sys.executable
        try:
            process = subprocess.Popen(
                # -P keeps the program's folder, which has a `verifiers.py`, off the path.
                [python, "-P", str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment_of(python, own=self._spec.python is None),
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise EntrypointError(
                f"the interpreter cannot be run here: {error}",
                kind=kinds.ENVIRONMENT_NOT_INSTALLED,
                field=f"{self._field}.python",
                value=python,
                remedy="Create the Python environment at this path on every host with rollout "
                "workers.",
            ) from error
        except OSError as error:
            raise self._fault("not_started", f"did not start: {error}") from error
        self._process, self.alive = process, True
        COUNTERS.count("starts", self.name)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._draining = _in_thread(self._drain, process.stderr)
        _in_thread(self._write, process.stdin)
        _in_thread(self._read, process.stdout)
        request = {"environment": self._spec.environment, "args": self._spec.args}
        opened = self.call("open", request, self._spec.start_seconds)
        self.version = opened["version"]
        self.roles, self.fixed_roles = opened["roles"], opened["fixed_roles"]
        self._rest()

    def call(self, op: str, request: Mapping[str, Any], seconds: float) -> Any:
        """Return the answer to a request. Blocking; the process is killed after `seconds`. Raises
        the errors of `start`."""
        _, answer = self._send(op, request)
        try:
            return answer.result(seconds)
        except FutureTimeout:
            self.kill()
            COUNTERS.count("kills", self.name)
            raise self._fault(
                "deadline",
                f"did not end its {op} within {seconds:g} s and was killed",
                f"Allow more `{self._field}.start_seconds`, or fix the cause of the delay.",
            ) from None

    async def play(
        self, task: Mapping[str, Any], endpoints: Mapping[str, Mapping[str, str]]
    ) -> list[dict[str, Any]]:
        """Return the traces of an episode; `endpoints`: address by role. Raises `TurnError` if a
        model call failed, else the errors of `start`. If this call is interrupted, its episode is
        cancelled."""
        if self._idle is not None:
            self._idle.cancel()
        self.playing += 1
        number, answer = self._send("play", {"task": task, "endpoints": endpoints})
        try:
            async with asyncio.timeout(self._spec.episode_seconds):
                traces: list[dict[str, Any]] = (await asyncio.wrap_future(answer))["traces"]
                return traces
        except TimeoutError:
            COUNTERS.count("kills", self.name)
            raise self._fault(
                "deadline",
                f"did not end an episode within {self._spec.episode_seconds:g} s",
                f"Allow more `{self._field}.episode_seconds`, or fix the cause of the delay.",
            ) from None
        finally:
            if not answer.done():
                self._cancel(number, answer)
            self.playing -= 1
            self._rest()

    def kill(self) -> None:
        """Kill the process and its descendants; pending requests fail. Repeatable."""
        process = self._process
        if process is not None and process.poll() is None:
            kill_tree(process.pid)
        self._requests.put(None)

    def _cancel(self, number: int, answer: Future[Any]) -> None:
        """End an episode, or the whole process if the episode does not end."""
        self._send("cancel", {"of": number})

        def hangs() -> None:
            if not answer.done():
                self.kill()

        _timer(_CANCEL_SECONDS, hangs).start()

    def _rest(self) -> None:
        """End the process after a long idle time."""
        if self.playing or not self.alive:
            return

        def still() -> None:
            if not self.playing:
                self.kill()

        if self._idle is not None:
            self._idle.cancel()
        self._idle = _timer(_IDLE_SECONDS, still)
        self._idle.start()

    def _send(self, op: str, request: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        number = next(self._numbers)
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # only its awaiter can be cancelled
        line = json.dumps({"id": number, "op": op, **request}).encode() + b"\n"
        with self._lock:
            if self.alive:
                self._pending[number] = answer
                self._requests.put(line)
                return number, answer
        answer.set_exception(self._died())
        return number, answer

    def _write(self, pipe: BinaryIO) -> None:
        with contextlib.suppress(OSError), pipe:
            while (line := self._requests.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self, pipe: BinaryIO) -> None:
        with pipe:
            while (line := pipe.readline(_MOST_BYTES)).endswith(b"\n"):
                try:
                    answer = json.loads(line)
                    pending = self._pending.pop(answer["id"])
                except (ValueError, LookupError, TypeError):
                    break  # another program wrote to the pipe
                if error := answer.get("error"):
                    pending.set_exception(self._error(error))
                else:
                    pending.set_result(answer["ok"])
        self.kill()
        assert self._process is not None
        self._process.wait()
        if self._draining is not None:
            self._draining.join(1.0)  # to get the end of stderr
        with self._lock:
            self.alive = False
            left, self._pending = self._pending, {}
        for answer in left.values():
            answer.set_exception(self._died())

    def _drain(self, pipe: BinaryIO) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def _died(self) -> EnvironmentFault:
        status = None if self._process is None else self._process.returncode
        how = "ended" if status is None else exit_text(status)
        last = self._tail.decode(errors="replace").strip().splitlines()[-1:]
        return self._fault("died", how + "".join(f"; {line}" for line in last))

    def _fault(
        self, reason: FaultReason, message: str, remedy: str | None = None, trace: str = ""
    ) -> EnvironmentFault:
        return EnvironmentFault(
            f"environment {self.name} {message}",
            reason=reason,
            environment=self.name,
            remedy=remedy,
            traceback=trace or (self._tail.decode(errors="replace") if reason == "died" else ""),
        )

    def _error(self, given: Mapping[str, Any]) -> Exception:
        """Convert the error of an answer."""
        kind, message = given["kind"], given["message"]
        if kind.startswith("environment_"):
            return EntrypointError(
                message,
                kind=kind,
                field=f"{self._field}.{given['field']}",
                value=self._spec.environment,
                remedy=given["remedy"],
            )
        if kind == "model":
            return TurnError(f"environment {self.name} got no reply: {message}")
        reason: FaultReason = "deadline" if kind == kinds.DEADLINE else "raised"
        return self._fault(reason, f"failed: {message}", trace=given.get("traceback", ""))


class VerifiersPool:
    """The processes of one environment on this worker; at most `spec.processes`."""

    def __init__(self, spec: VerifiersSpec, field: str) -> None:
        self._spec, self._field = spec, field
        self._processes: list[VerifiersProcess] = []
        self._starting = threading.Lock()

    def opened(self, episodes: int = sys.maxsize) -> VerifiersProcess:
        """Return the process with the fewest episodes if it has fewer than `episodes` or if no
        other may be started; else a new one. Blocking. Raises the errors of
        `VerifiersProcess.start`."""
        with self._starting:
            if (found := self._free(episodes)) is not None:
                return found
            started = VerifiersProcess(self._spec, self._field)
            try:
                started.start()
            except BaseException:
                started.kill()
                raise
            self._processes.append(started)
            return started

    async def for_episode(self) -> VerifiersProcess:
        """Return the process that plays the next episode. Raises the errors of `opened`."""
        if (found := self._free(_EPISODES)) is not None:
            return found
        return await call_in_thread(self.opened, _EPISODES)

    def close(self) -> None:
        """Kill the processes. Repeatable."""
        for process in self._processes:
            process.kill()

    def _free(self, episodes: int) -> VerifiersProcess | None:
        self._processes = [one for one in self._processes if one.alive]
        least = min(self._processes, key=lambda one: one.playing, default=None)
        full = len(self._processes) >= self._spec.processes
        return least if least is not None and (full or least.playing < episodes) else None


_pools: dict[str, VerifiersPool] = {}


def pool_of(spec: VerifiersSpec, field: str = "tasks.verifiers") -> VerifiersPool:
    """Return the pool of an environment, for the code that the current job ships."""
    code = shipped.current()
    same = spec.model_dump(exclude={"held_out_args", "roles", "weights"})
    key = json.dumps([same, code.package if code else ""], sort_keys=True)
    return _pools.setdefault(key, VerifiersPool(spec, field))


def close_pools() -> None:
    """Kill the processes of all environments. Repeatable."""
    for pool in _pools.values():
        pool.close()


def _environment_of(python: str, *, own: bool) -> dict[str, str]:
    """Return the environment variables of a child process. `own`: it runs this process's
    interpreter, and so finds the same modules."""
    code = shipped.current()
    passed = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_PASSED and not name.startswith("TROUPE_")
    }
    path = [str(code.folder)] if code else []
    path += [one or os.getcwd() for one in sys.path] if own else [os.getcwd()]
    # Programs that an environment starts, such as `uv`, come from its interpreter's directory.
    programs = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    return {**passed, **THREADS, "PYTHONPATH": os.pathsep.join(path), "PATH": programs}


def _in_thread(call: Any, pipe: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=(pipe,), daemon=True, name="verifiers")
    thread.start()
    return thread


def _timer(seconds: float, call: Any) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    return timer
