"""A host of functions as a process: health and metrics like any service; nobody calls it."""

from __future__ import annotations

import contextlib

import grpc

from services.chassis.telemetry import Telemetry
from services.reward.hosts.agent import Agent
from services.reward.sandbox import BUBBLEWRAP, PROCESS, find_bubblewrap
from services.reward.settings import RewardSettings
from services.reward.workplace import Workplace
from troupe.rpc import TroupeError
from troupe.v1 import reward_pb2 as pb


class RewardHost:
    """Runs calls for the reward service at TROUPE_REWARD_ADDRESS."""

    name = "troupe.v1.RewardHost"

    def __init__(self, settings: RewardSettings, telemetry: Telemetry) -> None:
        self._workplace = Workplace(settings, telemetry)
        host = self._workplace.host
        self.agent = Agent(settings, host, offer_of(settings))
        busy = telemetry.gauge("troupe_reward_host_busy", "Workers that run calls here.")
        busy.set_function(lambda: host.workers - host.free)
        attached = telemetry.gauge("troupe_reward_host_attached", "1: it takes calls.")
        attached.set_function(lambda: float(self.agent.attached.is_set()))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Nobody calls it: it calls the service."""

    async def start(self) -> None:
        """Offer itself, now and whenever the service is back."""
        await self.agent.start()

    async def leave(self) -> None:
        """Take no more calls."""
        await self.agent.leave()

    async def stop(self, grace: float) -> None:
        """Let what runs end, then kill it."""
        await self.agent.stop(grace)
        self._workplace.close()


def offer_of(settings: RewardSettings) -> pb.HostOffer:
    """What this process has for calls."""
    sandboxes = [PROCESS]
    with contextlib.suppress(TroupeError):
        find_bubblewrap()
        sandboxes.append(BUBBLEWRAP)
    return pb.HostOffer(
        host_id=settings.worker_id,
        workers=settings.reward_workers,
        cores=settings.reward_cores,
        memory_mib=settings.reward_memory_mib,
        sandboxes=sandboxes,
        gpus=settings.reward_gpus,
        models=[
            pb.ModelOffer(name=name, gpus=model.gpus, concurrency=model.concurrency)
            for name, model in settings.reward_models.items()
        ],
    )
