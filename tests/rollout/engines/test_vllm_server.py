"""What Troupe relies on in vLLM, with a real server on this machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.engines.errors import BadTurn, UpdateFailed
from services.rollout.engines.requests import EngineResponse, ScoreRequest
from services.rollout.engines.vllm.engine import VllmEngine
from tests.rollout.engines.models import (
    VOCABULARY,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.rollout.engines.real_vllm import PACKED, START_SECONDS, TINY, interpreter, make_model
from tests.rollout.engines.trained_adapters import TrainedAdapter
from tests.support.waiting import until
from troupe.job import LoraSpec
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

pytestmark = pytest.mark.slow


@asynccontextmanager
async def launched(
    place: Path, site: str = "", lora: LoraSpec | None = None
) -> AsyncIterator[VllmEngine]:
    spec = policy_spec(
        config=TINY,
        kind="vllm",
        python=interpreter(place, site),
        max_running=8,
        start_timeout_seconds=START_SECONDS,
    ).model_copy(update={"lora": lora})
    engine = VllmEngine("e0", "solver", spec)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[VllmEngine]:
    async with launched(tmp_path) as engine:
        yield engine


async def ask(engine: VllmEngine, name: str, ids: list[int], **sampling: object) -> EngineResponse:
    params = Sampling(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
    return await engine.generate(name, ids, params, deadline_seconds=120)


async def test_a_launched_server_serves_what_was_published_and_proves_it(
    engine: VllmEngine, tmp_path: Path
) -> None:
    transfer = transfer_in(tmp_path)
    models = [make_model(seed) for seed in range(3)]
    described = engine._server.described
    assert described.ways == {"directory"}
    assert described.names_versions
    assert described.keeps_cache
    assert (described.context, described.device, described.ranks) == (256, "cpu", 1)

    # Log-probs and scores equal a plain forward pass, at any temperature.
    await engine.update_weights(publish(transfer, models[0], 0), transfer)
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY
    prompts = [[(7 * i + k) % VOCABULARY for k in range(5 + i)] for i in range(6)]
    for temperature in (1.0, 0.5, 0.0):
        for i, prompt in enumerate(prompts):
            answer = await ask(engine, f"{temperature}-{i}", prompt, temperature=temperature)
            assert [(s.version, s.start, s.end) for s in answer.versions] == [(0, 0, 8)]
            wanted = reference_logprobs(models[0], prompt, answer.token_ids, temperature or 1.0)
            assert answer.logprobs == pytest.approx(wanted, abs=2e-4)
    asked = [ScoreRequest((5, 6, 7), (8, 9)), ScoreRequest((1,), (2,))]
    scored = await engine.score(asked, 1.0, deadline_seconds=120)
    for one, got in zip(asked, scored.logprobs, strict=True):
        wanted = reference_logprobs(models[0], list(one.prompt_ids), list(one.ids))
        assert got == pytest.approx(wanted, abs=2e-4)

    # A seed decides; a stop id ends a turn and belongs to it.
    same = [await ask(engine, f"seed{n}", [3, 4], seed=11, max_new_tokens=20) for n in range(2)]
    assert same[0].token_ids == same[1].token_ids
    stop = same[0].token_ids[4]
    stopped = await ask(engine, "stop", [3, 4], seed=11, max_new_tokens=20, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == same[0].token_ids[: same[0].token_ids.index(stop) + 1]

    # What it would report otherwise than training expects, or die of, is refused.
    with pytest.raises(BadTurn, match="top_p"):
        await ask(engine, "cut", [3], top_p=0.5)
    with pytest.raises(BadTurn, match="vocabulary"):
        await ask(engine, "outside", [VOCABULARY])
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY

    # Updates under load: no turn is lost, each token has the log-prob of the version it names.
    rng, answers, ended = random.Random(1), [], asyncio.Event()

    async def player(number: int) -> None:
        turn = 0
        while not ended.is_set():
            ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 30))]
            answer = await ask(engine, f"p{number}-{turn}", ids, max_new_tokens=200)
            answers.append((ids, answer))
            turn += 1

    players = [asyncio.ensure_future(player(number)) for number in range(4)]
    for version in range(1, 11):
        await asyncio.sleep(0.3)
        await engine.update_weights(publish(transfer, models[version % 3], version), transfer)
        assert engine.version == version
    ended.set()
    await asyncio.gather(*players)
    for ids, answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == 200
        for span in answer.versions:
            wanted = reference_logprobs(models[span.version % 3], ids, answer.token_ids)
            got = answer.logprobs[span.start : span.end]
            assert got == pytest.approx(wanted[span.start : span.end], abs=5e-4)
    assert any(len(answer.versions) > 1 for _, answer in answers)

    # An aborted turn returns what there is.
    task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=240))
    while not task.done():  # the first may come before the server has heard of the turn
        await asyncio.sleep(0.02)
        await engine.abort("r")
    assert len((await task).token_ids) <= 240
    assert engine.load().running == 0


async def test_adapters_are_served_over_one_base_each_turn_by_its_own(tmp_path: Path) -> None:
    transfer, trained = transfer_in(tmp_path), TrainedAdapter(1, base=make_model(0))
    async with launched(tmp_path, lora=LoraSpec(rank=4, alpha=8)) as engine:
        await engine.update_weights(trained.publish(transfer, 0), transfer)
        running = asyncio.ensure_future(ask(engine, "long", [5, 6], max_new_tokens=200, seed=1))
        await until(lambda: engine.load().running > 0)
        trained.step(2)
        # Nothing is paused for an adapter.
        assert await engine.update_weights(trained.publish(transfer, 1), transfer) == 0.0
        young = await ask(engine, "young", [5, 6], seed=1)
        assert [span.version for span in young.versions] == [1]
        assert young.logprobs == pytest.approx(trained.logprobs([5, 6], young.token_ids), abs=2e-4)
        old = await running
        trained.step(old.versions[0].version + 1)
        assert len(old.versions) == 1
        assert old.logprobs == pytest.approx(trained.logprobs([5, 6], old.token_ids), abs=2e-4)
        assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY


async def test_a_server_that_keeps_the_old_weights_in_silence_never_serves(tmp_path: Path) -> None:
    """vLLM's own CPU build packs linear layers: it reports each reload as done, and the version."""
    transfer = transfer_in(tmp_path)
    async with launched(tmp_path, PACKED) as engine:
        with pytest.raises(UpdateFailed, match=r"log-probs differ|does not take"):
            await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
        assert await engine._server.api.version() == "1"
        assert engine.state == common_pb.ENGINE_STATE_STALE
