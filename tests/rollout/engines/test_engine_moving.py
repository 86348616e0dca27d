"""Engines that drain and serve another policy: the same for every kind that runs here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.errors import EngineStale
from services.rollout.engines.factory import make_engine
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import make_model, policy_spec, publish, transfer_in
from tests.support.waiting import PATIENCE, until
from troupe.job import PolicySpec, SimulatedSpec
from troupe.states import IllegalTransition
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

PACE = SimulatedSpec(decode_seconds=0.003, response_tokens_mean=10_000, load_seconds=0.01)
SPECS: dict[str, PolicySpec] = {
    "simulated": policy_spec().model_copy(update={"simulated": PACE}),
    "embedded": policy_spec(),
}


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@pytest.fixture(params=sorted(SPECS))
async def engine(
    request: pytest.FixtureRequest, transfer: Transfer
) -> AsyncIterator[ServingEngine]:
    made = make_engine("e0", "solver", SPECS[request.param])
    assert isinstance(made, ServingEngine)
    await made.start()
    await made.update_weights(publish(transfer, make_model(0), 0), transfer)
    yield made
    await made.stop()


async def test_turns_end_before_the_deadline_and_no_new_one_begins(engine: ServingEngine) -> None:
    turn = asyncio.create_task(ask(engine, "t", [5], max_new_tokens=20))
    await until(lambda: engine.load().running + engine.load().waiting > 0)
    drained = asyncio.create_task(engine.drain("moves", deadline_seconds=PATIENCE))
    await until(lambda: engine.state == common_pb.ENGINE_STATE_DRAINING)
    with pytest.raises(EngineStale, match="DRAINING"):
        await ask(engine, "late", [5])
    assert await drained == 0
    assert (await turn).finish_reason != "abort"


async def test_turns_that_outlast_the_drain_are_handed_back(engine: ServingEngine) -> None:
    turns = [asyncio.create_task(ask(engine, f"t{n}", [5], max_new_tokens=200)) for n in range(3)]
    await until(lambda: engine.load().running == 3)
    assert await engine.drain("moves", deadline_seconds=0.0) == 3
    assert {(await turn).finish_reason for turn in turns} == {"abort"}


async def test_a_moved_engine_serves_only_after_a_verified_update(
    engine: ServingEngine, transfer: Transfer
) -> None:
    with pytest.raises(IllegalTransition):
        engine.assign("checker")
    before = await ask(engine, "before", [5, 6], temperature=0.0, max_new_tokens=8)
    await engine.drain("moves", deadline_seconds=1)
    engine.assign("checker")
    assert (engine.policy, engine.state) == ("checker", common_pb.ENGINE_STATE_STALE)
    assert (engine.version, engine.checksum) == (None, "")
    with pytest.raises(EngineStale):
        await ask(engine, "early", [5])
    # The same number, but the content of another policy.
    ref = publish(transfer, make_model(1), 0, policy="checker")
    await engine.update_weights(ref, transfer)
    assert (engine.state, engine.checksum) == (common_pb.ENGINE_STATE_HEALTHY, ref.checksum)
    after = await ask(engine, "after", [5, 6], temperature=0.0, max_new_tokens=8)
    if engine.kind == "embedded":
        fresh = make_engine("e1", "checker", SPECS["embedded"])
        await fresh.start()
        await fresh.update_weights(ref, transfer)
        wanted = await ask(fresh, "w", [5, 6], temperature=0.0, max_new_tokens=8)
        await fresh.stop()
        assert after.token_ids == wanted.token_ids != before.token_ids


async def test_an_engine_that_dies_while_draining_may_still_move(engine: ServingEngine) -> None:
    turn = asyncio.create_task(ask(engine, "t", [5], max_new_tokens=200))
    await until(lambda: engine.load().running == 1)
    drained = asyncio.create_task(engine.drain("moves", deadline_seconds=PATIENCE))
    await until(lambda: engine.state == common_pb.ENGINE_STATE_DRAINING)
    engine._die("the plug was pulled")
    await drained
    assert isinstance((await asyncio.gather(turn, return_exceptions=True))[0], Exception)
    engine.assign("checker")
    assert (engine.policy, engine.state) == ("checker", common_pb.ENGINE_STATE_DEAD)
