"""What ranks are told when they are started."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

from services.trainer.settings import TrainerSettings

_VARIABLE = "TROUPE_GANG_TERMS"


@dataclasses.dataclass(frozen=True)
class Terms:
    """Settings of the worker that its ranks share. They pass through the environment as JSON."""

    # Socket of the lead; empty on other hosts.
    channel: str
    device: str
    # Of each rank.
    threads: int
    start_seconds: float
    timeout_seconds: float
    log_level: str
    log_format: str

    @classmethod
    def of(cls, settings: TrainerSettings, ranks_here: int, channel: str) -> Terms:
        """The terms of a worker of which `ranks_here` ranks run on this host."""
        return cls(
            channel=channel,
            device=settings.trainer_device,
            threads=max(1, settings.threads // ranks_here),
            start_seconds=settings.gang_start_seconds,
            timeout_seconds=settings.gang_timeout_seconds,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )

    def environment(self) -> dict[str, str]:
        """Variables to start ranks with."""
        threads = {
            f"{name}_NUM_THREADS": str(self.threads)
            for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
        }
        return {**threads, _VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Terms:
        """Inverse of `environment`."""
        return cls(**json.loads(environment[_VARIABLE]))
