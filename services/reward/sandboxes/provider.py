"""The interface of providers of sandboxes: launch one, start a program in it, stop it.

A provider runs sandboxes of one kind: on this host (`local.py`), in containers (`container.py`), or
with a service elsewhere; `kinds.py` lists them. The rest of the reward service knows a sandbox only
by this interface: it shares no files, process ids or descriptors with one, and reads a program's
answers from the stream that the provider hands out.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from services.reward.cgroups import ControlGroups, CoreLease, CoreManager
from services.reward.sandboxes.profile import SandboxProfile
from troupe.functions.validation import Refuse
from troupe.v1 import reward_pb2 as reward_pb

# Folders of a detached sandbox, below the directory that its programs start in.
_PROGRAMS: Final = "troupe"
_SOURCE: Final = "source"


class SandboxProcess(ABC):
    """A program that runs in a sandbox, and its streams. What it writes is hostile input."""

    # Called with each part that the program prints, as it comes.
    printed: Callable[[bytes], None] | None = None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the program is not known to have ended."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send `data` to the program's standard input, in order; never waits. If the program has
        ended, or does not read, that shows when an answer is awaited."""

    @abstractmethod
    async def readexactly(self, size: int) -> bytes:
        """Return the next `size` bytes of the program's standard output.

        Bytes of other processes that hold the descriptor are left out, or no other process has it.
        Raises EOFError and OSError when the program ends before, ValueError if other processes
        write too much.
        """

    @abstractmethod
    def output(self) -> str:
        """Return the end of the program's output (its standard error) since the call
        before."""

    @abstractmethod
    async def ended(self) -> str:
        """Wait until the program has ended, and return how, in words."""

    @abstractmethod
    def kill(self) -> None:
        """Begin to kill the program and all that it started; never waits."""


class Sandbox(ABC):
    """A sandbox of any kind, in which one program of ours runs and starts others.

    Only `start` and `stop` are needed. A sandbox whose processes cannot be given cores or frozen
    does nothing there. All methods may raise OSError and TimeoutError.
    """

    @abstractmethod
    async def start(self, program: Sequence[str], *, first: bool = False) -> SandboxProcess:
        """Start one of our Python programs: a file of this host, with the files that are its
        arguments. It gets the profile's limits as further arguments.

        `first`: as the first process of the sandbox, with which all others end.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End all that runs in it, frozen or not, and release what it holds. Repeatable."""

    async def confine(self) -> None:  # noqa: B027 - optional
        """Limit what the sandbox takes as a whole: its program has answered once, and no other code
        has run yet."""

    async def grant(self, lease: CoreLease) -> None:  # noqa: B027 - optional
        """Let the next call use these cores. Running calls keep theirs."""

    async def withdraw(self, lease: CoreLease) -> None:  # noqa: B027 - optional
        """Take the cores of a call that has ended."""

    def memory_kills(self) -> int:
        """Return the number of processes that were ended because the sandbox's memory was used up;
        0: unknown."""
        return 0

    async def freeze(self) -> None:  # noqa: B027 - optional
        """Stop all its processes until `thaw`."""

    async def thaw(self) -> None:  # noqa: B027 - optional
        """Let its processes continue."""


class DetachedSandbox(Sandbox):
    """A sandbox that sees no files of this host: our programs and uploaded source are sent to
    it."""

    def __init__(self, profile: SandboxProfile) -> None:
        self.profile = profile

    @abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Write a file; `path` is relative to the directory that programs start in."""

    @abstractmethod
    async def exec(self, command: Sequence[str]) -> SandboxProcess:
        """Run a command as the first process of a process namespace: the supervisor kills all
        other processes that it sees."""

    async def start(self, program: Sequence[str], *, first: bool = False) -> SandboxProcess:
        sent, files = await asyncio.to_thread(self._files, program)
        for path, content in files.items():
            await self.upload(path, content)
        limits = self.profile.limits()
        del limits["nproc"]  # it would count processes of other sandboxes, too
        words = [f"--{name}={value}" for name, value in limits.items()]
        return await self.exec(["python3", *sent, *words, f"--texts={_SOURCE}"])

    def _files(self, program: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
        """Return the paths of the program's files in the sandbox, and the contents of all files to
        send, with uploaded source, by path."""
        sent = {f"{_PROGRAMS}/{os.path.basename(file)}": Path(file) for file in program}
        files = {path: file.read_bytes() for path, file in sent.items()}
        if self.profile.source:
            source = Path(self.profile.source)
            for file in source.rglob("*"):
                if file.is_file():
                    files[f"{_SOURCE}/{file.relative_to(source).as_posix()}"] = file.read_bytes()
        return list(sent), files


class SandboxProvider(ABC):
    """A provider of sandboxes of one kind (`FunctionSpec.sandbox`), or of several."""

    def __init__(
        self, groups: ControlGroups | None = None, cores: CoreManager | None = None
    ) -> None:
        """`groups` and `cores` limit processes of this host, where it can; a provider that runs
        sandboxes elsewhere ignores them."""
        self.groups, self.cores = groups, cores

    @abstractmethod
    async def launch(self, name: str, profile: SandboxProfile) -> Sandbox:
        """Return a new sandbox; when cancelled, leave none behind. `name` is unique on this host
        among the sandboxes that run.

        Raises FailedPrecondition ("no_sandbox") if the kind is not available here, OSError and
        TimeoutError if it does not start.
        """

    @classmethod
    @abstractmethod
    def check(cls, spec: reward_pb.FunctionSpec, refuse: Refuse) -> None:
        """Refuse a function whose sandbox cannot be launched here.

        Raises FailedPrecondition ("no_sandbox"), or calls `refuse(field, value, message, remedy)`,
        which raises.
        """

    @classmethod
    @abstractmethod
    def layers(cls, profile: SandboxProfile, groups: ControlGroups | None) -> list[str]:
        """Return the names of the mechanisms that confine calls of `profile`; none: it is not
        available here."""
