"""`python -m services.orchestrator`: serve until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from services.chassis.app import run
from services.orchestrator.server import make_service
from services.orchestrator.settings import OrchestratorSettings

if __name__ == "__main__":
    # Imported objects live forever. Without this a full collection would scan all of them and block
    # the event loop for tens of milliseconds.
    gc.freeze()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.exit(run(make_service, OrchestratorSettings))
