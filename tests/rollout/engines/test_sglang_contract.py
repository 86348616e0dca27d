"""What Troupe relies on in SGLang: the same checks against the test double and a real server.

The real one is launched when the environment names it (see `real_server.py`); those are marked
slow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.rollout.engines.errors import BadTurn, Refused, ScoreRefused
from services.rollout.engines.requests import EngineResponse, ScoreRequest
from services.rollout.engines.servers.loaders import UpdateSetting
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.server import SglangServer
from tests.rollout.engines.models import (
    CONFIG,
    VOCABULARY,
    make_model,
    policy_spec,
    publish,
    reference_logprobs,
    transfer_in,
)
from tests.rollout.engines.real_server import RealServer, running
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE
from troupe.checkpoints.merging import merge_in_place
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

PROMPT = [5, 6]


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.slow)])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    if request.param == "real":
        server: RealServer = request.getfixturevalue("real_sglang")
        yield server.url
        return
    async with serve(FakeSglang(CONFIG)) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[SglangServer]:
    client = SglangServer(url)
    await client.describe()
    yield client
    await client.resume()
    await client.close()


async def attached(url: str, update: UpdateSetting = "disk") -> SglangEngine:
    spec = policy_spec(kind="sglang", urls=[url], start_timeout_seconds=60, update=update)
    engine = SglangEngine("e0", "solver", spec)
    await engine.start()
    assert engine.state == common_pb.ENGINE_STATE_STALE
    return engine


async def ask(
    engine: SglangEngine, name: str, ids: list[int], **sampling: object
) -> EngineResponse:
    params = Sampling(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
    return await engine.generate(name, ids, params, deadline_seconds=60)


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int = 8) -> list[int]:
    """The most likely tokens after `prompt`, by plain forward passes."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def fresh_greedy(model: PreTrainedModel, directory: Path) -> tuple[list[int], list[float]]:
    """Return tokens and log-probs of a server that has held no other weights."""
    place = directory / "fresh"
    model.save_pretrained(place / "model")
    return await served_greedy(place)


async def served_greedy(place: Path) -> tuple[list[int], list[float]]:
    """Return tokens and log-probs of a server that was started with the model in `place`."""
    with running(place, load_format="auto") as server:
        client = SglangServer(server.url)
        meta = await client.request("f", PROMPT, {"max_new_tokens": 8, "temperature": 0.0})
        await client.close()
    rows = meta["output_token_logprobs"]
    return [row[1] for row in rows], [row[0] for row in rows]


async def test_features_of_the_server_are_read_from_its_document(client: SglangServer) -> None:
    described = await client.describe()
    assert described.ways == {"directory", "tensors", "ipc", "broadcast"}
    assert described.pauses
    assert described.keeps_cache
    assert described.names_versions
    assert described.takes_adapters
    assert described.vocabulary == VOCABULARY
    assert described.model_type == "qwen3"
    assert described.ranks == 1
    features = client._features
    assert features is not None
    assert features.retract
    assert features.sessions
    assert features.memory
    assert features.loads == "/v1/loads"
    load = await client.load()
    assert (load.running, load.waiting, load.uncached_tokens) == (0, 0, 0)
    assert await client.tokenize("a") is None  # it runs without a tokenizer
    assert await client.probe()
    assert await client.alive()
    assert await client.healthy()
    digest = await client.weights_digest(0)
    assert digest is None or len(digest) > 8


async def test_raw_generation(client: SglangServer) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0.0}
    meta = await client.request("raw", [1, 2, 3], sampling, logprobs_from=0)
    assert meta["finish_reason"]["type"] == "length"
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 5
    assert [row[1] for row in meta["input_token_logprobs"]] == [1, 2, 3]
    assert meta["weight_versions"][-1]["end"] == 5
    stop = meta["output_token_logprobs"][2][1]
    first = [row[1] for row in meta["output_token_logprobs"]].index(stop)
    stopped = await client.request("raw2", [1, 2, 3], {**sampling, "stop_token_ids": [stop]})
    assert stopped["finish_reason"]["type"] == "stop"
    assert len(stopped["output_token_logprobs"]) == first + 1  # the stop token included


