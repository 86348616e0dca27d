"""Which engines of a policy load new weights at the same time.

A load takes as long for many engines as for one where each has its own device: an update of all of
them should take two loads, not one per engine. But the policy must never stop serving. So engines
load in waves: half of those that serve at a time, none beside another one on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpdatingEngine:
    """One engine of a policy whose weights are being replaced.

    `devices`: what it computes on, by any names that tell them apart; empty where it is not known,
    or shared with no engine. `serves`: turns may go to it, with whatever version. `waits`: its turn
    to load has not come yet.
    """

    engine_id: str
    devices: frozenset[str]
    serves: bool
    waits: bool
    turns: int = 0
    """In flight on it."""


def next_wave(engines: Sequence[UpdatingEngine]) -> tuple[str, ...]:
    """Ids of the waiting engines that load next; empty when none waits.

    All `engines` of the policy count, also those that have loaded: what they serve is what goes on.
    Of S serving ones at least S // 2 go on, a single one excepted. Engines that do not serve load
    at once, then those with the fewest turns; of engines with a device in common one is in a wave.
    """
    serving = sum(engine.serves for engine in engines)
    room = max(1, serving - max(1, serving // 2))
    taken: set[str] = set()
    wave: list[str] = []
    for engine in sorted(engines, key=lambda one: (one.serves, one.turns, one.engine_id)):
        if not engine.waits or taken & engine.devices:
            continue
        if engine.serves:
            if not room:
                continue
            room -= 1
        taken |= engine.devices
        wave.append(engine.engine_id)
    return tuple(wave)
