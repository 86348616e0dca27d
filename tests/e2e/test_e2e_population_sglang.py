"""A population whose members run on real SGLang servers, if the machine has SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import House
from tests.e2e.populated import check_population, population_job, training_casts
from tests.e2e.standing import Ended
from tests.rollout.engines.real_server import START_SECONDS, interpreter

pytestmark = pytest.mark.slow


async def test_members_in_sglang(house: House, tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    text = population_job(
        tmp_path,
        {"alice": "player", "bob": "player"},
        engine={
            "kind": "sglang",
            "python": python,
            "max_context": 128,
            "start_timeout_seconds": START_SECONDS,
        },
    )
    handle = await house.client.submit(text)
    end = Ended(await handle.wait(timeout=500), [], handle)
    found = await check_population(end, house.data_dir)
    assert [one.id for one in found.pools[0].members] == ["player@0", "player@1", "player@2"]
    # Each slot has served more than the member that it began with.
    assert all(slot.version >= 1 for slot in found.slots)
    assert {"player", "all--0"} in [set(cast.values()) for cast in await training_casts(end)]
