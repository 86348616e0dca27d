"""Which experts tokens were sent to: engines of mixtures say it with each turn, or refuse to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.factory import make_engine
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.server import ROUTED_EXPERTS
from services.rollout.serving.router import Continuation
from tests.rollout.engines.models import policy_spec, publish_tensors, transfer_in
from tests.rollout.engines.real_server import running
from tests.support.architectures import ARCHITECTURES, MIXTURE, make
from tests.support.fake_sglang import FakeSglang, serve
from troupe.checkpoints.adapters import distinct_tensors
from troupe.checkpoints.format import CheckpointFormat
from troupe.mixtures import Indices, RecordedRoutes, Routers, shape_in
from troupe.rpc.errors import FailedPrecondition
from troupe.workflow.backend import GeneratedTurn, Sampling

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def routes_of(model: Any, ids: list[int]) -> Indices:
    """Return the routes of `ids` in one plain forward pass."""
    routers = Routers.of(model)
    assert routers is not None
    assert routers.shape == shape_in(model.config)
    recorded = RecordedRoutes(routers.shape, {})
    with torch.no_grad(), routers.passing(recorded):
        model(torch.tensor([ids]), use_cache=False)
    return recorded.compact()


async def load(engine: Any, model: Any, version: int, directory: Path) -> None:
    transfer = transfer_in(directory)
    tensors = CheckpointFormat(model, torch.float32).of(distinct_tensors(model))
    await engine.update_weights(publish_tensors(transfer, tensors, version), transfer)


async def assert_says(engine: Any, name: str, prompt: list[int], model: Any, tokens: int) -> None:
    sampling = Sampling(max_new_tokens=tokens, temperature=0.0)
    turn = await engine.generate(name, prompt, sampling, deadline_seconds=60)
    ids = [*prompt, *turn.token_ids]
    assert turn.routed_experts.shape == (len(ids) - 1, 2, model.config.num_experts_per_tok)
    assert turn.routed_experts.dtype == np.uint8
    # Near ties may fall otherwise where sums are made in another order.
    assert (turn.routed_experts == routes_of(model, ids[:-1])).mean() > 0.97


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
async def test_an_embedded_engine_reports_routed_experts(name: str, tmp_path: Path) -> None:
    """For a prompt that it reads, for one with a cached prefix, and with newer weights."""
    spec = policy_spec(config=ARCHITECTURES[name])
    engine = EmbeddedEngine("e0", "solver", spec, routed_experts=True)
    await engine.start()
    for version in (0, 1):
        model = make(name, version)
        await load(engine, model, version, tmp_path)
        await assert_says(engine, f"a{version}", PROMPT, model, 12)
        await assert_says(engine, f"b{version}", [*PROMPT, 14, 15, 16, 17], model, 7)
        await assert_says(engine, f"c{version}", PROMPT, model, 5)
    await engine.stop()


async def test_routes_are_returned_only_when_requested(tmp_path: Path) -> None:
    engine = EmbeddedEngine("e0", "solver", policy_spec(config=MIXTURE))
    await engine.start()
    await load(engine, make("qwen3_moe"), 0, tmp_path)
    turn = await engine.generate("a", PROMPT, Sampling(max_new_tokens=3), deadline_seconds=60)
    assert turn.routed_experts is None
    await engine.stop()


@pytest.fixture(params=["double", pytest.param("real", marks=[pytest.mark.slow])])
async def url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    if request.param == "real":
        directory = tmp_path_factory.mktemp("routed")
        with running(directory, model=make("qwen3_moe"), launch=[ROUTED_EXPERTS]) as server:
            yield server.url
        return
    fake = FakeSglang(MIXTURE)
    fake.info["enable_return_routed_experts"] = True
    async with serve(fake) as address:
        yield address


async def test_a_server_says_it(url: str, tmp_path: Path) -> None:
    spec = policy_spec(config=MIXTURE, kind="sglang", urls=[url], start_timeout_seconds=60)
    engine = SglangEngine("e0", "solver", spec, routed_experts=True)
    await engine.start()
    model = make("qwen3_moe", 3)
    await load(engine, model, 0, tmp_path)
    await assert_says(engine, "a", PROMPT, model, 12)
    await assert_says(engine, "b", [*PROMPT, 14, 15, 16, 17], model, 7)
    await engine.stop()


async def test_a_server_that_was_not_started_for_it_is_refused() -> None:
    async with serve(FakeSglang(MIXTURE)) as url:
        spec = policy_spec(config=MIXTURE, kind="sglang", urls=[url])
        engine = SglangEngine("e0", "solver", spec, routed_experts=True)
        with pytest.raises(EngineStartFailed, match="not started to return") as refused:
            await engine.start()
    assert refused.value.field == "algorithm.router_replay"
    assert ROUTED_EXPERTS in (refused.value.remedy or "")


def test_a_kind_of_engine_that_cannot_say_it_is_refused() -> None:
    spec = policy_spec(config=MIXTURE).model_copy(update={"simulated": {}})
    with pytest.raises(FailedPrecondition, match="'simulated' do not say") as refused:
        make_engine("e0", "solver", spec, routed_experts=True)
    assert (refused.value.kind, refused.value.field) == (
        "no_routed_experts",
        "algorithm.router_replay",
    )


async def test_a_mixture_that_the_embedded_engine_cannot_say_it_of_is_refused() -> None:
    engine = EmbeddedEngine(
        "e0", "solver", policy_spec(config=ARCHITECTURES["phimoe"]), routed_experts=True
    )
    with pytest.raises(EngineStartFailed, match="by top-k") as refused:
        await engine.start()
    assert refused.value.field == "algorithm.router_replay"
    assert "kind: sglang" in (refused.value.remedy or "")


async def test_a_dense_model_reports_no_routed_experts(tmp_path: Path) -> None:
    engine = EmbeddedEngine(
        "e0", "solver", policy_spec(config=ARCHITECTURES["qwen3"]), routed_experts=True
    )
    await engine.start()
    await load(engine, make("qwen3"), 0, tmp_path)
    turn = await engine.generate("a", PROMPT, Sampling(max_new_tokens=3), deadline_seconds=60)
    assert turn.routed_experts is None
    await engine.stop()


def test_a_turn_that_a_second_engine_ends_has_its_routes() -> None:
    """It has read the tokens of the first."""
    turn = Continuation([1, 2], Sampling(max_new_tokens=4), resume=True)
    turn.keep(GeneratedTurn([3], [-1.0], [], "abort"))
    routes = np.zeros((4, 2, 2), np.uint8)
    whole = turn.whole(GeneratedTurn([4, 5], [-1.0, -1.0], [], "stop", routed_experts=routes), 0.0)
    assert whole.routed_experts is routes
    assert len(whole.token_ids) + 2 - 1 == len(routes)
