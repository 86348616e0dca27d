"""A rollout worker that has to stop: it accepts nothing new, and running work may end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from services.chassis.app import serve
from services.rollout.server import RolloutService
from services.rollout.settings import RolloutSettings
from tests.rollout.fragile import Workshop
from tests.rollout.house import NOBODY, House, evaluation, hosts_of, weights
from tests.support.waiting import PATIENCE, until
from troupe.rpc import connect
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc
from troupe.v1 import rollout_pb2_grpc as rollout_grpc


class Listening(orchestrator_grpc.OrchestratorServicer):
    """Hears heartbeats."""

    def __init__(self) -> None:
        self.beats: list[orchestrator_pb.HeartbeatRequest] = []

    async def Heartbeat(
        self, request: orchestrator_pb.HeartbeatRequest, context: Any
    ) -> orchestrator_pb.HeartbeatResponse:
        self.beats.append(request)
        return orchestrator_pb.HeartbeatResponse(next_seconds=0.05)


async def test_a_leaving_worker_says_so_and_ends_its_trajectories(tmp_path: Path) -> None:
    listening = Listening()  # type: ignore[abstract]
    orchestrator = grpc.aio.server()
    orchestrator_grpc.add_OrchestratorServicer_to_server(listening, orchestrator)
    port = orchestrator.add_insecure_port("127.0.0.1:0")
    await orchestrator.start()
    settings = RolloutSettings(
        transfer_dir=tmp_path / "transfer",
        experience_store_address=NOBODY,
        reward_address=NOBODY,
        orchestrator_address=f"127.0.0.1:{port}",
        drain_seconds=PATIENCE,
        stream_drain_seconds=PATIENCE,
        worker_id="w0",
    )
    for seed in (0, 99):
        weights(seed)
    workshop = Workshop()
    channel: grpc.aio.Channel | None = None
    try:
        async with serve(
            lambda s, t: RolloutService(s, t, make=hosts_of(workshop)), settings
        ) as server:
            channel = connect(server.address)
            stub: Any = rollout_grpc.RolloutStub(channel)
            house = House(
                server.service, server.address, stub, None, Transfer(tmp_path / "transfer")
            )
            await house.prepare("long_winded")
            [engine] = workshop.engines["big"]
            running = asyncio.create_task(house.run(evaluation(4)))
            await until(lambda: engine.load().running >= 4)
            before = len(listening.beats)
        ended = await running
        assert {event.state for event in ended.values()} == {common_pb.TRAJECTORY_STATE_COMPLETED}
        assert not listening.beats[before - 1].draining
        assert all(beat.draining for beat in listening.beats[before + 1 :])
        # It was said while turns were in flight, not after them.
        said = next(beat for beat in listening.beats if beat.draining)
        assert said.loads[0].in_flight > 0
        assert engine.state == common_pb.ENGINE_STATE_STOPPED
    finally:
        if channel is not None:
            await channel.close(None)
        await orchestrator.stop(0)
