"""Independent turns of one workflow are with the engine at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.turns import EngineTurn
from testbed.simulated_engine import SimulatedEngine
from tests.rollout.house import evaluation, open_house
from tests.support.waiting import PATIENCE
from troupe.job import PolicySpec
from troupe.v1 import common_pb2 as common_pb

TOGETHER = 6


class MeetingEngine(SimulatedEngine):
    """Answers nobody before `TOGETHER` turns have come."""

    met = 0

    def __init__(self, engine_id: str, policy: str, spec: PolicySpec) -> None:
        super().__init__(engine_id, policy, spec)
        self._barrier = asyncio.Barrier(TOGETHER)

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        async with asyncio.timeout(PATIENCE):
            await self._barrier.wait()
        MeetingEngine.met += 1
        return await super()._serve(turn)


def make(engine_id: str, policy_name: str, policy_spec: PolicySpec, **_: Any) -> MeetingEngine:
    return MeetingEngine(engine_id, policy_name, policy_spec)


async def test_parallel_turns_overlap_in_the_engine(tmp_path: Path) -> None:
    pace = {"decode_seconds": 0.001, "response_tokens_mean": 5, "load_seconds": 0}
    async with open_house(tmp_path, make=make) as house:
        await house.prepare("parallel", policies={"big": {"simulated": pace}})
        [event] = (await house.run(evaluation(1))).values()
    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason
    assert MeetingEngine.met == TOGETHER
    # In the order in which they are written.
    assert [turn.agent for turn in event.turns] == ["checker", *["solver"] * 5]
    assert [turn.turn for turn in event.turns] == list(range(6))
