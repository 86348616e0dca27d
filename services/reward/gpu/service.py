"""One model service: its process, if it is ours, and its sleep and wake over HTTP.

SGLang's surface (`/release_memory_occupation`, `/resume_memory_occupation`, read from 0.4.6 to
0.5.23) is spoken by `resident.py`, too, so that one client serves both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import structlog

from services.reward.gpu.settings import ModelSettings
from troupe.scheduling.elastic.cells import Cell

log = structlog.get_logger("troupe.reward")

_LOOK_SECONDS: Final = 0.05
_END_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5.0
# What SGLang lets go of; its CUDA graphs stay, which take little.
_TAGS: Final = ("kv_cache", "weights")
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


class ModelUnavailable(Exception):
    """The model cannot be used; the text says what was tried and how it failed."""


class ModelService:
    """Started when it is needed first, then asleep or awake."""

    def __init__(self, name: str, settings: ModelSettings, directory: Path) -> None:
        """`directory`: of files in host memory, where weights of sleeping models are."""
        self.name, self.settings = name, settings
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._url = settings.url.rstrip("/")
        self._http: httpx.AsyncClient | None = None
        # Devices that it really occupies.
        self.cell: Cell | None = None
        if settings.url:
            # Whoever started it had it awake.
            self.cell = Cell(settings.devices[0], settings.gpus)

    @property
    def url(self) -> str:
        """Where it is called."""
        return self._url

    @property
    def stays(self) -> bool:
        """Whether it is bound to the devices that it was started on."""
        return not self.settings.entrypoint

    @property
    def running(self) -> bool:
        """Whether it has been started, and its process, if it is ours, is there."""
        return bool(self._url) and (self._process is None or self._process.returncode is None)

    async def wake(self, cell: Cell) -> None:
        """Have it on `cell`, started or restored. Raises `ModelUnavailable`."""
        began = time.perf_counter()
        if self._process is not None and self._process.returncode is not None:
            log.warning("a model's process is gone", model=self.name, rc=self._process.returncode)
            await self.end()
        if not self._url:
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
        """Have it off its devices. Where it does not obey it is ended: memory must come free."""
        body: dict[str, Any] = {} if not self.stays else {"tags": list(_TAGS)}
        try:
            await self._post("/release_memory_occupation", body, "did not let go")
        except ModelUnavailable as error:
            if self._process is None:  # not ours to end
                raise
            log.warning("a model is ended", model=self.name, why=str(error))
            await self.end()
        self.cell = None

    async def end(self) -> None:
        """End its process, if it is ours."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None
        process, self._process = self._process, None
        if process is None:
            return
        self._url, self.cell = "", None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self._copy.unlink(missing_ok=True)

    @property
    def _copy(self) -> Path:
        return self._directory / f"{self.name}.safetensors"

    async def _start(self, cell: Cell) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = dict(os.environ)
        if self.settings.entrypoint:
            command = [
                *(sys.executable, "-m", "services.reward.gpu.resident"),
                *("--entrypoint", self.settings.entrypoint, "--port", str(port)),
                *("--copy", str(self._copy), "--parent", str(os.getpid())),
            ]
            imports = [entry for entry in sys.path if entry]
            environment["PYTHONPATH"] = os.pathsep.join(imports)
        else:
            # Nothing else in braces is ours: commands hold JSON, too.
            gaps = {"{port}": str(port), "{gpus}": str(self.settings.gpus)}
            command = [_filled(word, gaps) for word in self.settings.command]
            environment[_DEVICES] = ",".join(devices_of(cell, environment.get(_DEVICES)))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise ModelUnavailable(f"{self.name} was not started: {error}") from error
        self._url = f"http://127.0.0.1:{port}"
        log.info("a model starts", model=self.name, url=self._url, pid=self._process.pid)
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
            # A proxy meant for the outside world must not get between us and our models.
            self._http = httpx.AsyncClient(base_url=self._url, timeout=timeout, trust_env=False)
        return self._http


def devices_of(cell: Cell, visible: str | None) -> list[str]:
    """What CUDA calls the devices of `cell` where this process sees those of `visible` (nothing:
    all). Raises `ModelUnavailable` where it sees too few."""
    if not visible:
        return [str(device) for device in cell.devices]
    names = [name.strip() for name in visible.split(",")]
    if cell.devices[-1] >= len(names):
        raise ModelUnavailable(
            f"device {cell.devices[-1]} is wanted, and {_DEVICES} is {visible}: "
            "TROUPE_REWARD_GPUS says more than there are"
        )
    return [names[device] for device in cell.devices]


def _filled(word: str, gaps: Mapping[str, str]) -> str:
    for gap, text in gaps.items():
        word = word.replace(gap, text)
    return word
