"""`python -m services.trainer.gang`: one host of gangs that span several hosts.

Host 0 leads them: it is a trainer worker, as `python -m services.trainer`. The others run their
ranks. Number, count and meeting point come from LeaderWorkerSet or Slurm
(`services.trainer.gang.allocation`), unless these are set: `TROUPE_GANG_NODE`, `TROUPE_GANG_NODES`,
`TROUPE_GANG_ENDPOINT`.
`TROUPE_GANG_RANKS` and `TROUPE_DATA_DIR` are equal on all hosts.
"""

from __future__ import annotations

import signal
import threading

import structlog
from pydantic import Field

from services.chassis import logs
from services.chassis.app import run
from services.chassis.process import keep_freed_memory
from services.chassis.settings import read_settings
from services.trainer.__main__ import make_service
from services.trainer.gang.allocation import allocation
from services.trainer.gang.gang import GRACE_SECONDS, RankSettings, launch, ranks_here
from services.trainer.settings import TrainerSettings
from troupe.processes.ending import stop_process
from troupe.rpc.addresses import split_address

log = structlog.get_logger("troupe.gang")

_PAUSE_SECONDS = 1.0


def _gang_node() -> int:
    place = allocation()
    return place.node if place else 1


class FollowerSettings(TrainerSettings):
    """The settings of a host that follows a leader, read from `TROUPE_*` environment variables."""

    gang_node: int = Field(default_factory=_gang_node, ge=0, le=63)
    """Number of this host in the gang; the leader is 0."""


def follow(settings: FollowerSettings, stop: threading.Event) -> None:
    """Join one gang after another until `stop`."""
    host, port = split_address(settings.gang_endpoint)
    ranks = ranks_here(settings)
    terms = RankSettings.of(settings, ranks, "")
    log.info("waiting for a gang", leader=settings.gang_endpoint, node=settings.gang_node)
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
        log.info("ranks have ended", status=stop_process(agent, GRACE_SECONDS))
        stop.wait(_PAUSE_SECONDS)


def main() -> int:
    """Lead, or follow the leader, until SIGTERM; return the exit status."""
    settings = read_settings(FollowerSettings, "services.trainer.gang")
    if settings is None:
        return 2
    if settings.gang_node == 0:
        keep_freed_memory()
        return run(make_service, TrainerSettings)
    logs.configure("services.trainer.gang", settings.log_level, settings.log_format)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not in the handler itself, since the interrupted thread may hold the event's lock.
        signal.signal(number, lambda *_: threading.Thread(target=stop.set).start())
    follow(settings, stop)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
