"""Which samples each of a step's updates is made with, where there are several."""

from __future__ import annotations

import random
from collections.abc import Iterator


def schedule(units: int, epochs: int, minibatches: int, seed: str) -> Iterator[list[int]]:
    """For each update the units (0 .. `units` - 1) of its gradient.

    Every epoch cuts all of them into `minibatches` parts of about equally many, no part empty (so
    that there are fewer where units are), in an order drawn from `seed` and the epoch.
    """
    parts = min(minibatches, units)
    for epoch in range(epochs):
        order = list(range(units))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (order[units * k // parts : units * (k + 1) // parts] for k in range(parts))