async def test_refusals(client: SglangServer) -> None:
    sampling = {"max_new_tokens": 150, "temperature": 1.0}
    with pytest.raises(Refused, match="longer than the model's context") as info:
        await client.request("long", [1] * 300, sampling)
    assert info.value.status == 400
    both = await asyncio.gather(
        client.request("twice", [1], sampling),
        client.request("twice", [2], sampling),
        return_exceptions=True,
    )
    assert [isinstance(outcome, Refused) for outcome in both].count(True) == 1
    with pytest.raises(Refused, match="between begin_weight_update"):
        await client.load_tensors([("w", torch.zeros(1))], "9", shared=False)
    with pytest.raises(Refused, match="Failed to"):
        await client.load_directory("/nonexistent/directory", "9", 0, flush=False)
    await client.begin_update()
    with pytest.raises(Refused, match="already open"):
        await client.begin_update()
    await client.end_update()


async def test_a_paused_server_keeps_its_turns(client: SglangServer) -> None:
    sampling = {"max_new_tokens": 200, "temperature": 1.0}
    running = asyncio.ensure_future(client.request("running", [1], sampling))
    await asyncio.sleep(0.1)
    await client.pause("requeue")
    late = asyncio.ensure_future(client.request("late", [2], sampling))
    await asyncio.sleep(0.3)
    assert not late.done()
    await client.flush_cache()
    await client.set_version("7")
    await client.resume()
    metas = await asyncio.wait_for(asyncio.gather(running, late), PATIENCE)
    assert all(len(meta["output_token_logprobs"]) == 200 for meta in metas)
    assert metas[1]["weight_versions"] == [{"version": "7", "start": 0, "end": 200}]


async def test_an_abort_hands_over_the_tokens_so_far(client: SglangServer) -> None:
    sampling = {"max_new_tokens": 240, "temperature": 1.0}
    task = asyncio.ensure_future(client.request("gone", [1], sampling))
    while not task.done():  # the first may come before the server has heard of the turn
        await asyncio.sleep(0.05)
        await client.abort("gone")
    meta = await task
    assert meta["finish_reason"]["type"] == "abort"
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 240
    await client.abort("unknown")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
async def test_logprobs_are_those_of_a_plain_forward_pass(
    url: str, temperature: float, tmp_path: Path
) -> None:
    engine, transfer = await attached(url), transfer_in(tmp_path)
    model = make_model(3)
    exposed = await engine.update_weights(publish(transfer, model, 3), transfer)
    assert exposed > 0
    assert (engine.state, engine.version) == (common_pb.ENGINE_STATE_HEALTHY, 3)
    prompts = [[(7 * i + k) % VOCABULARY for k in range(5 + i)] for i in range(12)]
    answers = await asyncio.gather(
        *(
            ask(engine, f"t{temperature}-{i}", p, temperature=temperature)
            for i, p in enumerate(prompts)
        )
    )
    for p, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 8
        assert [(s.version, s.start, s.end) for s in answer.versions] == [(3, 0, 8)]
        expected = reference_logprobs(model, p, answer.token_ids, temperature or 1.0)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY
    await engine.stop()


async def test_scores_are_those_of_a_plain_forward_pass(url: str, tmp_path: Path) -> None:
    engine, transfer = await attached(url), transfer_in(tmp_path)
    models = [make_model(seed) for seed in (4, 5)]
    rng = random.Random(2)
    asked = [
        ScoreRequest(
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 7, 40)))),
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))),
        )
        for _ in range(6)
    ]
    asked += [ScoreRequest(asked[2].prompt_ids, (token,)) for token in range(5)]
    asked.append(ScoreRequest((1,) * 230, (2,) * 10))
    for version, model in enumerate(models, 4):
        await engine.update_weights(publish(transfer, model, version), transfer)
        scored = await engine.score(asked, 1.0, deadline_seconds=60)
        assert (scored.version, scored.checksum) == (version, engine.checksum)
        for one, got in zip(asked, scored.logprobs, strict=True):
            expected = reference_logprobs(model, list(one.prompt_ids), list(one.ids))
            assert got == pytest.approx(expected, abs=2e-4)
    # While weights change it is asked again, of the new ones.
    scoring = asyncio.ensure_future(engine.score(asked * 2, 1.0, deadline_seconds=60))
    await asyncio.sleep(0.02)
    await engine.update_weights(publish(transfer, models[0], 6), transfer)
    scored = await scoring
    model = models[0] if scored.version == 6 else models[1]
    for one, got in zip(asked * 2, scored.logprobs, strict=True):
        expected = reference_logprobs(model, list(one.prompt_ids), list(one.ids))
        assert got == pytest.approx(expected, abs=2e-4)
    with pytest.raises(ScoreRefused, match=r"temperature = 0\.5"):
        await engine.score(asked, 0.5, deadline_seconds=60)
    with pytest.raises(BadTurn):
        await engine.score([ScoreRequest((1,) * 300, (2,))], 1.0, deadline_seconds=60)
    await engine.stop()


