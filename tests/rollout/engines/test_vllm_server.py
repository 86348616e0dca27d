"""What Troupe relies on in vLLM alone (what it relies on in every server:
`test_server_contract.py`), with a real server on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.rollout.engines.errors import BadTurn, UpdateFailed
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.vllm.engine import VllmEngine
from tests.rollout.engines.models import policy_spec, publish, transfer_in
from tests.rollout.engines.real_vllm import PACKED, START_SECONDS, TINY, interpreter, make_model
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

pytestmark = pytest.mark.slow


@asynccontextmanager
async def launched(place: Path, site: str = "") -> AsyncIterator[VllmEngine]:
    spec = policy_spec(
        config=TINY,
        kind="vllm",
        python=interpreter(place, site),
        max_running=8,
        start_timeout_seconds=START_SECONDS,
    )
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


async def test_a_launched_server_describes_itself_draws_by_seeds_and_refuses_truncations(
    engine: VllmEngine, tmp_path: Path
) -> None:
    transfer = transfer_in(tmp_path)
    described = engine._server.described
    assert described.ways == {"directory"}
    assert described.names_versions
    assert described.keeps_cache
    assert (described.context, described.device, described.ranks) == (256, "cpu", 1)

    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    assert engine.state == common_pb.ENGINE_STATE_HEALTHY

    # A seed decides.
    same = [await ask(engine, f"seed{n}", [3, 4], seed=11, max_new_tokens=20) for n in range(2)]
    assert same[0].token_ids == same[1].token_ids

    # What it would report otherwise than training expects, or die of, is refused.
    with pytest.raises(BadTurn, match="top_p"):
        await ask(engine, "cut", [3], top_p=0.5)
    assert await engine.check() == common_pb.ENGINE_STATE_HEALTHY


async def test_a_server_that_keeps_the_old_weights_in_silence_never_serves(tmp_path: Path) -> None:
    """vLLM's own CPU build packs linear layers: it reports each reload as done, and the version."""
    transfer = transfer_in(tmp_path)
    async with launched(tmp_path, PACKED) as engine:
        with pytest.raises(UpdateFailed, match=r"log-probs differ|does not take"):
            await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
        assert await engine._server.api.version() == "1"
        assert engine.state == common_pb.ENGINE_STATE_STALE
