"""Model services of this host: their processes, and the devices that they occupy.

A call finds its model on devices; idle models make room for it ("evict on execution", ARL-Tangram,
section 3).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import structlog
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.chassis.telemetry import Telemetry
from troupe.disks import Scratch
from troupe.processes.ending import stop_process_async
from troupe.processes.tether import tethered
from troupe.rpc import InvalidArgument
from troupe.scheduling.elastic.cells import (
    SIZES,
    CellPlan,
    DeviceCell,
    Model,
    Wish,
    fits,
    meet,
    plan,
)

# Prefix of the resource names of models.
MODEL: Final = "model:"

log = structlog.get_logger("troupe.reward")

_LOOK_SECONDS: Final = 0.05
_END_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5.0
# What SGLang releases; its CUDA graphs stay, which take little.
_TAGS: Final = ("kv_cache", "weights")
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


class ModelSettings(BaseModel):
    """A model service: exactly one of `entrypoint`, `command` and `url`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entrypoint: str = ""
    """ "package.module:attribute" that makes an object with torch modules; its methods are called
    by name. It runs in a process of its own."""
    command: tuple[str, ...] = ()
    """Program that serves HTTP with SGLang's memory release and resume, such as
    `python -m sglang.launch_server --enable-memory-saver ...`. `{port}` and `{gpus}` are filled
    in; it finds its devices in CUDA_VISIBLE_DEVICES."""
    url: str = ""
    """Address of such a program that runs already, on `devices`."""
    devices: tuple[int, ...] = ()
    """With `url`: where it is; neighbours, as a cell of `gpus` devices."""
    gpus: int = Field(default=1, ge=1)
    """Devices that it takes while it is resident: 1, 2, 4 or 8."""
    concurrency: int = Field(default=1, ge=1)
    """Calls at once."""
    start_seconds: float = Field(default=600, gt=0)
    """How long it may take to start."""
    restore_seconds: float = Field(default=120, gt=0)
    """How long it may take to come back from host memory."""

    @model_validator(mode="after")
    def _one_kind(self) -> ModelSettings:
        if sum(map(bool, (self.entrypoint, self.command, self.url))) != 1:
            raise ValueError("name exactly one of entrypoint, command and url")
        if self.gpus not in SIZES:
            raise ValueError(f"gpus = {self.gpus}: models take {SIZES} devices")
        expected = range(self.devices[0], self.devices[0] + self.gpus) if self.devices else ()
        if self.url and (not self.devices or self.devices[0] % self.gpus):
            raise ValueError("with url, name its devices: a cell of `gpus` neighbours")
        if tuple(expected) != self.devices:
            raise ValueError(f"devices = {self.devices} is not a cell of {self.gpus} neighbours")
        return self


class ModelUnavailable(Exception):
    """The model is unusable; the text names the failure."""


class ModelManager:
    """The model services of this host. `placement` decides at once where each is to be; `ready`
    moves them there, one at a time."""

    def __init__(
        self, models: Mapping[str, ModelSettings], gpus: int, telemetry: Telemetry | None = None
    ) -> None:
        """Raises `InvalidArgument` for a model that fits on no cell."""
        check_models(models, gpus)
        self._folder = Scratch("troupe-models-")
        self._services = {
            name: ModelService(name, settings, self._folder.path)
            for name, settings in models.items()
        }
        self.placement = ModelPlacement(
            gpus, [_model(service) for service in self._services.values()]
        )
        self._moving = asyncio.Lock()
        # Totals, for metrics.
        self.moving_seconds = 0.0
        self.restores = self.evictions = 0
        if telemetry is not None:
            self._export(telemetry)

    async def ready(self, name: str) -> str:
        """Return the URL of a model once it is on the devices where it was placed. Raises
        `ModelUnavailable`.

        For a call that has begun: its model stays in place until the call ends.
        """
        service = self._services[name]
        async with self._moving:
            cell = self.placement.models[name].cell
            if cell is None:
                raise ModelUnavailable(f"{name} lost its devices because it has just failed")
            if service.cell == cell and service.running:
                return service.url
            began = time.perf_counter()
            try:
                await self._move(service, cell)
            except ModelUnavailable:
                self.placement.put(name, service.cell)
                raise
            finally:
                self.moving_seconds += time.perf_counter() - began
        return service.url

    def residents(self) -> dict[str, int]:
        """Model -> its first device, of the models that are on devices."""
        return {n: s.cell.first for n, s in self._services.items() if s.cell is not None}

    async def stop(self) -> None:
        """End all processes and remove the weights in host memory."""
        async with self._moving:
            await asyncio.gather(*(service.end() for service in self._services.values()))
        self._folder.close()

    def _export(self, telemetry: Telemetry) -> None:
        texts = {
            "restores": ("Times that a model was brought to devices.", lambda: self.restores),
            "evictions": ("Times that a model left devices for another.", lambda: self.evictions),
            "moving_seconds": ("Seconds that moves of models took.", lambda: self.moving_seconds),
        }
        for name, (text, value) in texts.items():
            telemetry.gauge(f"troupe_reward_model_{name}", text).set_function(value)

    async def _move(self, service: ModelService, cell: DeviceCell) -> None:
        for other in self._services.values():
            there = other.cell
            if other is service and there != cell and there is not None:
                await other.sleep()
            elif other is not service and meet(there, cell):
                await other.sleep()
                self.evictions += 1
                log.info("a model made room", model=other.name, for_=service.name)
        if service.stays:
            self.placement.settle(service.name, cell)
        await service.wake(cell)
        self.restores += 1


