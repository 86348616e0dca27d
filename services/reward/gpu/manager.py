"""Evict on execution: a call finds its model on devices, whatever had to leave them for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from services.chassis.telemetry import Telemetry
from services.reward.gpu.board import Board
from services.reward.gpu.service import ModelService, ModelUnavailable
from services.reward.gpu.settings import ModelSettings, check_models
from troupe.scheduling.elastic.cells import Cell, Model, meet
from troupe.scratch import Scratch

__all__ = ["ModelManager", "ModelUnavailable"]

log = structlog.get_logger("troupe.reward")


class ModelManager:
    """The model services of this host (ARL-Tangram, section 3).

    `board` says where each is meant to be, at once; `ready` makes it so, one move at a time.
    """

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
        self.board = Board(gpus, [_model(service) for service in self._services.values()])
        self._moving = asyncio.Lock()
        # Seconds that moves took, and how many restores and evictions there were.
        self.moving_seconds = 0.0
        self.restores = self.evictions = 0
        if telemetry is not None:
            self._export(telemetry)

    async def ready(self, name: str) -> str:
        """Have the model where the board says; its URL. Raises `ModelUnavailable`.

        For a call that has begun: the board keeps it there until it ends.
        """
        service = self._services[name]
        async with self._moving:
            cell = self.board.models[name].cell
            if cell is None:
                raise ModelUnavailable(f"{name} lost its devices: it failed a moment ago")
            if service.cell == cell and service.running:
                return service.url
            began = time.perf_counter()
            try:
                await self._move(service, cell)
            except ModelUnavailable:
                self.board.put(name, service.cell)
                raise
            finally:
                self.moving_seconds += time.perf_counter() - began
        return service.url

    def residents(self) -> dict[str, int]:
        """The first device of each model that is on devices."""
        return {n: s.cell.first for n, s in self._services.items() if s.cell is not None}

    async def stop(self) -> None:
        """End all processes, and let host memory go."""
        async with self._moving:
            await asyncio.gather(*(service.end() for service in self._services.values()))
        self._folder.close()

    def _export(self, telemetry: Telemetry) -> None:
        texts = {
            "restores": ("Times that a model was brought to devices.", lambda: self.restores),
            "evictions": ("Times that one left them for another.", lambda: self.evictions),
            "moving_seconds": ("Seconds that this took.", lambda: self.moving_seconds),
        }
        for name, (text, value) in texts.items():
            telemetry.gauge(f"troupe_reward_model_{name}", text).set_function(value)

    async def _move(self, service: ModelService, cell: Cell) -> None:
        for other in self._services.values():
            there = other.cell
            if other is service and there != cell and there is not None:
                await other.sleep()
            elif other is not service and meet(there, cell):
                await other.sleep()
                self.evictions += 1
                log.info("a model made room", model=other.name, for_=service.name)
        if service.stays:
            self.board.settle(service.name, cell)
        await service.wake(cell)
        self.restores += 1


def _model(service: ModelService) -> Model:
    settings = service.settings
    home = Cell(settings.devices[0], settings.gpus) if settings.url else None
    return Model(
        service.name, settings.gpus, cell=service.cell, home=home, concurrency=settings.concurrency
    )
