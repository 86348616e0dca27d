"""`python -m services.experience_store`: serve until SIGTERM."""

from __future__ import annotations

import sys

from services.chassis.app import run
from services.chassis.settings import ServiceSettings
from services.experience_store.server import make_service

if __name__ == "__main__":
    sys.exit(run(make_service, ServiceSettings))
