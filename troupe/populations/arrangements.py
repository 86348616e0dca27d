"""Exact values and NashConv of agents that change seats, with each seating equally often.

`seatings[k][seat]` is the agent on a seat in arrangement k; by default all permutations. An agent
has one plan (`troupe.populations.tree`) per seat, since it knows its seat.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from troupe.populations.games import Array
from troupe.populations.tree import SequenceForm

Plans = Sequence[Array]
"""One plan [s] per seat, as `SequenceForm.plan` makes them."""
Seatings = Sequence[Sequence[int]]


def mixed(members: Sequence[Plans], shares: Sequence[float]) -> list[Array]:
    """The plans of an agent that plays one of `members` per episode, drawn by `shares`."""
    total = float(np.sum(shares))
    if len(members) != len(shares) or not members or total <= 0:
        raise ValueError(f"{len(members)} members and the shares {list(shares)} make no mixture")
    seats = range(len(members[0]))
    parts = list(zip(members, shares, strict=True))
    return [sum(share / total * plans[seat] for plans, share in parts) for seat in seats]  # type: ignore[misc]


def agent_values(
    form: SequenceForm, agents: Sequence[Plans], seatings: Seatings | None = None
) -> Array:
    """The expected return of each agent [n], averaged over all seatings."""
    found = np.zeros(len(agents))
    seatings = seatings or list(permutations(range(len(agents))))
    for seating in seatings:
        got = form.values([agents[agent][seat] for seat, agent in enumerate(seating)])
        found[list(seating)] += got
    return found / len(seatings)


def agent_nash_conv(
    form: SequenceForm, agents: Sequence[Plans], seatings: Seatings | None = None
) -> float:
    """NashConv: the sum of the agents' gains by best responses; 0 at a Nash equilibrium.

    With two agents it is twice the exploitability. Raises ValueError for more than two different
    agents that change seats: a best response would depend on the other agents' seats.
    """
    alike = all(plans is agents[0] for plans in agents)
    seatings = seatings or list(permutations(range(len(agents))))
    if len(agents) > 2 and len(seatings) > 1 and not alike:
        raise ValueError("best responses to several agents that change seats are not known")
    seatings = seatings[:1] if alike else seatings
    return float(
        np.mean(
            [
                form.nash_conv([agents[agent][seat] for seat, agent in enumerate(seating)])
                for seating in seatings
            ]
        )
    )
