"""Keeps the garbage collector from walking what stays, and lets it have what a job left."""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect everything that nobody refers to, then exempt the rest from collections to come.

    With torch and transformers a full collection stops the process for a quarter of a second;
    better once per job than again and again during its trajectories. The models of a released job
    are cycles: without thawing first they would stay for good.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
