"""A schedule of faults: a function of the seed, the services and their connections.

The schedule fixes the faults and their order; the times depend on how fast services recover, which
no seed can fix.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from testbed.chaos.proxy import Pair
from troupe.rpc.errors import InvalidArgument

KILL, STALL, FREEZE, SLOW_DISK, PARTITION, DELAY, DUPLICATE, FULL_QUEUE = KINDS = (
    "kill",
    "stall",
    "freeze",
    "slow_disk",
    "partition",
    "delay",
    "duplicate",
    "full_queue",
)
# Only kills are counted; about one other fault follows every two kills.
_WEIGHTS: Final = {
    KILL: 6.0,
    STALL: 1.0,
    FREEZE: 0.5,
    SLOW_DISK: 1.0,
    PARTITION: 1.0,
    DELAY: 1.0,
    FULL_QUEUE: 1.0,
}
# Probability that two processes are killed at once, and that one is killed while it recovers.
_TWO_AT_ONCE, _WHILE_RECOVERING = 0.15, 0.15
# Longer than the time after which the orchestrator continues without a silent worker (10 s).
_FROZEN_SECONDS: Final = (12.0, 20.0)
# Services that write to disk before something counts as done.
_WRITERS: Final = ("redis", "trainer", "orchestrator")
# Links on which messages pile up when their receiver stops reading.
_QUEUES: Final = ("experience_store", "redis")


@dataclass(frozen=True)
class PlannedFault:
    """A planned fault."""

    kind: str
    # Processes; for faults of a link see `pair`.
    victims: tuple[str, ...] = ()
    pair: Pair | None = None
    # Duration; for a kill during recovery: the time after the first kill.
    seconds: float = 0.0
    # Seconds between the last victim's recovery and this fault.
    pause: float = 0.0
    # "again": killed once more while it recovers. "severed": connections break, else they hang.
    variant: str = ""


def parse_kinds(text: str) -> frozenset[str]:
    """Return the kinds in "kill,partition"; "" and "all" mean all. Raises `InvalidArgument`."""
    named = [part.strip().replace("-", "_") for part in text.split(",") if part.strip()]
    if not named or named == ["all"]:
        return frozenset(KINDS)
    for name in named:
        if name not in KINDS:
            raise InvalidArgument(
                f"'{name}' is not a kind of fault.",
                field="--faults",
                value=text,
                remedy=f"Choose from {', '.join(KINDS)}.",
            )
    return frozenset(named)


def schedule(
    seed: int, services: Sequence[str], pairs: Sequence[Pair], kinds: Collection[str] = KINDS
) -> Iterator[PlannedFault]:
    """Yield an endless schedule of faults. `services`: names of processes; `pairs`: connections.

    Empty if `kinds` has no fault that happens at a point in time (`duplicate` is always on).
    """
    rng = random.Random(seed)
    writers = [s for s in services if s.partition("-")[0] in _WRITERS]
    queues = [p for p in pairs if p[1] in _QUEUES]
    possible = [kind for kind in KINDS if kind in kinds and kind in _WEIGHTS]
    weights = [_WEIGHTS[kind] for kind in possible]
    while possible:
        kind = rng.choices(possible, weights)[0]
        pause = rng.uniform(0.5, 3.0)
        if kind == KILL:
            yield _kill(rng, services, pause)
        elif kind == STALL:
            yield PlannedFault(kind, (rng.choice(services),), None, rng.uniform(1, 5), pause)
        elif kind == FREEZE:
            seconds = rng.uniform(*_FROZEN_SECONDS)
            yield PlannedFault(kind, (rng.choice(services),), None, seconds, pause)
        elif kind == SLOW_DISK:
            yield PlannedFault(kind, (rng.choice(writers),), None, rng.uniform(1, 5), pause)
        elif kind == PARTITION:
            variant = rng.choice(("severed", "silent"))
            yield PlannedFault(kind, (), rng.choice(pairs), rng.uniform(1, 8), pause, variant)
        elif kind == DELAY:
            yield PlannedFault(kind, (), rng.choice(pairs), rng.uniform(2, 8), pause)
        else:
            yield PlannedFault(kind, (), rng.choice(queues), rng.uniform(1, 5), pause)


def _kill(rng: random.Random, services: Sequence[str], pause: float) -> PlannedFault:
    draw = rng.random()
    if draw < _TWO_AT_ONCE and len(services) > 1:
        return PlannedFault(KILL, tuple(rng.sample(services, 2)), None, 0.0, pause, "together")
    victim = (rng.choice(services),)
    if draw < _TWO_AT_ONCE + _WHILE_RECOVERING:
        return PlannedFault(KILL, victim, None, rng.uniform(0.3, 2.0), pause, "again")
    return PlannedFault(KILL, victim, None, 0.0, pause)


def scaled(pause: float, done: float, progress: float) -> float:
    """Return `pause`, longer when faults run ahead of the job and shorter when they lag behind.

    `done` and `progress` are the shares, from 0 to 1, of the faults and of the job's steps.
    """
    return pause * min(5.0, max(0.1, 1.0 + 20.0 * (done - progress)))
