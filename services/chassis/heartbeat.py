"""Heartbeats of rollout and trainer workers to the orchestrator; the id of a host and its use."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import grpc
import psutil
import structlog

from services.chassis.settings import ServiceSettings
from troupe.devices import Device, device_use, find_devices, host_memory
from troupe.rpc import NO_RETRY, TroupeError, connect_sync
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

log = structlog.get_logger("troupe.heartbeat")

Message = Callable[[], orchestrator_pb.HeartbeatRequest]
# Timeout of one beat. It may be long, since others follow meanwhile.
_TIMEOUT_SECONDS = 10.0
# Maximum number of unanswered beats, each of which occupies a thread.
_UNANSWERED = 10
# Maximum time that a beat waits for a new message from the event loop; then it repeats the last
# one.
_MESSAGE_SECONDS = 0.25
# Interval while the orchestrator is unreachable, so that it notices workers soon after a restart.
_AWAY_SECONDS = 0.25
# Bounds of the interval that the orchestrator may ask for.
_MIN_SECONDS, _MAX_SECONDS = 0.05, 30.0


class Heartbeat:
    """A thread that calls `Orchestrator.Heartbeat` every `interval` seconds until stopped.

    It has its own thread because a worker with a late event loop is not dead: with thousands of
    trajectories, seconds may pass between two rounds of the loop. `message()` builds the request in
    the event loop. If the loop is late, the last request is sent again, with the seconds since the
    loop last built one (`loop_seconds`), so that the orchestrator recognises a loop that never
    advances. Worker id, address, memory and host are filled in if empty.
    """

    def __init__(
        self, settings: ServiceSettings, message: Message, *, interval: float = 1.0
    ) -> None:
        self._settings = settings
        self._message = message
        self._interval = interval
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._process = psutil.Process()
        self._meter = HostMeter(settings.host_use_seconds)
        self._reached: bool | None = None
        self._leaving = False
        # The last built request, and when the event loop last built one.
        self._newest: orchestrator_pb.HeartbeatRequest | None = None
        self._advanced = 0.0
        # Set when the loop has built a request since the thread asked for one.
        self._fresh = threading.Event()

    @property
    def reached(self) -> bool:
        """Whether the last beat arrived."""
        return bool(self._reached)

    async def start(self) -> None:
        """Start the beats, and return immediately."""
        self._refresh()
        self._meter.start()
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._beat_on, args=(loop,), name="heartbeat", daemon=True
        )
        self._thread.start()

    async def leave(self) -> None:
        """Announce, now and in every later beat, that the worker is leaving."""
        self._leaving = True
        if self._thread is not None:
            await self._announce_leaving()

    async def stop(self) -> None:
        """Announce that the worker is leaving, if the orchestrator answers, and stop the beats."""
        if self._thread is None:
            return
        self._leaving = True
        await self.stop_beats()
        await self._announce_leaving()

    async def stop_beats(self) -> None:
        """Stop the beats without announcing that the worker leaves. Repeatable."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            self._meter.stop()
            await asyncio.to_thread(thread.join)

    async def _announce_leaving(self) -> None:
        self._refresh()

        def say() -> None:
            with self._channel() as channel:
                self._beat(orchestrator_grpc.OrchestratorStub(channel), seconds=0.5)

        await asyncio.to_thread(say)

    def _refresh(self) -> None:
        """Build a request. Runs in the event loop."""
        try:
            self._newest = self._message()
        except Exception:
            # An error in message() must not make a live worker look dead.
            log.exception("a heartbeat could not be made")
        self._advanced = time.monotonic()
        self._fresh.set()

    def _beat_on(self, loop: asyncio.AbstractEventLoop) -> None:
        pause, asked = 0.0, False
        beats: set[Future[float]] = set()
        with self._channel() as channel, ThreadPoolExecutor(_UNANSWERED, "beat") as pool:
            stub = orchestrator_grpc.OrchestratorStub(channel)
            while not self._stopped.wait(pause):
                beats = {one for one in beats if not one.done()}
                if len(beats) >= _UNANSWERED:
                    wait(beats, self._interval, FIRST_COMPLETED)
                    pause = 0.0
                    continue
                if not asked or self._fresh.is_set():
                    self._fresh.clear()
                    try:
                        loop.call_soon_threadsafe(self._refresh)
                    except RuntimeError:  # the loop is closed: the process is ending
                        break
                    asked = True
                self._fresh.wait(min(_MESSAGE_SECONDS, self._interval))
                beat = pool.submit(self._beat, stub)
                beats.add(beat)
                # The next beat does not wait for a late answer.
                done, _ = wait({beat}, self._interval)
                pause = beat.result() if done else 0.0
            channel.close()  # ends the calls in flight

    def _beat(
        self, stub: orchestrator_grpc.OrchestratorStub, seconds: float = _TIMEOUT_SECONDS
    ) -> float:
        """Send one heartbeat, and return the seconds until the next."""
        address = self._settings.orchestrator_address
        if self._newest is None:
            return self._interval
        try:
            response = stub.Heartbeat(self._filled(self._newest), timeout=seconds)
        except TroupeError as error:
            if self._reached is not False and not self._stopped.is_set():
                log.warning("orchestrator unreachable", address=address, error=str(error))
            self._reached = False
            return min(self._interval, _AWAY_SECONDS)
        except ValueError:  # the channel was closed under the call
            return self._interval
        if not self._reached:
            log.info("orchestrator reached", address=address)
        self._reached = True
        wanted = response.next_seconds or self._interval
        return min(_MAX_SECONDS, max(_MIN_SECONDS, wanted))

    def _filled(self, newest: orchestrator_pb.HeartbeatRequest) -> orchestrator_pb.HeartbeatRequest:
        request = orchestrator_pb.HeartbeatRequest()
        request.CopyFrom(newest)
        request.loop_seconds = time.monotonic() - self._advanced
        request.draining = request.draining or self._leaving
        request.worker_id = request.worker_id or self._settings.worker_id
        request.address = request.address or self._settings.address
        request.rss_bytes = request.rss_bytes or self._process.memory_info().rss
        request.host_id = request.host_id or host_id()
        request.node = request.node or self._settings.node
        request.cpu.CopyFrom(host_cpu())
        if (use := self._meter.take()) is not None:
            request.host_use.CopyFrom(use)
        return request

    def _channel(self) -> grpc.Channel:
        settings = self._settings
        return connect_sync(settings.orchestrator_address, settings.client(retry=NO_RETRY))


