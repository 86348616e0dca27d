"""A mixture of experts through all services, whose trainer replays the experts of its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import House
from tests.support.tiny_team import job

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.slow
async def test_the_experts_of_every_token_reach_the_trainer(house: House, models: Path) -> None:
    """Return the mixture's routes; the dense policy next to it has none."""
    over: dict[str, Any] = {
        "pipeline.steps": 3,
        "policies.solver.model": {"config": MIXTURE, "tokenizer": str(models / "solver")},
        "algorithm.router_replay": True,
        "algorithm.router_aux_loss": 0.01,
    }
    handle = await house.client.submit(job(models, **over))
    record = await handle.wait(timeout=400)
    assert record.state == "succeeded", record
    rows = [row.values for row in await handle.metrics()]
    found = {name: value for row in rows for name, value in row.items()}
    assert found["solver/router/replayed_fraction"] == 1.0
    assert found["solver/router/aux_loss"] > 0
    assert found["solver/router/load_max"] >= 1
    assert not [name for name in found if name.startswith("checker/router/")]
    assert not (await handle.audit()).violations
