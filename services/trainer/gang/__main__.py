"""`python -m services.trainer.gang`: this host's ranks of gangs that another host's worker leads.

`TROUPE_GANG_ENDPOINT`: host and port of the lead; `TROUPE_GANG_NODE`: number of this host, from 1;
`TROUPE_GANG_NODES`, `TROUPE_GANG_RANKS` and `TROUPE_DATA_DIR`: equal to the lead's.
"""

from __future__ import annotations

import signal
import sys
import threading

import structlog
from pydantic import Field, ValidationError

from services.chassis import logs
from services.trainer.gang.gang import RankSettings, launch, ranks_here
from services.trainer.settings import TrainerSettings
from troupe.job.loading import explained

log = structlog.get_logger("troupe.gang")

_PAUSE_SECONDS = 1.0


class FollowerSettings(TrainerSettings):
    """The settings of a host that follows a lead, read from `TROUPE_*` environment variables."""

    gang_node: int = Field(default=1, ge=1, le=63)
    """Which of the gang's hosts this is; the lead is 0."""


def follow(settings: FollowerSettings, stop: threading.Event) -> None:
    """Join one gang after another until `stop`."""
    host, _, port = settings.gang_endpoint.rpartition(":")
    ranks = ranks_here(settings)
    terms = RankSettings.of(settings, ranks, "")
    log.info("waiting for a gang", lead=settings.gang_endpoint, node=settings.gang_node)
    while not stop.is_set():
        agent = launch(
            terms,
            ranks=ranks,
            nodes=settings.gang_nodes,
            node=settings.gang_node,
            address=host,
            port=int(port),
        )
        while agent.poll() is None and not stop.wait(_PAUSE_SECONDS):
            pass
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
        log.info("ranks have ended", status=agent.wait())
        stop.wait(_PAUSE_SECONDS)


def main() -> int:
    """Follow the lead until SIGTERM; returns the exit status."""
    try:
        settings = FollowerSettings()
    except ValidationError as error:
        for fault in explained(error, FollowerSettings, "See docs/operating.md."):
            print(f"services.trainer.gang: TROUPE_{fault}", file=sys.stderr)
        return 2
    logs.configure("services.trainer.gang", settings.log_level, settings.log_format)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    follow(settings, stop)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
