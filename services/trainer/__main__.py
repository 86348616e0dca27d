"""`python -m services.trainer`."""

from __future__ import annotations

import gc
import os

from services.chassis.app import ServiceDefinition, run
from services.chassis.process import keep_freed_memory
from services.chassis.telemetry import Telemetry
from services.trainer.settings import TrainerSettings, process_variables


def make_service(settings: TrainerSettings, telemetry: Telemetry) -> ServiceDefinition:
    """Make the service, importing torch only now, after the chassis has set the thread budget."""
    os.environ.update(process_variables(os.environ))
    from services.trainer.server import TrainerService

    # Imported objects stay: without this, a full collection would examine all of them, including
    # torch's, and block the event loop for a fifth of a second.
    gc.freeze()
    return TrainerService(settings, telemetry)


if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run(make_service, TrainerSettings))
