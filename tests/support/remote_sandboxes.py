"""A provider of sandboxes elsewhere: with the service of `sandbox_agent.py`, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.reward.cgroups import ControlGroups
from services.reward.sandboxes.profile import SandboxProfile
from services.reward.sandboxes.provider import DetachedSandbox, SandboxProcess, SandboxProvider
from tests.support import sandbox_agent
from tests.support.waiting import PATIENCE
from troupe.functions.validation import Refuse
from troupe.processes.frames import frame, read_frame
from troupe.rpc import FailedPrecondition
from troupe.v1 import reward_pb2 as reward_pb

KIND = "remote"
_MOST_BYTES = 1 << 20


@contextlib.contextmanager
def sandbox_service(folder: Path) -> Iterator[int]:
    """Start the service in a process without anything of this one's but pipes; yield its port."""
    process = subprocess.Popen(
        [sys.executable, "-I", sandbox_agent.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder)},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(PATIENCE)


class RemoteProcess(SandboxProcess):
    """A command of the service, by the frames of its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._answers = asyncio.StreamReader()
        self._printed = bytearray()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        how = "lost its connection"
        try:
            while not self._ended.done():
                body = await read_frame(reader, _MOST_BYTES)
                if body[:1] == b"o":
                    self._answers.feed_data(body[1:])
                elif body[:1] == b"e":
                    self._printed += body[1:]
                    if self.printed is not None:
                        self.printed(body[1:])
                else:
                    how = body[1:].decode()
                    break
        except (OSError, EOFError):
            pass
        self._ended.set_result(how)
        self._answers.feed_eof()

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    def write(self, data: bytes) -> None:
        self._writer.write(frame(b"i" + data))

    async def readexactly(self, size: int) -> bytes:
        return await self._answers.readexactly(size)

    def output(self) -> str:
        text = self._printed.decode(errors="replace")
        self._printed.clear()
        return text

    async def ended(self) -> str:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        self._writer.write(frame(b"k"))


class SocketSandbox(DetachedSandbox):
    """A sandbox of the service: one connection."""

    def __init__(
        self,
        profile: SandboxProfile,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        super().__init__(profile)
        self._reader, self._writer = reader, writer

    async def upload(self, path: str, content: bytes) -> None:
        self._writer.write(frame(b"u" + path.encode() + b"\0" + content))
        await self._writer.drain()

    async def exec(self, command: Sequence[str]) -> SandboxProcess:
        self._writer.write(frame(b"x" + "\0".join(command).encode()))
        return RemoteProcess(self._reader, self._writer)

    async def stop(self) -> None:
        self._writer.close()


class SocketProvider(SandboxProvider):
    """The provider of the kind "remote". `port`: the service's."""

    port = 0

    async def launch(self, name: str, profile: SandboxProfile) -> SocketSandbox:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        return SocketSandbox(profile, reader, writer)

    @classmethod
    def check(cls, spec: reward_pb.FunctionSpec, refuse: Refuse) -> None:
        if not cls.port:
            raise FailedPrecondition("no service of sandboxes is known", kind="no_sandbox")

    @classmethod
    def layers(cls, profile: SandboxProfile, groups: ControlGroups | None) -> list[str]:
        return [KIND] if cls.port else []
