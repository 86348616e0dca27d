"""When Python's garbage collector runs in a rollout worker, and for how long.

A collection holds the interpreter lock: no turn advances and no call is answered meanwhile. It
takes 0.4 to 1.3 us per object that it walks; a trajectory of ten turns holds 300 to 450 objects,
and nearly all of them are freed without the collector when it ends.
"""

from __future__ import annotations

import gc
from typing import Final

# Objects that a collection walks: those that are new since the one before. With 300,000 one
# took 0.13 to 0.4 s. Each object is walked once as a new one, however many are walked together.
_NEW: Final = 20_000
# Collections of new objects until the survivors of all of them are walked, too. These are what the
# running trajectories hold: with 2,000 trajectories walking them takes half a second, so it happens
# where `collect_survivors` has found no better moment over ten million objects.
_MANY: Final = 500
_THRESHOLDS: Final = (_NEW, _MANY, 50)
# Collections of new objects after which the survivors may have cycles worth looking for.
_SOME: Final = 10


def collect_seldom() -> None:
    """Exempt all existing objects from garbage collection, and enable it with the thresholds of a
    rollout worker."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def collect_survivors() -> None:
    """Collect what survived earlier collections, if there were some since the last time. To be
    called when few trajectories run: then it takes milliseconds.

    Without effect in a process in which `collect_seldom` did not run: there it would walk all that
    was imported.
    """
    if gc.get_threshold() == _THRESHOLDS and gc.get_count()[1] >= _SOME:
        gc.collect()


def settle() -> None:
    """Collect all garbage, then exempt the remaining objects from later collections.

    With torch and transformers a full collection stops the process, trajectories of other jobs
    included, for a quarter of a second and more: it runs only when a job comes or goes whose models
    this process holds. Models of a released job are cycles; unfreezing first lets them be
    collected.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
