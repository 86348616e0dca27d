"""Model servers as processes: launched on devices of their own, or attached and claimed by URL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from services.rollout.engines.errors import EngineStartFailed
from troupe.devices import Device, pin, visible
from troupe.doctor.interpreters import OWN_PATHS
from troupe.job.sections.policy import server_of
from troupe.processes.ending import stop_process_async
from troupe.processes.tether import tethered
from troupe.scheduling.devices import DeviceHost, DeviceRequest, MemberDevices, plan

_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})
# For a server to end its own children; then the whole process group is killed.
TERM_SECONDS: Final = 10.0
# Variables of this process that are not a server's: they change which packages its interpreter
# finds, or hold secrets of the cluster.
_OWN_VARIABLES: Final = (
    *OWN_PATHS,
    "TROUPE_TOKEN",
    "TROUPE_REDIS_URL",
    "TROUPE_STORE_REDIS_URL",
)
# On shared cores more threads spin instead of working.
_THREADS: Final = "OMP_NUM_THREADS"
_TAIL_BYTES: Final = 4096
# A log lies in host memory: a server that runs for weeks must not fill it.
_LOG_BYTES: Final = 16 << 20
# The plan of a worker knows one host, whatever its name.
_HERE = "here"
# Attached servers of this worker's engines, by address.
_LOCK: Final = threading.Lock()
_HOLDERS: dict[str, Hashable] = {}


class EngineDevices:
    """Gives engines devices of this worker: a launched server gets devices that no other engine
    has, and linked ones; an engine of this process the one with the fewest engines.

    A worker without devices (no GPU, none declared) gives none: then servers see what it sees.
    """

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self._host = DeviceHost(_HERE, tuple(devices))
        self._held: dict[str, MemberDevices] = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the worker."""
        return self._host.devices

    def assign(self, engine_id: str, policy: str, count: int) -> tuple[Device, ...] | None:
        """`count` devices for an engine, those that it has already if it has as many; None on a
        worker without devices.

        Raises `EngineStartFailed` that says what there is and which engines hold it.
        """
        if not self.devices:
            return None
        others = {name: (held,) for name, held in self._held.items() if name != engine_id}
        own = {engine_id: (self._held[engine_id],)} if engine_id in self._held else {}
        request = DeviceRequest(engine_id, "engine", 1, count)
        placed = plan([self._host], [request], others | own)
        if placed.refusals:
            refusal = placed.refusals[0]
            raise EngineStartFailed(
                str(refusal),
                field=f"policies.{policy}.engine.tensor_parallel",
                value=count,
                remedy=refusal.remedy,
            )
        member = self._held[engine_id] = placed.members[engine_id][0]
        return tuple(one for one in self.devices if one.index in member.devices)

    def share(self, engine_id: str) -> int:
        """The number, as this process counts its devices, of the one that an engine of this process
        computes on: the one that it has already, else one with the fewest engines."""
        held = self._held.get(engine_id)
        if held is None and self.devices:
            holders = self.holders()
            least = min(self.devices, key=lambda one: len(holders.get(one.index, ())))
            held = self._held[engine_id] = MemberDevices(0, _HERE, (least.index,))
        numbers = [one.index for one in self.devices]
        return numbers.index(held.devices[0]) if held else 0

    def held(self, engine_id: str) -> frozenset[int]:
        """Indices of the devices that an engine has; empty on a worker without devices."""
        member = self._held.get(engine_id)
        return frozenset() if member is None else frozenset(member.devices)

    def release(self, engine_id: str) -> None:
        """Take back the devices of an engine that has ended. Repeatable."""
        self._held.pop(engine_id, None)

    def holders(self) -> dict[int, list[str]]:
        """The engines on each device, by its index; devices without one are left out."""
        found: dict[int, list[str]] = {}
        for engine_id, member in self._held.items():
            for index in member.devices:
                found.setdefault(index, []).append(engine_id)
        return found


def free_port() -> int:
    """A loopback port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A launched model server in a process group of its own, writing to `log_path`.

    It sees `devices` and no others, and runs on cores near them; None: what this process sees.
    """

    def __init__(
        self,
        command: list[str],
        log_path: Path,
        devices: Sequence[Device] | None = None,
        *,
        environment: Mapping[str, str] = _NO_VARIABLES,
    ) -> None:
        """`environment`: variables of the server, unless this process's own sets them. It inherits
        the others, but for `_OWN_VARIABLES`."""
        self.command = command
        self.log_path = log_path
        self._defaults = {_THREADS: "1", **environment}
        self._devices = devices
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it. Raises OSError when the program or the log cannot be opened."""
        inherited = {name: one for name, one in os.environ.items() if name not in _OWN_VARIABLES}
        environment = self._defaults | inherited
        if self._devices:
            # The worker's own share of the cores is not a server's that computes on GPUs: its
            # threads would spin next to the threads of the host's other servers.
            environment[_THREADS] = self._defaults[_THREADS]
        if self._devices is not None:
            environment |= visible(self._devices)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                # An orphaned server would hold its memory and its port for ever.
                *tethered(self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        if self._devices:
            pin(self._process.pid, self._devices)

    @property
    def running(self) -> bool:
        """Whether the server's process exists."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Id of the process and of its group."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode if self._process is not None else None

    def tail(self) -> str:
        """The last lines of its log, for error messages."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-8:])

    def trim_log(self) -> None:
        """Keep the last eighth of a log of more than `_LOG_BYTES`. The server appends to it."""
        with contextlib.suppress(OSError), self.log_path.open("r+b") as log:
            if log.seek(0, os.SEEK_END) > _LOG_BYTES:
                log.seek(-_LOG_BYTES // 8, os.SEEK_END)
                end = log.read()
                log.truncate(0)
                log.seek(0)
                log.write(end)

    async def stop(self) -> None:
        """SIGTERM to the group, SIGKILL if it is still there after `TERM_SECONDS`. Repeatable."""
        if self._process is not None:
            # Its children are in the group and may outlive it.
            await stop_process_async(self._process, TERM_SECONDS, group=True)


def claim_url(url: str, holder: Hashable) -> bool:
    """Claim the server at `url` for `holder`; False when another holder has it. Repeatable."""
    with _LOCK:
        return _HOLDERS.setdefault(server_of(url), holder) == holder


def release_urls(holder: Hashable) -> None:
    """Release all servers that `holder` has claimed. Repeatable."""
    with _LOCK:
        for url in [url for url, who in _HOLDERS.items() if who == holder]:
            del _HOLDERS[url]
