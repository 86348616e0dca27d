"""How engine tests ask."""

from __future__ import annotations

import random

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.requests import EngineResponse
from tests.rollout.engines.models import VOCABULARY
from tests.support.waiting import PATIENCE
from troupe.workflow.backend import Sampling


def prompt(rng: random.Random, low: int = 3, high: int = 90) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]


async def ask(
    engine: ServingEngine, name: str, ids: list[int], seconds: float = PATIENCE, **sampling: object
) -> EngineResponse:
    params = Sampling(**{"max_new_tokens": 8, "seed": 1, **sampling})  # type: ignore[arg-type]
    return await engine.generate(name, ids, params, deadline_seconds=seconds)
