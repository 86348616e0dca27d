"""The backend of a sandbox in a container of the team's own image, run by docker or podman.

The engine may be on another machine without our files, so the code to run is sent to it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from services.reward import worker
from services.reward.cgroups import BASE_MIB, CoreLease
from services.reward.sandboxes import supervisor
from services.reward.sandboxes.profile import HANDED_OUT, SandboxProfile, find_engine
from services.reward.sandboxes.sandbox import SandboxBackend
from troupe.processes.frames import frame

_COMMAND_SECONDS: Final = 30.0
_USER: Final = "65534:65534"

# Python code that starts the supervisor from its text on standard input. It reads no further than
# that text: the supervisor reads on from there.
_BOOT: Final = """
import base64, json, os, sys
sys.path[:] = [path for path in sys.path if path]
def take(size):
    text = b""
    while len(text) < size:
        part = os.read(0, size - len(text))
        if not part:
            sys.exit(1)
        text += part
    return text
fed = json.loads(take(int.from_bytes(take(4), "big")))
for path, content in fed["source"].items():
    path = os.path.abspath(os.path.join("source", path))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(content))
code = {"__name__": "troupe_supervisor"}
exec(compile(fed["supervisor"], "supervisor.py", "exec"), code)
texts = {
    path: base64.b64decode(content).decode()
    for path, content in fed["source"].items()
    if path.endswith(".py")
}
code["main"](
    fed["worker"],
    "worker.py",
    fed["limits"],
    code["TextImporter"](os.path.abspath("source"), texts),
)
"""


class ContainerBackend(SandboxBackend):
    """One container. Its engine freezes it, and gives it cores."""

    def __init__(self, name: str, profile: SandboxProfile) -> None:
        """`name`: unique among the engine's containers."""
        self._name, self._profile = name, profile
        self._frozen = False

    def launch(self) -> tuple[Sequence[str], dict[str, str] | None, bytes]:
        profile = self._profile
        memory = f"{BASE_MIB + profile.memory_mib}m" if profile.memory_mib else "0"
        command = [
            *(find_engine(), "run", "--interactive", "--rm", "--name", self._name),
            *("--network", "none", "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--user", _USER, "--hostname", "sandbox"),
            *("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={profile.disk_mib}m"),
            *("--shm-size", f"{profile.disk_mib}m", "--workdir", "/tmp"),
            *("--pids-limit", str(profile.processes), "--memory", memory, "--memory-swap", memory),
            *("--env", "HOME=/tmp", "--env", "PYTHONDONTWRITEBYTECODE=1"),
            *("--env", f"{HANDED_OUT}={os.environ.get(HANDED_OUT, '0')}"),
            *("--env", "OMP_NUM_THREADS=1", "--entrypoint", "python3"),
            *(profile.image, "-c", _BOOT),
        ]
        limits = {
            k: v for k, v in profile.limits().items() if k != "nproc"
        }  # --pids-limit bounds it
        return command, None, _first_input(limits, profile.source)

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

    async def ended(self) -> None:
        try:
            await _engine("rm", "--force", self._name)
        except OSError as error:
            # With --rm it is removed when its client ends, too.
            if not any(text in str(error) for text in ("in progress", "No such container")):
                raise


def _first_input(limits: Mapping[str, int], source: str) -> bytes:
    """Return the input of `_BOOT`: the texts of supervisor and worker, and the uploaded source."""
    files = [path for path in Path(source).rglob("*") if path.is_file()] if source else []
    body = json.dumps(
        {
            "supervisor": Path(supervisor.__file__).read_text(),
            "worker": Path(worker.__file__).read_text(),
            "limits": [f"--{name}={value}" for name, value in limits.items()],
            "source": {
                path.relative_to(source).as_posix(): base64.b64encode(path.read_bytes()).decode()
                for path in files
            },
        }
    ).encode()
    return frame(body)


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
