"""Sandboxes in containers of the team's own images, run by docker or podman.

The engine may be on another machine without our files, so the code to run is sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.reward.cgroups import BASE_MIB, ControlGroups, CoreLease
from services.reward.sandboxes.local import LocalProcess
from services.reward.sandboxes.profile import HANDED_OUT, SandboxProfile, find_engine
from services.reward.sandboxes.provider import DetachedSandbox, SandboxProcess, SandboxProvider
from troupe.functions.validation import Refuse
from troupe.processes.frames import frame
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import reward_pb2 as reward_pb

_COMMAND_SECONDS: Final = 30.0
_USER: Final = "65534:65534"

# The first program of a container, in Python: it writes the files that come on standard input, then
# becomes the command that ends them. It reads no further: the command reads on from there.
BOOT: Final = """
import os, sys
def take(size):
    text = b""
    while len(text) < size:
        part = os.read(0, size - len(text))
        if not part:
            sys.exit(1)
        text += part
    return text
while True:
    path, _, content = take(int.from_bytes(take(4), "big")).partition(b"\\0")
    if not path:
        break
    os.makedirs(os.path.dirname(path) or b".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
command = content.split(b"\\0")
os.execvp(command[0], command)
"""


def file_frame(path: str, content: bytes) -> bytes:
    """Return the input of `BOOT` that writes a file."""
    return frame(path.encode() + b"\0" + content)


def command_frame(command: Sequence[str]) -> bytes:
    """Return the input of `BOOT` that has it become `command`."""
    return frame(b"\0" + "\0".join(command).encode())


class ContainerSandbox(DetachedSandbox):
    """One container. Its engine freezes it, and gives it cores."""

    def __init__(self, name: str, profile: SandboxProfile, process: LocalProcess) -> None:
        """`process`: the engine's client, which carries the first program's streams."""
        super().__init__(profile)
        self._name, self._process = name, process
        self._frozen = False

    async def upload(self, path: str, content: bytes) -> None:
        self._process.write(file_frame(path, content))

    async def exec(self, command: Sequence[str]) -> SandboxProcess:
        self._process.write(command_frame(command))
        return self._process

    async def grant(self, lease: CoreLease) -> None:
        if lease.cores:
            cores = ",".join(map(str, lease.cores))
            update = ("update", "--cpus", str(len(lease.cores)), "--cpuset-cpus", cores)
            await _engine(*update, self._name)

    async def freeze(self) -> None:
        await _engine("pause", self._name)
        self._frozen = True

    async def thaw(self) -> None:
        if self._frozen:
            await _engine("unpause", self._name)
            self._frozen = False

    async def stop(self) -> None:
        try:
            await self.thaw()
        finally:
            await self._process.end()
            await self._remove()

    async def _remove(self) -> None:
        try:
            await _engine("rm", "--force", self._name)
        except OSError as error:
            # With --rm it is removed when its client ends, too.
            if not any(text in str(error) for text in ("in progress", "No such container")):
                raise


class ContainerProvider(SandboxProvider):
    """Containers of one engine, found as `docker` or `podman`."""

    async def launch(self, name: str, profile: SandboxProfile) -> ContainerSandbox:
        # Other services may use the same engine.
        engines_name = f"troupe-{new_id()}"
        memory = f"{BASE_MIB + profile.memory_mib}m" if profile.memory_mib else "0"
        command = [
            *(find_engine(), "run", "--interactive", "--rm", "--name", engines_name),
            *("--network", "none", "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--user", _USER, "--hostname", "sandbox"),
            *("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={profile.disk_mib}m"),
            *("--shm-size", f"{profile.disk_mib}m", "--workdir", "/tmp"),
            *("--pids-limit", str(profile.processes), "--memory", memory, "--memory-swap", memory),
            *("--env", "HOME=/tmp", "--env", "PYTHONDONTWRITEBYTECODE=1"),
            *("--env", f"{HANDED_OUT}={os.environ.get(HANDED_OUT, '0')}"),
            *("--env", "OMP_NUM_THREADS=1", "--entrypoint", "python3"),
            *(profile.image, "-I", "-S", "-c", BOOT),
        ]
        try:
            process = await LocalProcess.start(command, None, attested=False)
        except asyncio.CancelledError:  # the engine may have made it already
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.shield(_engine("rm", "--force", engines_name))
            raise
        return ContainerSandbox(engines_name, profile, process)

    @classmethod
    def check(cls, spec: reward_pb.FunctionSpec, refuse: Refuse) -> None:
        if not spec.image:
            refuse("image", "", "is empty", "Name the image of its containers.")
        find_engine()

    @classmethod
    def layers(cls, profile: SandboxProfile, groups: ControlGroups | None) -> list[str]:
        try:
            return [f"container:{Path(find_engine()).name}"]
        except FailedPrecondition:
            return []


async def _engine(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        find_engine(),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            _, printed = await process.communicate()
    except TimeoutError:
        process.kill()
        raise TimeoutError(f"{arguments[0]} of a container: {_COMMAND_SECONDS:g} s") from None
    if process.returncode:
        raise OSError(printed.decode(errors="replace").strip()[-500:])
