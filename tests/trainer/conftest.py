"""A real experience store and a real trainer, in this process."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.chassis.app import serve
from services.experience_store.server import StoreSettings
from services.experience_store.server import make_service as make_store
from services.trainer.server import TrainerService
from services.trainer.settings import TrainerSettings
from tests.support.training import save_tokenizer
from tests.trainer.stage import TrainingStage
from troupe.rpc import connect, new_id

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tokenizer for 64 tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def store_address(empty_redis: str, tmp_path: Path) -> AsyncIterator[str]:
    """A store service on the shared Redis, which knows no job."""
    settings = StoreSettings(redis_url=empty_redis, drain_seconds=1)
    async with serve(make_store, settings) as server:
        yield server.address


@pytest.fixture
async def stage(
    store_address: str, tmp_path: Path, tokenizer: Path
) -> AsyncIterator[TrainingStage]:
    """Yield a job with its tables, which can start trainers."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**changes: object) -> tuple[Any, Any]:
            settings = TrainerSettings(
                experience_store_address=store_address,
                orchestrator_address="127.0.0.1:1",
                data_dir=tmp_path / "runs",
                transfer_dir=tmp_path / "transfer",
                drain_seconds=1,
                trainer_claim_wait_seconds=0.2,
            ).model_copy(update=changes)
            server = await stack.enter_async_context(serve(TrainerService, settings))
            channel = await stack.enter_async_context(connect(server.address))
            return server, channel

        job_id = new_id("job")
        channel = await stack.enter_async_context(connect(store_address))
        yield TrainingStage(job_id, tokenizer, tmp_path, channel, start)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mount = tmp_path / "disk"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