@pytest.mark.parametrize("updates", ["disk", "tensor"])
async def test_updates_under_load_lose_no_turn_and_no_version(
    url: str, updates: UpdateSetting, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    real = "real" in request.node.name
    # One core runs the double, its clients and their checks.
    rounds, crowd, longest = (50, 8, 120) if real else (3, 4, 60)
    models = [make_model(seed) for seed in range(3)]
    greedy_of = [greedy_tokens(model, PROMPT) for model in models]
    assert len({tuple(tokens) for tokens in greedy_of}) == 3
    engine, transfer = await attached(url, updates), transfer_in(tmp_path)
    await engine.update_weights(publish(transfer, models[0], 0), transfer)
    rng = random.Random(1)
    answers: list[tuple[list[int], EngineResponse]] = []
    ended = asyncio.Event()

    async def player(n: int) -> None:
        turn = 0
        while not ended.is_set():
            ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 30))]
            length = rng.randint(1, longest)
            answers.append((ids, await ask(engine, f"p{n}-{turn}", ids, max_new_tokens=length)))
            assert len(answers[-1][1].token_ids) <= length
            turn += 1

    players = [asyncio.ensure_future(player(n)) for n in range(crowd)]
    exposed = []
    for version in range(1, rounds + 1):
        await asyncio.sleep(0.2)
        ref = publish(transfer, models[version % 3], version)
        exposed.append(await engine.update_weights(ref, transfer))
        assert engine.version == version
        greedy = await ask(engine, f"g{version}", PROMPT, temperature=0.0)
        assert [span.version for span in greedy.versions] == [version]
        assert greedy.token_ids == greedy_of[version % 3]
        expected = reference_logprobs(models[version % 3], PROMPT, greedy.token_ids)
        assert greedy.logprobs == pytest.approx(expected, abs=2e-4)
    ended.set()
    await asyncio.gather(*players)
    mixed = 0
    for ids, answer in answers:
        assert answer.finish_reason == "length"
        assert answer.versions[-1].end == len(answer.token_ids) == len(answer.logprobs)
        mixed += len(answer.versions) > 1
        for span in answer.versions:
            expected = reference_logprobs(models[span.version % 3], ids, answer.token_ids)
            got = answer.logprobs[span.start : span.end]
            assert got == pytest.approx(expected[span.start : span.end], abs=5e-4)
    assert len(answers) > rounds
    assert mixed > 0
    if real:
        fresh = await fresh_greedy(models[rounds % 3], tmp_path)
        assert (greedy.token_ids, greedy.logprobs) == (fresh[0], pytest.approx(fresh[1], abs=2e-4))
    print(
        f"{updates}: {rounds} updates, {len(answers)} turns, {mixed} across an update, "
        f"exposed {1000 * sum(exposed) / rounds:.0f} ms mean, {1000 * max(exposed):.0f} ms worst"
    )
    await engine.stop()


async def test_a_server_returns_an_aborted_turn_s_tokens_so_far(url: str, tmp_path: Path) -> None:
    engine, transfer = await attached(url), transfer_in(tmp_path)
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    task = asyncio.ensure_future(ask(engine, "r", [1], max_new_tokens=240))
    while not task.done():  # the first may come before the server has heard of the turn
        await asyncio.sleep(0.05)
        await engine.abort("r")
    answer = await task
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) == len(answer.logprobs) < 240
    assert engine.load().running == 0
    await engine.stop()


@pytest.mark.slow
async def test_a_merged_adapter_is_a_model_that_it_serves(tmp_path: Path) -> None:
    """The files that `troupe export --merged` writes."""
    base, place = tmp_path / "base", tmp_path / "served"
    make_model(0).save_pretrained(base)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(
            r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        ),
    )
    adapted.save_pretrained(place / "model")
    merge_in_place(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    tokens, logprobs = await served_greedy(place)
    assert tokens == greedy_tokens(model, PROMPT)
    assert tokens != greedy_tokens(make_model(0), PROMPT), "the adapter says other things"
    assert logprobs == pytest.approx(reference_logprobs(model, PROMPT, tokens), abs=1e-3)
