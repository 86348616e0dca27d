"""What Troupe relies on in SGLang alone (what it relies on in every server:
`test_server_contract.py`): the same checks against the test double and a real server.

The real one is launched when the environment names it (see `real_server.py`); those are marked
slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from services.rollout.engines.errors import Refused
from services.rollout.engines.sglang.server import SglangServer
from tests.rollout.engines.models import (
    CONFIG,
    VOCABULARY,
    greedy_tokens,
    make_model,
    reference_logprobs,
)
from tests.rollout.engines.real_server import RealServer, running
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import PATIENCE
from troupe.checkpoints.merging import merge_in_place

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
