"""One rollout service with scripted engines for all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.endpoint.stage import Stage, open_stage
from tests.rollout.conftest import _fresh, _settling, reward_process, store_process
from tests.rollout.processes import ServiceProcess

__all__ = ["_fresh", "_settling", "reward_process", "store_process"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(
    tmp_path_factory: pytest.TempPathFactory, store_process: ServiceProcess
) -> AsyncIterator[Stage]:
    directory = tmp_path_factory.mktemp("stage")
    async with open_stage(directory, store=store_process.address) as stage:
        yield stage


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """The shared one with an empty script."""
    shared_stage.begin_anew()
    return shared_stage
