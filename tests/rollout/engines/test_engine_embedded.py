"""The embedded engine against plain forward passes of the same weights."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.batcher import SlotBatcher
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import (
    BadTurn,
    EngineDied,
    EngineStale,
    PromptTooLong,
    TurnDeadline,
)
from services.rollout.engines.factory import make_engine
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    VOCABULARY,
    policy_spec,
    publish,
    reference_logprobs,
)
from tests.support.waiting import PATIENCE, until
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    engine: EmbeddedEngine, model: PreTrainedModel, temperature: float
) -> None:
    rng = random.Random(1)
    prompts = [prompt(rng) for _ in range(40)]
    prompts += prompts[:10]  # shared prefixes, whole and in part
    prompts += [p + prompt(rng, 1, 20) for p in prompts[:10]]
    answers = await asyncio.gather(
        *(
            ask(engine, f"r{i}", p, temperature=temperature, seed=i, max_new_tokens=1 + i % 12)
            for i, p in enumerate(prompts)
        )
    )
    for i, (p, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.token_ids) == 1 + i % 12
        assert answer.finish_reason == "length"
        assert [(s.version, s.start, s.end) for s in answer.versions] == [(0, 0, 1 + i % 12)]
        expected = reference_logprobs(model, p, answer.token_ids, temperature or 1.0)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    assert sum(a.cached_tokens for a in answers) > 0


async def test_greedy_takes_the_most_likely_token(
    engine: EmbeddedEngine, model: PreTrainedModel
) -> None:
    ids = prompt(random.Random(2))
    answer = await ask(engine, "r", ids, temperature=0.0, max_new_tokens=10)
    with torch.no_grad():
        logits = model(torch.tensor([ids + answer.token_ids])).logits[0, len(ids) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()


async def test_a_seed_fixes_the_response_whatever_else_is_in_the_batch(
    engine: EmbeddedEngine,
) -> None:
    rng = random.Random(3)
    ids = prompt(rng)
    alone = await ask(engine, "alone", ids, seed=7, max_new_tokens=12)
    crowd = [ask(engine, f"c{i}", prompt(rng), seed=i) for i in range(30)]
    among, *_ = await asyncio.gather(ask(engine, "a", ids, seed=7, max_new_tokens=12), *crowd)
    other = await ask(engine, "other", ids, seed=8, max_new_tokens=12)
    assert among.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


async def test_stop_tokens_end_a_response_and_stay_in_it(engine: EmbeddedEngine) -> None:
    ids = prompt(random.Random(4))
    free = await ask(engine, "free", ids, max_new_tokens=20)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    answer = await ask(engine, "r", ids, max_new_tokens=20, stop_token_ids=(stop,))
    assert answer.token_ids == free.token_ids[: first + 1]
    assert answer.finish_reason == "stop"


async def test_a_response_is_cut_to_the_context(engine: EmbeddedEngine) -> None:
    answer = await ask(engine, "r", [5] * 250, max_new_tokens=100)
    assert len(answer.token_ids) == 6
    assert answer.finish_reason == "length"


async def test_more_turns_than_run_at_once(transfer: Transfer, model: PreTrainedModel) -> None:
    engine = EmbeddedEngine("e0", "solver", policy_spec(max_running=4))
    await engine.start()
    await engine.update_weights(publish(transfer, model, 0), transfer)
    rng = random.Random(5)
    tasks = [asyncio.ensure_future(ask(engine, f"r{i}", prompt(rng))) for i in range(40)]
    loads = [engine.load()]

    def many() -> bool:
        loads.append(engine.load())
        return loads[-1].running + loads[-1].waiting > 30

    await until(many, 0)
    assert loads[-1].outstanding_tokens > 300
    answers = await asyncio.gather(*tasks)
    assert all(len(a.token_ids) == 8 for a in answers)
    load = engine.load()
    assert (load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0)
    assert load.generated_tokens == 320
    assert load.tokens_per_second > 0
    await engine.stop()


async def test_bad_turns_are_refused_with_field_and_remedy(engine: EmbeddedEngine) -> None:
    with pytest.raises(PromptTooLong, match=r"engine.max_context = 256") as info:
        await ask(engine, "r", [1] * 256)
    assert info.value.remedy
    with pytest.raises(BadTurn, match="empty"):
        await ask(engine, "r", [])
    with pytest.raises(BadTurn, match=f"prompt_ids = {VOCABULARY}"):
        await ask(engine, "r", [1, VOCABULARY])
    with pytest.raises(BadTurn, match="max_new_tokens = 0"):
        await ask(engine, "r", [1], max_new_tokens=0)
    first = asyncio.ensure_future(ask(engine, "twice", [1], max_new_tokens=100))
    await asyncio.sleep(0)
    with pytest.raises(BadTurn, match="request_id = twice"):
        await ask(engine, "twice", [1])
    assert len((await first).token_ids) == 100


async def test_a_turn_stays_in_hand_when_another_of_its_id_is_refused(
    engine: EmbeddedEngine,
) -> None:
    first = asyncio.ensure_future(ask(engine, "twice", [1], max_new_tokens=200))
    await until(lambda: engine.load().generated_tokens > 0)
    with pytest.raises(BadTurn, match="request_id = twice"):
        await ask(engine, "twice", [1])
    assert engine.load().running == 1
    await engine.abort("twice")
    assert (await first).finish_reason == "abort"


async def test_an_aborted_turn_returns_its_tokens_so_far(engine: EmbeddedEngine) -> None:
    task = asyncio.ensure_future(ask(engine, "r", [1, 2, 3], max_new_tokens=200))
    await until(lambda: engine.load().generated_tokens > 0)
    await engine.abort("r")
    await engine.abort("unknown")
    answer = await task
    assert answer.finish_reason == "abort"
    assert 1 <= len(answer.token_ids) < 200
    assert len(answer.logprobs) == answer.versions[-1].end == len(answer.token_ids)
    assert len((await ask(engine, "next", [1])).token_ids) == 8


async def test_an_aborted_leader_does_not_hold_up_its_followers(engine: EmbeddedEngine) -> None:
    leader = asyncio.ensure_future(ask(engine, "leader", [1] * 50))
    followers = [asyncio.ensure_future(ask(engine, f"f{i}", [1] * 50)) for i in range(3)]
    await asyncio.sleep(0)
    await engine.abort("leader")
    assert (await leader).finish_reason == "abort"
    assert all(len(a.token_ids) == 8 for a in await asyncio.gather(*followers))


async def test_a_turn_past_its_deadline_is_aborted(engine: EmbeddedEngine) -> None:
    with pytest.raises(TurnDeadline, match=r"limits.turn_seconds = 0.02"):
        await ask(engine, "r", [1], seconds=0.02, max_new_tokens=200)
    assert engine.load().running == 0
    task = asyncio.ensure_future(ask(engine, "c", [1], max_new_tokens=200))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.load().running == 0


async def test_a_dead_engine_fails_its_turns_and_comes_back_stale(
    engine: EmbeddedEngine, model: PreTrainedModel, transfer: Transfer
) -> None:
    tasks = [
        asyncio.ensure_future(ask(engine, f"r{i}", [i + 1] * 20, max_new_tokens=200))
        for i in range(5)
    ]
    await until(lambda: engine.load().running == 5, 0)

    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    assert engine._host.model is not None
    engine._host.model.forward = explode
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineDied)
        assert "out of luck" in str(outcome)
    assert await engine.check() == common_pb.ENGINE_STATE_DEAD
    assert (engine.version, engine.checksum) == (None, "")
    with pytest.raises(EngineDied):
        await ask(engine, "later", [1])
    with pytest.raises(EngineDied):
        await engine.update_weights(publish(transfer, model, 0), transfer)
    await engine.start()
    assert (engine.state, engine.restarts) == (common_pb.ENGINE_STATE_STALE, 1)
    with pytest.raises(EngineStale):
        await ask(engine, "early", [1])
    await engine.update_weights(publish(transfer, model, 0), transfer)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    assert len((await ask(engine, "again", [1])).token_ids) == 8


async def test_turns_wait_for_the_first_weights_only_while_they_come(
    transfer: Transfer, model: PreTrainedModel
) -> None:
    engine = make_engine("e0", "solver", policy_spec())
    assert isinstance(engine, EmbeddedEngine)
    assert engine.state == common_pb.ENGINE_STATE_STARTING
    await engine.start()
    await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    with pytest.raises(EngineStale):
        await ask(engine, "r", [1])
    update = asyncio.ensure_future(engine.update_weights(publish(transfer, model, 3), transfer))
    await until(lambda: engine.state != common_pb.ENGINE_STATE_STALE, 0)
    assert (await ask(engine, "r", [1])).versions[0].version == 3
    await update
    await engine.stop()
    await engine.stop()
    assert engine.state == common_pb.ENGINE_STATE_STOPPED
    with pytest.raises(EngineDied):
        await ask(engine, "r", [1])


async def test_an_idle_engine_that_would_not_generate_is_found(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.engines.embedded.engine.PROBE_AFTER_SECONDS", 0.0)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    # The thread counts when the step is over.
    await until(lambda: engine.load().generated_tokens)
    assert engine.load().generated_tokens == 1  # a real one
    assert engine.load().running == 0
    monkeypatch.setattr("services.rollout.engines.embedded.engine.PROBE_SECONDS", 0.05)
    assert engine._host.batcher is not None
    monkeypatch.setattr(engine._host.batcher, "submit", lambda *_: None)  # as a stuck thread does
    assert await engine.check() == common_pb.ENGINE_STATE_SUSPECT
    assert "no token for" in engine.message
    monkeypatch.undo()
    monkeypatch.setattr("services.rollout.engines.embedded.engine.PROBE_AFTER_SECONDS", 0.0)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    monkeypatch.setattr("services.rollout.engines.embedded.engine.PROBE_SECONDS", 0.05)
    monkeypatch.setattr(engine._host.batcher, "submit", lambda *_: None)
    states = [await engine.check() for _ in range(3)]
    assert states[-1] == common_pb.ENGINE_STATE_DEAD


async def test_a_conversation_reads_only_what_is_new(engine: EmbeddedEngine) -> None:
    ids = prompt(random.Random(11), 60, 61)
    for turn in range(4):
        answer = await ask(engine, f"t{turn}", ids, max_new_tokens=16)
        # All of the conversation but about the last page is cached already.
        assert answer.cached_tokens >= (len(ids) - 40 if turn else 0)
        ids = ids + answer.token_ids + prompt(random.Random(turn), 8, 9)


async def test_a_stop_token_that_never_comes_ends_at_the_bound(engine: EmbeddedEngine) -> None:
    free = await ask(engine, "free", [1], max_new_tokens=30)
    never = next(token for token in range(VOCABULARY) if token not in free.token_ids)
    answer = await ask(engine, "r", [1], max_new_tokens=30, stop_token_ids=(never,))
    assert (answer.token_ids, answer.finish_reason) == (free.token_ids, "length")
    # Nor does it hold the engine beyond the context's end.
    whole = await ask(engine, "w", [1] * 200, max_new_tokens=10_000, stop_token_ids=(never,))
    assert len(whole.token_ids) == 56 or whole.finish_reason == "stop"


def test_a_batcher_that_was_stopped_before_it_started_serves_nothing(
    model: PreTrainedModel,
) -> None:
    died: list[str] = []
    batcher = SlotBatcher(model, max_running=2, max_context=64, exited=died.append)
    batcher.stop(0.0)
    batcher.start()
    batcher._thread.join(PATIENCE)
    assert not batcher._thread.is_alive()
    assert not batcher.alive
    assert not died
