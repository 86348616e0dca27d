"""A trainer in a separate process that dies at a point of `dying`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.waiting import PATIENCE, until
from tests.trainer import dying
from tests.trainer.stage import Trainer, TrainingStage
from troupe.rpc import connect


@asynccontextmanager
async def doomed(stage: TrainingStage, store_address: str, point: str) -> AsyncIterator[Trainer]:
    """Yield a trainer that dies at `point`; it is dead when the context ends."""
    ports = stage.root / f"ports {point}"
    environment = {
        "TROUPE_EXPERIENCE_STORE_ADDRESS": store_address,
        "TROUPE_ORCHESTRATOR_ADDRESS": "127.0.0.1:1",
        "TROUPE_DATA_DIR": str(stage.root / "runs"),
        "TROUPE_TRANSFER_DIR": str(stage.root / "transfer"),
        "TROUPE_TRAINER_CLAIM_WAIT_SECONDS": "0.2",
        "TROUPE_PORT_FILE": str(ports),
        "TROUPE_PARENT_PID": str(os.getpid()),
    }
    process = dying.start(point, environment)
    try:
        await until(lambda: ports.exists() or not process.is_alive())
        async with connect(f"127.0.0.1:{ports.read_text().split()[0]}") as channel:
            yield Trainer(None, channel, stage)
        await asyncio.to_thread(process.join, PATIENCE)
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()