def given_devices(
    devices: Iterable[Device], holders: Mapping[int, Sequence[str]]
) -> list[orchestrator_pb.GivenDevice]:
    """Return the devices of a worker for its heartbeats. `holders`: the users of each device, by
    its index."""
    return [
        orchestrator_pb.GivenDevice(
            index=one.index,
            device_class=one.device_class,
            memory_bytes=one.memory,
            holders=holders.get(one.index, ()),
        )
        for one in devices
    ]


@cache
def host_id() -> str:
    """Return the id of a memory domain: equal for processes of one boot of one host or
    container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def host_cpu(cgroup: Path = Path("/sys/fs/cgroup")) -> orchestrator_pb.HostCpu:
    """Return the cores that this process may use, and how long they have computed in total: those
    of a container's quota (cgroup v2, in `cgroup`), if that is smaller than its set of cores."""
    allowed = os.sched_getaffinity(0)
    now = time.monotonic()
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        cores = float(quota) / float(period)
        used = dict(line.split() for line in (cgroup / "cpu.stat").read_text().splitlines())
        if cores < len(allowed):
            return orchestrator_pb.HostCpu(
                cores=cores, busy_seconds=float(used["usage_usec"]) / 1e6, at=now
            )
    except (OSError, ValueError, KeyError, ZeroDivisionError):  # no quota
        pass
    times = psutil.cpu_times(percpu=True)
    mine = [one for number, one in enumerate(times) if number in allowed]
    # With cores offline, numbers and positions differ.
    mine = mine if len(mine) == len(allowed) else times[: len(allowed)]
    busy = sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in mine)
    return orchestrator_pb.HostCpu(cores=len(allowed), busy_seconds=busy, at=now)


class HostMeter:
    """A thread that measures the memory of this host, and the devices that this process may use,
    every `seconds`.

    A driver may take long to answer, or never answer: a thread of its own waits for it, so that
    heartbeats do not.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()
        self._newest: orchestrator_pb.HostUse | None = None

    def start(self) -> None:
        """Begin to measure."""
        threading.Thread(target=self._measure, name="host meter", daemon=True).start()

    def stop(self) -> None:
        """End after the present measurement, without waiting for it. Repeatable."""
        self._stopped.set()

    def take(self) -> orchestrator_pb.HostUse | None:
        """Return the newest measurement, once; None if there is none since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def _measure(self) -> None:
        devices: Sequence[Device] | None = None
        while True:
            try:
                devices = find_devices() if devices is None else devices
                self._newest = measured_use(devices)
            except Exception as error:  # a driver's, or a declaration that cannot be read
                log.warning("the use of this host could not be measured", error=repr(error))
            if self._stopped.wait(self._seconds):
                return


def measured_use(devices: Sequence[Device]) -> orchestrator_pb.HostUse:
    """Return the memory use of this host, and of each of `devices` that has a driver."""
    total, free = host_memory()
    use = orchestrator_pb.HostUse(memory_bytes=total, used_bytes=total - free)
    found = device_use(devices)
    for one in devices:
        if (now := found.get(one.index)) is not None:
            use.devices.add(
                uuid=one.uuid or str(one.index),
                utilization=now.utilization,
                memory_bytes=one.memory,
                used_bytes=now.used_bytes,
            )
    return use
