"""Control of Python's garbage collector in a rollout worker.

A collection holds the interpreter lock: no turn advances and no call is answered meanwhile. It
takes 0.4 to 1.3 us per object that it walks; a trajectory of ten turns holds 300 to 450 objects,
and nearly all of them are freed without the collector when it ends.
"""

from __future__ import annotations

import gc
from typing import Final

# Objects that a collection walks: those created since the previous one. With 300,000 objects a
# collection took 0.13 to 0.4 s. Each object is walked once as a new one, regardless of this number.
_NEW: Final = 20_000
# Collections of new objects until the survivors of all of them are walked, too. The running
# trajectories hold these objects: with 2,000 trajectories, walking them takes half a second, so it
# happens only if `collect_survivors` has found no better moment over ten million objects.
_MANY: Final = 500
_THRESHOLDS: Final = (_NEW, _MANY, 50)
# Collections of new objects after which it is worth searching the survivors for cycles.
_SOME: Final = 10


def collect_seldom() -> None:
    """Exempt all existing objects from garbage collection, and enable it with the thresholds of a
    rollout worker."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def collect_survivors() -> None:
    """Collect the survivors of earlier collections, if there were some since the last call. Call
    this when few trajectories run: then it takes milliseconds.

    It has no effect in a process without `collect_seldom`, where it would walk all imported
    objects.
    """
    if gc.get_threshold() == _THRESHOLDS and gc.get_count()[1] >= _SOME:
        gc.collect()


def exempt_new() -> None:
    """Collect the garbage among new objects, such as a job's preparation leaves, and exempt the
    remaining ones from later collections.

    Objects that are exempt already, such as imported ones, are not walked: a collection writes to
    all that it walks, and a forked worker would get 170 MiB of pages of its own that it shares.
    """
    gc.collect()
    gc.freeze()


def settle() -> None:
    """Collect all garbage, then exempt the remaining objects from later collections.

    With torch and transformers, a full collection stops the process, including trajectories of
    other jobs, for a quarter of a second or more. So it runs only when a job ends whose models this
    process holds. They are cycles; unfreezing first lets them be collected.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
