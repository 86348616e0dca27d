"""`python -m benchmarks.papers.actions.paced_service`: a reward service on a host of more cores.

Everything is real except the cores, of which the kernel knows nothing. A worker reads its number of
cores from a file, and sleeps for the time of the work on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.papers.actions.functions import PACED_DIR
from services.reward import host


class PacedCores:
    """A backend (`services.reward.cgroups.CpuBackend`) that tells the worker, not the kernel."""

    name = "paced"

    def __init__(self) -> None:
        self._directory = Path(os.environ[PACED_DIR])
        self._pids: dict[str, Sequence[int]] = {}

    def adopt(self, group: str, pids: Sequence[int]) -> None:
        """Record that `group` has the processes `pids`."""
        self._pids[group] = pids
        self.revoke(group)

    def grant(self, group: str, cores: Sequence[int]) -> None:
        """Write the number of cores for the group's processes."""
        for pid in self._pids.get(group, ()):
            (self._directory / str(pid)).write_text(str(len(cores)))

    def revoke(self, group: str) -> None:
        """Do nothing: the cores need no release."""
        self.grant(group, ())

    def forget(self, group: str) -> None:
        """Do nothing: there are no control groups."""
        self._pids.pop(group, None)

    def close(self) -> None:
        """Do nothing: there are no control groups."""
        self._pids.clear()


def _cores(count: int) -> dict[int, list[int]]:
    return {0: list(range(count))}


def _backend(*_: Any, **__: Any) -> PacedCores:
    return PacedCores()


if __name__ == "__main__":
    from services.chassis.app import run
    from services.reward.server import RewardService, RewardSettings

    with mock.patch.multiple(host, usable_cores=_cores, choose_backend=_backend):
        raise SystemExit(run(RewardService, RewardSettings))
