"""Sandboxes that are processes of this host: plain ones, and those in bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.reward.cgroups import ControlGroups, CoreLease, CoreManager, family
from services.reward.sandboxes import landlock
from services.reward.sandboxes.profile import (
    BUBBLEWRAP,
    PROCESS,
    SandboxProfile,
    find_bubblewrap,
    unprivileged_user,
)
from services.reward.sandboxes.provider import Sandbox, SandboxProcess, SandboxProvider
from services.reward.sandboxes.seccomp import filter_path
from services.reward.sandboxes.supervisor import FOREIGN, answer_channel, received
from troupe.functions.validation import Refuse
from troupe.processes.ending import close_output, exit_text, kill_tree, signal_group
from troupe.rpc import FailedPrecondition
from troupe.v1 import reward_pb2 as reward_pb

# So much may other processes write to the channel of a program's answers between two of them.
_FOREIGN_BYTES: Final = 20 * 2**20
# Bytes kept of the end of programs' output.
_OUTPUT_BYTES: Final = 16 * 2**10
# Output is read in such parts, at most so many before the event loop runs others: together more
# than a pipe holds, so that all that was printed before an answer is read with it.
_PART_BYTES: Final = 32 * 2**10
_PARTS: Final = 4
_END_SECONDS: Final = 5.0


class LocalProcess(SandboxProcess):
    """A child process of this one, alone in its process group."""

    def __init__(
        self, process: asyncio.subprocess.Process, answers: AnswerReader, printing: int
    ) -> None:
        """`printing`: the reading end, non-blocking, of the pipe that the process prints to."""
        self._process = process
        self._answers = answers
        self._printing: int | None = printing
        self._printed: deque[bytes] = deque()
        self._printed_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(printing, self._pull)

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str] | None, *, attested: bool = True
    ) -> LocalProcess:
        """Start `command` with `environment` (None: this process's). `attested`: only the first
        process that writes an answer may write answers. Raises OSError."""
        printing, output = os.pipe()
        answers, theirs = answer_channel()
        try:
            os.set_blocking(printing, False)
            process = await _start_process(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=theirs,
                stderr=output,
                env=None if environment is None else dict(environment),
            )
        except BaseException:
            os.close(printing)
            answers.close()
            raise
        finally:
            os.close(output)
            theirs.close()
        return cls(process, AnswerReader(answers, attested=attested), printing)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)

    async def readexactly(self, size: int) -> bytes:
        return await self._answers.readexactly(size)

    def output(self) -> str:
        self._pull()
        text = b"".join(self._printed).decode(errors="replace")
        self._printed.clear()
        self._printed_bytes = 0
        return text[-_OUTPUT_BYTES:]

    async def ended(self) -> str:
        status = await self._process.wait()
        # bubblewrap and container engines report their child's signal like a shell.
        by_signal = 128 < status <= 128 + max(signal.valid_signals())
        return exit_text(128 - status if by_signal else status)

    def kill(self) -> None:
        if self.alive:
            kill_tree(self._process.pid)
            return
        signal_group(self._process.pid, signal.SIGKILL)  # what it left in its group

    async def end(self) -> None:
        """Kill the process and wait until it has ended."""
        self.kill()
        close_output(self._process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        self._close_output()
        self._answers.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _pull(self) -> None:
        """Read what has been printed, without waiting."""
        for _ in range(_PARTS):
            if self._printing is None:
                return
            try:
                part = os.read(self._printing, _PART_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self._close_output()
                return
            self._printed.append(part)
            self._printed_bytes += len(part)
            while self._printed_bytes - len(self._printed[0]) >= _OUTPUT_BYTES:
                self._printed_bytes -= len(self._printed.popleft())
            if self.printed is not None:
                self.printed(part)

    def _close_output(self) -> None:
        if self._printing is not None:
            self._loop.remove_reader(self._printing)
            os.close(self._printing)
            self._printing = None


class AnswerReader:
    """A reader of a program's bytes on an answer channel, ignoring processes that it started.

    The program is the first process that writes into it: its answer to `ready` precedes all code of
    the user's. Reads on demand: bytes that no caller waits for stay in the kernel.
    """

    def __init__(self, channel: socket.socket, *, attested: bool = True) -> None:
        """`attested`: ignore bytes of other processes; the other end is else out of their reach."""
        self._channel = channel
        self._attested = attested
        self._received = bytearray()
        self._writer = 0
        # Bytes of other processes since the last answer.
        self._foreign = 0

    async def readexactly(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises EOFError, and ValueError if others write too
        much."""
        while len(self._received) < size:
            try:
                part, sender = received(self._channel)
            except BlockingIOError:
                await self._readable()
                continue
            if not part:
                raise EOFError
            self._writer = self._writer or sender
            if not self._attested or 0 < sender == self._writer:
                self._received += part
            else:
                self._foreign += len(part)
                if self._foreign > _FOREIGN_BYTES:
                    raise ValueError(FOREIGN)
            if len(self._received) < size:
                await asyncio.sleep(0)  # however fast it writes
        found = bytes(self._received[:size])
        del self._received[:size]
        self._foreign = 0
        return found

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    async def _readable(self) -> None:
        loop, channel = asyncio.get_running_loop(), self._channel.fileno()
        ready = asyncio.Event()
        loop.add_reader(channel, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(channel)


async def _start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a process in its own session, leaving none behind on cancellation. (asyncio would kill
    the process but not its group: bubblewrap's second process would wait for the first forever.)
    Raises OSError."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        kill_tree((await starting).pid)
        raise


class LocalSandbox(Sandbox):
    """Process of this host with its descendants, in bubblewrap if the profile says so.

    It is frozen where control groups can do that. Elsewhere nothing but the supervisor is left
    between calls, and it waits for the next one.
    """

    def __init__(self, provider: LocalProvider, name: str, profile: SandboxProfile) -> None:
        self._provider, self._name, self._profile = provider, name, profile
        self._groups, self._cores = provider.groups, provider.cores
        self._process: LocalProcess | None = None

    async def start(self, program: Sequence[str], *, first: bool = False) -> LocalProcess:
        command, environment = self._profile.launch(program, first=first)
        self._process = await LocalProcess.start(command, environment)
        return self._process

    async def confine(self) -> None:
        assert self._process is not None
        pids = await asyncio.to_thread(family, self._process.pid)
        self._provider.confined[self._name] = self
        if self._cores is not None:
            self._cores.adopt(self._name, pids)
        profile = self._profile
        if self._groups is not None and profile.level == BUBBLEWRAP:
            self._groups.confine(self._name, pids, profile.processes, profile.memory_mib)

    async def stop(self) -> None:
        with contextlib.suppress(OSError):
            await self.thaw()  # a frozen process is not killed by every kernel
        if self._process is not None:
            await self._process.end()
        if self._provider.confined.get(self._name) is self:  # not its successor
            del self._provider.confined[self._name]
            for manager in (self._cores, self._groups):
                if manager is not None:
                    manager.forget(self._name)

    async def grant(self, lease: CoreLease) -> None:
        if self._cores is not None:
            self._cores.grant(lease)

    async def withdraw(self, lease: CoreLease) -> None:
        if self._cores is not None:
            self._cores.withdraw(lease)

    def memory_kills(self) -> int:
        return self._groups.memory_kills(self._name) if self._groups is not None else 0

    async def freeze(self) -> None:
        if self._groups is not None and "freezer" in self._groups.controllers:
            await asyncio.to_thread(self._groups.freeze, self._name)

    async def thaw(self) -> None:
        if self._groups is None or "freezer" not in self._groups.controllers:
            return
        if self._groups.frozen(self._name):
            self._groups.thaw(self._name)


class LocalProvider(SandboxProvider):
    """Processes of this host: `process` and `bubblewrap`."""

    def __init__(
        self, groups: ControlGroups | None = None, cores: CoreManager | None = None
    ) -> None:
        super().__init__(groups, cores)
        # By name, the sandboxes whose processes are in control groups.
        self.confined: dict[str, LocalSandbox] = {}

    async def launch(self, name: str, profile: SandboxProfile) -> LocalSandbox:
        return LocalSandbox(self, name, profile)

    @classmethod
    def check(cls, spec: reward_pb.FunctionSpec, refuse: Refuse) -> None:
        if spec.sandbox == BUBBLEWRAP:
            find_bubblewrap()
            unprivileged_user()
        elif (spec.reads or spec.writes) and not landlock.version():
            raise FailedPrecondition(
                "the kernel where the reward service runs has no landlock",
                kind="no_sandbox",
                field=f"function.{'reads' if spec.reads else 'writes'}",
                remedy=f"Leave reads and writes out, or declare `sandbox: {BUBBLEWRAP}`.",
            )

    @classmethod
    def layers(cls, profile: SandboxProfile, groups: ControlGroups | None) -> list[str]:
        limited = ["rlimit:as"] if profile.memory_mib else []
        if profile.level == PROCESS:
            return [*limited, *(["landlock"] if profile.reads or profile.writes else [])]
        found = ["namespaces", "read-only root", "no_new_privs", "rlimits", *limited]
        if filter_path() is not None:
            found.append("seccomp")
        if groups is not None:
            found += [f"cgroup:{name}" for name in ("memory", "pids") if name in groups.controllers]
        return found
