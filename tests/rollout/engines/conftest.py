"""Settings of all engine tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded import cache as slot_cache
from services.rollout.engines.embedded.engine import EmbeddedEngine
from tests.rollout.engines.models import make_model, policy_spec, publish, transfer_in
from tests.rollout.engines.real_server import RealServer, running
from troupe.transfer import Transfer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def one_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One real SGLang server for all slow tests; it sleeps between their modules."""
    with running(tmp_path_factory.mktemp("sglang")) as server:
        server.pause()
        yield server


@pytest.fixture(scope="module")
def real_sglang(one_sglang: RealServer) -> Iterator[RealServer]:
    """A real SGLang server."""
    one_sglang.resume()
    yield one_sglang
    one_sglang.pause()


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model(0)


@pytest.fixture(params=["slots", "little memory", "deterministic"])
async def engine(
    request: pytest.FixtureRequest,
    transfer: Transfer,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[EmbeddedEngine]:
    deterministic = request.param == "deterministic"
    if request.param == "little memory":  # four of 64 turns fit at full length
        monkeypatch.setattr(slot_cache, "CACHE_BYTES", 0)
    engine = EmbeddedEngine("e0", "solver", policy_spec(), deterministic=deterministic)
    await engine.start()
    await engine.update_weights(publish(transfer, model, 0), transfer)
    yield engine
    await engine.stop()
