"""Attached servers that are not there yet when a job is prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.serving import policy
from tests.rollout.fragile import FragileEngine, Workshop
from tests.rollout.house import House, evaluation, open_house
from tests.support.waiting import PATIENCE, until
from troupe.job import PolicySpec
from troupe.rpc import TroupeError, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

HEALTHY = common_pb.ENGINE_STATE_HEALTHY
ATTACHED: dict[str, Any] = {
    "policies": {
        "big": {
            "engine": {
                "kind": "sglang",
                "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"],
                "start_timeout_seconds": PATIENCE,
            }
        }
    }
}


class Servers(Workshop):
    """Attached servers, some of which are absent, with embedded engines as stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.there = asyncio.Event()
        self.missing = {1}
        self.refusing: set[int] = set()

    def __call__(
        self,
        engine_id: str,
        policy_name: str,
        policy_spec: PolicySpec,
        *,
        replica: int,
        **how: Any,
    ) -> FragileEngine:
        engine = super().__call__(engine_id, policy_name, policy_spec, replica=replica, **how)
        if replica in self.missing:
            engine.absent = self.there
        engine.failing_starts = 1 if replica in self.refusing else 0
        return engine


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
async def house(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch, quick_restarts: None
) -> AsyncIterator[House]:
    monkeypatch.setattr(policy, "_LATE_SECONDS", 0.05)
    async with open_house(tmp_path, make=servers) as house:
        yield house


async def until_healthy(engine: FragileEngine) -> None:
    await until(lambda: engine.state == HEALTHY)


async def test_a_server_that_comes_later_joins_with_the_weights_of_the_day(
    house: House, servers: Servers
) -> None:
    prepared = await house.prepare("one_turn", **ATTACHED)
    assert [e.state for e in prepared.engines] == [HEALTHY, common_pb.ENGINE_STATE_STARTING]
    first, second = servers.engines["big"]
    assert len(await house.run(evaluation(4))) == 4
    # Updates do not wait for it either.
    ref = house.publish("big", 1)
    await house.update(ref)
    assert first.version == 1
    servers.there.set()
    await until_healthy(second)
    assert (second.version, second.checksum) == (1, ref.checksum)
    await house.run(evaluation(12, index=20))
    assert second.load().generated_tokens > 0


async def test_a_server_that_refuses_is_tried_again(house: House, servers: Servers) -> None:
    servers.missing, servers.refusing = set(), {0}
    await house.prepare("one_turn", **ATTACHED)
    await until_healthy(servers.engines["big"][0])


async def test_a_job_without_any_server_is_refused(house: House, servers: Servers) -> None:
    servers.missing, servers.refusing = set(), {0, 1}
    with pytest.raises(TroupeError, match="not today"):
        await house.prepare("one_turn", **ATTACHED)
    assert {e.state for e in servers.engines["big"]} == {common_pb.ENGINE_STATE_STOPPED}


async def test_a_job_is_released_while_a_server_is_still_absent(
    house: House, servers: Servers
) -> None:
    await house.prepare("one_turn", **ATTACHED)
    request = rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=house.job_id)
    await house.rollout.ReleaseJob(request, timeout=PATIENCE)
    assert {e.state for e in servers.engines["big"]} == {common_pb.ENGINE_STATE_STOPPED}
