"""Sleep and wake, and what becomes of turns at an update, by every kind of engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.errors import EngineAsleep, EngineStale, TurnReturned, WeightsRefused
from services.rollout.engines.factory import make_engine
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.asking import ask
from tests.rollout.engines.models import CONFIG, make_model, policy_spec, publish, transfer_in
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import until
from troupe.job import SimulatedSpec
from troupe.rpc.errors import FailedPrecondition
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

PACE = SimulatedSpec(decode_seconds=0.002, response_tokens_mean=10_000, load_seconds=0.05)
KINDS = ["embedded", "deterministic", "simulated", "sglang"]


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@asynccontextmanager
async def serving(kind: str, transfer: Transfer, **engine: object) -> AsyncIterator[ServingEngine]:
    """An engine of that kind that serves version 0; an SGLang one is attached to a double."""
    fake = FakeSglang(CONFIG)
    fake.info["enable_memory_saver"] = True
    async with serve(fake) as url:
        extra = {"kind": "sglang", "urls": [url]} if kind == "sglang" else {}
        spec = policy_spec(**extra, **engine)
        if kind == "simulated":
            spec = spec.model_copy(update={"simulated": PACE})
        made = make_engine("e0", "solver", spec, deterministic=kind == "deterministic")
        await made.start()
        await made.update_weights(publish(transfer, make_model(0), 0), transfer)
        yield made
        await made.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_slept_is_stale_until_an_update_is_verified(
    kind: str, transfer: Transfer
) -> None:
    async with serving(kind, transfer) as engine:
        last = asyncio.ensure_future(ask(engine, "last", [1, 2], max_new_tokens=20))
        await until(lambda: engine.load().running > 0)
        await engine.sleep()
        assert len((await last).token_ids) == 20  # drained, not cut
        assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_STALE, None)
        assert engine.asleep == {"weights", "kv_cache"}
        assert engine.message == "asleep: kv_cache, weights"
        await engine.sleep()
        assert await engine.check() == common_pb.ENGINE_STATE_STALE
        ref = publish(transfer, make_model(1), 1)
        await engine.accepts(ref, transfer)
        with pytest.raises(EngineAsleep, match="kv_cache, weights"):
            await engine.update_weights(ref, transfer)
        with pytest.raises(EngineStale):
            await ask(engine, "early", [1])
        await engine.wake({"weights"})
        with pytest.raises(EngineAsleep, match="asleep: kv_cache"):
            await engine.update_weights(ref, transfer)
        await engine.wake()
        await engine.wake()
        assert (engine.state, engine.asleep) == (common_pb.ENGINE_STATE_STALE, frozenset())
        with pytest.raises(EngineStale):
            await ask(engine, "still early", [1])
        await engine.update_weights(ref, transfer)
        answer = await ask(engine, "again", [1])
        assert [(s.version, s.end) for s in answer.versions] == [(1, 8)]
        assert engine.restarts == 0


@pytest.mark.parametrize("kind", ["embedded", "simulated", "sglang"])
async def test_turns_that_outlast_the_drain_come_back(kind: str, transfer: Transfer) -> None:
    async with serving(kind, transfer) as engine:
        task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=250))
        await until(lambda: engine.load().running > 0)
        await engine.sleep({"kv_cache"}, drain_seconds=0.01)
        answer = await task
        assert answer.finish_reason == "abort"  # the router asks elsewhere
        assert engine.asleep == {"kv_cache"}


async def test_a_sleeping_embedded_engine_holds_no_model(transfer: Transfer) -> None:
    async with serving("embedded", transfer) as engine:
        await engine.sleep()
        assert engine._host.model is None  # type: ignore[attr-defined]
        assert engine._host.batcher is None  # type: ignore[attr-defined]


async def test_a_server_without_a_memory_saver_cannot_sleep(transfer: Transfer) -> None:
    async with serve(FakeSglang(CONFIG)) as url:
        engine = make_engine("e0", "solver", policy_spec(kind="sglang", urls=[url]))
        await engine.start()
        await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
        with pytest.raises(FailedPrecondition, match="cannot free its memory") as info:
            await engine.sleep()
        assert info.value.field == "policies.solver.engine.urls"
        assert "--enable-memory-saver" in (info.value.remedy or "")
        assert engine.state == common_pb.ENGINE_STATE_HEALTHY
        assert len((await ask(engine, "r", [1])).token_ids) == 8
        await engine.stop()


@asynccontextmanager
async def saving_memory(transfer: Transfer) -> AsyncIterator[tuple[ServingEngine, FakeSglang]]:
    """An engine that serves version 0, and the double it is attached to, with a memory saver."""
    fake = FakeSglang(CONFIG)
    fake.info["enable_memory_saver"] = True
    async with serve(fake) as url:
        engine = make_engine("e0", "solver", policy_spec(kind="sglang", urls=[url]))
        await engine.start()
        await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
        yield engine, fake
        await engine.stop()


async def test_memory_is_released_in_the_server_and_taken_again(transfer: Transfer) -> None:
    async with saving_memory(transfer) as (engine, fake):
        await engine.sleep({"kv_cache"})
        assert fake.released == {"kv_cache", "cuda_graph"}
        await engine.sleep()
        assert fake.released == {"kv_cache", "weights", "cuda_graph"}
        await engine.wake({"weights"})
        assert fake.released == {"kv_cache", "cuda_graph"}
        await fake.server.crash()
        await engine.check()
        with pytest.raises(Exception, match="did not wake"):
            await engine.wake()
        # It comes back like any engine that died.
        assert (engine.state, engine.asleep) == (common_pb.ENGINE_STATE_DEAD, frozenset())


async def test_memory_is_not_released_while_requests_wait_in_the_server(
    transfer: Transfer,
) -> None:
    """Turns of other clients, too: a scheduler with anything in its queue dies."""
    async with saving_memory(transfer) as (engine, fake):
        client = engine._server.api  # type: ignore[attr-defined]
        other = asyncio.ensure_future(client.request("theirs", [1, 2], {"max_new_tokens": 100}))
        await until(lambda: "theirs" in fake.calls)
        fake.paused = True  # what ran waits in the queue
        asleep = asyncio.ensure_future(engine.sleep())
        await asyncio.sleep(0.3)
        assert not fake.released
        fake.paused = False
        await other
        await asleep
        assert fake.released == {"kv_cache", "weights", "cuda_graph"}


@pytest.mark.parametrize("kind", KINDS)
async def test_turns_in_hand_are_kept_across_an_update(kind: str, transfer: Transfer) -> None:
    async with serving(kind, transfer) as engine:
        tasks = [
            asyncio.ensure_future(ask(engine, f"r{i}", [i + 1], max_new_tokens=200))
            for i in range(3)
        ]
        await until(lambda: engine.load().running == 3, 0)
        await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
        for answer in await asyncio.gather(*tasks):
            assert len(answer.token_ids) == 200
            assert answer.versions[-1].version == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_or_given_back_so_that_no_turn_is_of_two_versions(
    kind: str, transfer: Transfer
) -> None:
    async with serving(kind, transfer, in_flight="restart") as engine:
        running = [
            asyncio.ensure_future(ask(engine, f"r{i}", [i + 1], max_new_tokens=200))
            for i in range(3)
        ]
        await until(lambda: engine.load().running == 3)
        update = asyncio.ensure_future(
            engine.update_weights(publish(transfer, make_model(1), 1), transfer)
        )
        await until(lambda: engine.state == common_pb.ENGINE_STATE_UPDATING, 0)
        late = asyncio.ensure_future(ask(engine, "late", [9], max_new_tokens=30))
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, TurnReturned)
            assert "version 1 is being loaded" in str(outcome)
        await update
        assert [(s.version, s.end) for s in (await late).versions] == [(1, 30)]
        again = await ask(engine, "r0~1", [1], max_new_tokens=40)
        assert [(s.version, s.end) for s in again.versions] == [(1, 40)]
        assert engine.load().running == 0


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
async def test_weights_that_do_not_fit_are_refused_before_serving_stops(
    kind: str, transfer: Transfer
) -> None:
    async with serving(kind, transfer) as engine:
        await engine.accepts(publish(transfer, make_model(1), 1), transfer)
        wide = make_model(0).bfloat16()
        with pytest.raises(WeightsRefused, match=r"bfloat16.*the model wants torch\.float32"):
            await engine.accepts(publish(transfer, wide, 2), transfer)
        assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 0)
        if isinstance(engine, SglangEngine):
            assert engine.load().kv_usage == 0.0
