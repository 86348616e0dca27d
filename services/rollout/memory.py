"""Keeps the garbage collector from walking what stays, and lets it have what a job left."""

from __future__ import annotations

import gc
from typing import Final

# By Python's own thresholds some of what waiting trajectories hold is walked every 700 objects, and
# all of it every other step of 256 trajectories, for a tenth of a second and more in which no turn
# goes on. What trajectories leave is nearly all freed without the collector, so it need not even
# begin while those of a step come: at 10,000 it took 6 % of the process' time, when turns waited.
_THRESHOLDS: Final = (300_000, 20, 50)


def collect_seldom() -> None:
    """Exempt what is there from collections, and begin with them: few, of many objects."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def settle() -> None:
    """Collect everything that nobody refers to, then exempt the rest from collections to come.

    With torch and transformers a full collection stops the process for a quarter of a second;
    better once per job than again and again during its trajectories. The models of a released job
    are cycles: without thawing first they would stay for good.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