def _model(service: ModelService) -> Model:
    settings = service.settings
    home = DeviceCell(settings.devices[0], settings.gpus) if settings.url else None
    return Model(
        service.name, settings.gpus, cell=service.cell, home=home, concurrency=settings.concurrency
    )


def check_models(models: Mapping[str, ModelSettings], gpus: int) -> None:
    """Raise `InvalidArgument` for a model that fits on no cell of a host with so many devices."""
    for name, model in models.items():
        if not fits(gpus, Wish(model.gpus)) or any(device >= gpus for device in model.devices):
            raise InvalidArgument(
                f"takes {model.gpus} devices, and no cell of the {gpus} of this host is that large",
                field=f"TROUPE_REWARD_MODELS.{name}.gpus",
                value=model.gpus,
                remedy="Set TROUPE_REWARD_GPUS to the number of devices, or start the model "
                "with fewer.",
            )


class ModelPlacement:
    """On which devices each model of one host is, or is to be: decided when calls begin and end."""

    def __init__(
        self, gpus: int, models: Iterable[Model], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.gpus = gpus
        self.models = {model.name: model for model in models}
        self._clock = clock
        self._plan = CellPlan({}, {}, frozenset())

    def room(self, wanted: Sequence[str]) -> dict[str, int]:
        """Return how many calls could begin now, by resource, when calls wait for `wanted` in that
        order.

        `begin` carries out the plan that was made here last.
        """
        known = list(dict.fromkeys(name for name in wanted if name in self.models))
        self._plan = plan(self.gpus, list(self.models.values()), known)
        return {MODEL + name: self._plan.room.get(name, 0) for name in self.models}

    def capacity(self) -> dict[str, int]:
        """Return how many calls may run at once, by resource."""
        return {MODEL + model.name: model.concurrency for model in self.models.values()}

    def begin(self, name: str) -> DeviceCell:
        """Begin a call: place its model if necessary, and return its devices. Raises ValueError if
        there are none."""
        model = self.models[name]
        if model.cell is None:
            if name not in self._plan.cells:
                self.room([name])
            cell = self._plan.cells.get(name)
            if cell is None:
                raise ValueError(f"no cell for {name}: all cells are in use")
            for other in list(self.models.values()):
                if meet(other.cell, cell):
                    if other.running:
                        raise ValueError(f"no cell for {name}: {other.name} is in use")
                    self.put(other.name, None)
            model = replace(model, cell=cell)
        self.models[name] = replace(model, running=model.running + 1, last=self._clock())
        assert model.cell is not None
        return model.cell

    def end(self, name: str) -> None:
        """End a call of the model."""
        model = self.models[name]
        self.models[name] = replace(model, running=model.running - 1, last=self._clock())

    def put(self, name: str, cell: DeviceCell | None) -> None:
        """Record that the model is on `cell`; None: on no devices."""
        self.models[name] = replace(self.models[name], cell=cell)

    def see(self, residents: Mapping[str, int]) -> None:
        """Record what an attached host reports: the first device of each of its models. A model in
        use stays where it was placed here: the host has yet to move it."""
        for name, model in list(self.models.items()):
            first = residents.get(name)
            cell = None if first is None else DeviceCell(first, model.size)
            taken = [m.cell for m in self.models.values() if m.cell and m.name != name]
            if not model.running and not any(meet(other, cell) for other in taken):
                self.put(name, cell)

    def settle(self, name: str, home: DeviceCell) -> None:
        """Record that the model stays on the devices that it was started on."""
        self.models[name] = replace(self.models[name], home=home)


class ModelService:
    """The process of one model: started when it is first needed, then asleep or awake."""

    def __init__(self, name: str, settings: ModelSettings, directory: Path) -> None:
        """`directory`: in host memory; holds the weights of sleeping models."""
        self.name, self.settings = name, settings
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        # The address of its HTTP API.
        self.url = settings.url.rstrip("/")
        self._http: httpx.AsyncClient | None = None
        # Devices that it occupies.
        self.cell: DeviceCell | None = None
        if settings.url:
            # It was started awake.
            self.cell = DeviceCell(settings.devices[0], settings.gpus)

    @property
    def stays(self) -> bool:
        """Whether it cannot move from the devices that it was started on."""
        return not self.settings.entrypoint

    @property
    def running(self) -> bool:
        """Whether it has been started and not ended, as far as is known."""
        return bool(self.url) and (self._process is None or self._process.returncode is None)

    async def wake(self, cell: DeviceCell) -> None:
        """Start or restore it on `cell`. Raises `ModelUnavailable`."""
        began = time.perf_counter()
        if self._process is not None and self._process.returncode is not None:
            log.warning("a model's process has ended", model=self.name, rc=self._process.returncode)
            await self.end()
        if not self.url:
            await self._start(cell)
            if self.stays:  # it starts awake
                self.cell = cell
                return
        body: dict[str, Any] = {"tags": list(_TAGS)}
        if not self.stays:
            body = {"devices": list(cell.devices)}
        await self._post("/resume_memory_occupation", body, "did not come back")
        self.cell = cell
        log.info(
            "a model is on devices",
            model=self.name,
            devices=list(cell.devices),
            seconds=round(time.perf_counter() - began, 3),
        )

    async def sleep(self) -> None:
        """Release its devices. A process that fails to is ended. Raises `ModelUnavailable` for a
        model that others started."""
        body: dict[str, Any] = {} if not self.stays else {"tags": list(_TAGS)}
        try:
            await self._post("/release_memory_occupation", body, "did not release its devices")
        except ModelUnavailable as error:
            if self._process is None:  # it was started by others
                raise
            log.warning("a model is ended", model=self.name, why=str(error))
            await self.end()
        self.cell = None

    async def end(self) -> None:
        """End its process, if this service started it."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None
        process, self._process = self._process, None
        if process is None:
            return
        self.url, self.cell = "", None
        await stop_process_async(process, _END_SECONDS, group=True)
        self._copy.unlink(missing_ok=True)

    @property
    def _copy(self) -> Path:
        return self._directory / f"{self.name}.safetensors"

    async def _start(self, cell: DeviceCell) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = dict(os.environ)
        if self.settings.entrypoint:
            command = [
                *(sys.executable, "-m", "services.reward.gpu.resident"),
                *("--entrypoint", self.settings.entrypoint, "--port", str(port)),
                *("--copy", str(self._copy)),
            ]
            imports = [entry for entry in sys.path if entry]
            environment["PYTHONPATH"] = os.pathsep.join(imports)
        else:
            # Only these are replaced: commands may hold JSON.
            gaps = {"{port}": str(port), "{gpus}": str(self.settings.gpus)}
            command = [_filled(word, gaps) for word in self.settings.command]
            environment[_DEVICES] = ",".join(devices_of(cell, environment.get(_DEVICES)))
        try:
            self._process = await asyncio.create_subprocess_exec(
                # An orphaned model would hold its devices forever.
                *tethered(command),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ModelUnavailable(f"{self.name} was not started: {error}") from error
        self.url = f"http://127.0.0.1:{port}"
        log.info("a model starts", model=self.name, url=self.url, pid=self._process.pid)
        try:
            async with asyncio.timeout(self.settings.start_seconds):
                while not await self._healthy():
                    if self._process.returncode is not None:
                        rc = self._process.returncode
                        raise ModelUnavailable(f"{self.name} ended with {rc} while it started")
                    await asyncio.sleep(_LOOK_SECONDS)
        except BaseException as error:
            await self.end()
            if isinstance(error, TimeoutError):
                limit = self.settings.start_seconds
                raise ModelUnavailable(f"{self.name} did not start in {limit:g} s") from error
            raise

    async def _healthy(self) -> bool:
        try:
            reply = await self._client().get("/health", timeout=_CONNECT_SECONDS)
        except httpx.HTTPError:
            return False
        return reply.is_success

    async def _post(self, path: str, body: dict[str, Any], what: str) -> None:
        limit = self.settings.restore_seconds
        try:
            reply = await self._client().post(path, json=body, timeout=limit)
        except httpx.HTTPError as error:
            reason = str(error) or f"no answer within {limit:g} s"
            raise ModelUnavailable(f"{self.name} {what}: {reason}") from error
        if not reply.is_success:
            raise ModelUnavailable(f"{self.name} {what}: {reply.status_code}: {reply.text[:500]}")

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            timeout = httpx.Timeout(self.settings.restore_seconds, connect=_CONNECT_SECONDS)
            # A proxy for the outside world must not sit between this service and its models.
            self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout, trust_env=False)
        return self._http


def devices_of(cell: DeviceCell, visible: str | None) -> list[str]:
    """CUDA's names of the devices of `cell`, in a process that sees the devices `visible` (None or
    empty: all). Raises `ModelUnavailable` where it sees too few."""
    if not visible:
        return [str(device) for device in cell.devices]
    names = [name.strip() for name in visible.split(",")]
    if cell.devices[-1] >= len(names):
        raise ModelUnavailable(
            f"device {cell.devices[-1]} is wanted, and {_DEVICES} is {visible}: "
            "TROUPE_REWARD_GPUS is larger than that"
        )
    return [names[device] for device in cell.devices]


def _filled(word: str, gaps: Mapping[str, str]) -> str:
    for gap, text in gaps.items():
        word = word.replace(gap, text)
    return word
