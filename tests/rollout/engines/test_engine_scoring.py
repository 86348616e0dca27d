"""Scoring: what engines say of given continuations, against plain forward passes."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time

import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded import engine as embedded
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import (
    BadTurn,
    EngineStale,
    NonFiniteLogits,
    ScoreDeadline,
    ScoreRefused,
)
from services.rollout.engines.requests import ScoreRequest
from testbed.simulated_engine import SimulatedEngine
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    VOCABULARY,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
)
from tests.support.waiting import PATIENCE
from troupe.transfer import Transfer


def questions(count: int, seed: int = 0) -> list[ScoreRequest]:
    """Prompts of all lengths, some of them asked about twice, with continuations of 1 to 6."""
    rng = random.Random(seed)
    asked = []
    for _ in range(count):
        ids = tuple(prompt(rng, 1, 40))
        asked += [ScoreRequest(ids, tuple(prompt(rng, 1, 6))) for _ in range(rng.randint(1, 3))]
    return asked


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_scores_are_those_of_a_plain_forward_pass(
    engine: EmbeddedEngine, model: PreTrainedModel, temperature: float
) -> None:
    asked = questions(12)
    turns = [
        asyncio.ensure_future(ask(engine, f"t{n}", [n, 1], max_new_tokens=60)) for n in range(4)
    ]
    scored = await engine.score(asked, temperature, deadline_seconds=PATIENCE)
    assert (scored.version, scored.checksum) == (0, engine.checksum)
    for one, got in zip(asked, scored.logprobs, strict=True):
        expected = reference_logprobs(model, list(one.prompt_ids), list(one.ids), temperature)
        assert got == pytest.approx(expected, abs=1e-5)
    # Concurrent turns continue with their own attention.
    for number, turn in enumerate(await asyncio.gather(*turns)):
        expected = reference_logprobs(model, [number, 1], turn.token_ids)
        assert turn.logprobs == pytest.approx(expected, abs=2e-4)


async def test_scores_sum_to_one_and_agree_with_what_is_drawn(engine: EmbeddedEngine) -> None:
    asked = [ScoreRequest((3, 4), (token,)) for token in range(VOCABULARY)]
    scored = await engine.score(asked, 1.0, deadline_seconds=PATIENCE)
    assert sum(math.exp(row[0]) for row in scored.logprobs) == pytest.approx(1.0)
    drawn = await ask(engine, "r", [3, 4], max_new_tokens=1)
    assert drawn.logprobs[0] == pytest.approx(scored.logprobs[drawn.token_ids[0]][0], abs=2e-4)


async def test_one_version_scores_all(
    engine: EmbeddedEngine, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PASS_TOKENS", 8)  # many passes, and updates between them
    models = [make_model(seed) for seed in range(4)]
    asked = questions(10)
    scoring = asyncio.ensure_future(engine.score(asked, 1.0, deadline_seconds=PATIENCE))
    for version in (1, 2, 3):
        await engine.update_weights(publish(transfer, models[version], version), transfer)
    scored = await scoring
    for one, got in zip(asked, scored.logprobs, strict=True):
        expected = reference_logprobs(
            models[scored.version], list(one.prompt_ids), list(one.ids), 1.0
        )
        assert got == pytest.approx(expected, abs=1e-5)


async def test_stops_of_an_engine_are_serialized(
    engine: EmbeddedEngine,
) -> None:
    """A call that nobody waits for any more goes on, and the next one finds the model as it was."""
    batcher = engine._host.batcher
    assert batcher is not None
    inside, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1

    others = [asyncio.to_thread(batcher.run_between_passes, call) for _ in range(4)]
    await asyncio.gather(*others, asyncio.to_thread(batcher.swap, call))
    assert most == 1


async def test_turns_go_on_however_many_stop_an_engine(engine: EmbeddedEngine) -> None:
    batcher = engine._host.batcher
    assert batcher is not None
    turn = asyncio.ensure_future(ask(engine, "t", [1, 2], max_new_tokens=200))
    async with asyncio.timeout(PATIENCE):
        while not batcher._passes:  # noqa: ASYNC110 - another thread's work
            await asyncio.sleep(0.001)
    began = batcher._passes

    def stop() -> None:
        for _ in range(10):
            batcher.run_between_passes(lambda: time.sleep(0.002))

    await asyncio.gather(*(asyncio.to_thread(stop) for _ in range(3)))
    assert batcher._passes - began >= 29
    assert len((await turn).token_ids) == 200


async def test_prompts_that_cannot_be_scored_are_refused(engine: EmbeddedEngine) -> None:
    async def score(*asked: ScoreRequest) -> None:
        await engine.score(asked, 1.0, deadline_seconds=PATIENCE)

    with pytest.raises(BadTurn, match="nothing is asked"):
        await score()
    with pytest.raises(BadTurn, match="without tokens"):
        await score(ScoreRequest((1,), ()))
    with pytest.raises(BadTurn, match=f"prompts = {VOCABULARY}"):
        await score(ScoreRequest((1,), (VOCABULARY,)))
    with pytest.raises(BadTurn, match="257 tokens"):
        await score(ScoreRequest((1,) * 250, (1,) * 7))
    with pytest.raises(ScoreDeadline, match="1 continuations") as info:
        await engine.score([ScoreRequest((1,), (2,))], 1.0, deadline_seconds=0.0)
    assert info.value.remedy
    await score(ScoreRequest((1,) * 250, (1,) * 6))


async def test_scoring_with_weights_that_are_not_finite_is_refused(
    engine: EmbeddedEngine, model: PreTrainedModel, transfer: Transfer
) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    await engine.update_weights(publish(transfer, model, 1), transfer)
    with pytest.raises(NonFiniteLogits, match="version 1"):
        await engine.score([ScoreRequest((1,), (2,))], 1.0, deadline_seconds=PATIENCE)


async def test_an_engine_without_weights_or_without_a_model_scores_nothing(
    transfer: Transfer, model: PreTrainedModel
) -> None:
    asked = [ScoreRequest((1,), (2,))]
    stale = EmbeddedEngine("e0", "solver", policy_spec())
    await stale.start()
    with pytest.raises(EngineStale):
        await stale.score(asked, 1.0, deadline_seconds=PATIENCE)
    await stale.stop()
    simulated = SimulatedEngine("e1", "solver", policy_spec())
    await simulated.start()
    await simulated.update_weights(publish(transfer, model, 0), transfer)
    with pytest.raises(ScoreRefused, match=r"engine.kind = simulated"):
        await simulated.score(asked, 1.0, deadline_seconds=PATIENCE)
    await simulated.stop()
