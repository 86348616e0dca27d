"""`python -m services.rollout`: serves until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys

from services.chassis.app import ServiceDefinition, run
from services.chassis.process import keep_freed_memory
from services.chassis.telemetry import Telemetry
from services.rollout.settings import RolloutSettings


def make(settings: RolloutSettings, telemetry: Telemetry) -> ServiceDefinition:
    """Return the service. Imported here, after the chassis has set the number of threads."""
    from services.rollout.server import RolloutService

    return RolloutService(settings, telemetry)


def main() -> int:
    """Serve, and return the exit status."""
    with contextlib.suppress(ImportError):  # saves some tenths of a millisecond per turn
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    keep_freed_memory()
    gc.disable()  # enabled again after the libraries are imported: see `warm_up`
    return run(make, RolloutSettings)


if __name__ == "__main__":
    sys.exit(main())
