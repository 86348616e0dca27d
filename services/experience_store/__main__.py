"""`python -m services.experience_store`: serve until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from services.chassis.app import run
from services.experience_store.server import make_service
from services.experience_store.settings import StoreSettings

if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.exit(run(make_service, StoreSettings))
