"""Records of populations: pools, members, payoffs, meta-strategies, matches."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from troupe.client.conversion import Record


@dataclass(frozen=True)
class Member(Record, id_from="member_id"):
    """A member of a pool: a frozen version of a policy."""

    # `{learner}@{version}`, unique in the job.
    id: str
    # The policy that it is a version of.
    learner: str
    # Its role in a league: "main", "main_exploiter" or "league_exploiter".
    kind: str
    version: int
    # Optimizer steps done when it was frozen.
    step: int
    iteration: int
    checksum: str
    # The member from which its learner continued training; empty for the first.
    parent: str
    # "candidate" (being evaluated), "settled" (permanent) or "retired" (replaced by a newer one).
    state: str
    num_bytes: int
    frozen_at: datetime


@dataclass(frozen=True)
class Pool(Record):
    """The members that one or more agents draw from."""

    name: str
    agents: tuple[str, ...]
    # Policies whose versions become its members.
    learners: tuple[str, ...]
    # By index, as `PayoffCell.members` names them.
    members: tuple[Member, ...]


@dataclass(frozen=True)
class PayoffCell(Record):
    """Payoffs of one joint choice of members, one from each agent's pool."""

    # The index of each agent's member in its pool; ascending in a symmetric game.
    members: tuple[int, ...]
    # Each member's mean payoff, and the variance of one match (empty before the second match).
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    matches: int
    # Computed, not sampled.
    exact: bool
    # Half-width of the 95 % confidence interval of the least certain mean; None before the second
    # match.
    half_width: float | None


@dataclass(frozen=True)
class MetaStrategy(Record):
    """The meta-solver's solution of the payoff table after one iteration."""

    iteration: int
    step: int
    # The probability of each member id, per pool; zero probabilities are left out.
    mixtures: dict[str, dict[str, float]]
    # Each agent's expected payoff when all agents draw from these mixtures.
    values: tuple[float, ...]
    # How much each pool's newest member gains against the previous mixtures; empty at first.
    gains: tuple[float, ...]
    # The agents' summed gain from best responses in the whole game; None if unknown.
    nash_conv: float | None

    @classmethod
    def of(cls, message: Any, **given: Any) -> Self:
        """Make a record from the wire."""
        mixtures = {one.pool: dict(one.probabilities) for one in message.mixtures}
        return super().of(message, mixtures=mixtures, **given)


@dataclass(frozen=True)
class MemberRating(Record):
    """A member's skill rating, estimated from its matches (Plackett-Luce)."""

    member_id: str
    mean: float
    deviation: float
    matches: int

    @property
    def cautious(self) -> float:
        """A conservative rating: three deviations below the mean."""
        return self.mean - 3.0 * self.deviation


@dataclass(frozen=True)
class Slot(Record):
    """A serving slot for opponents: a frozen policy into which members are loaded."""

    # Its policy name in engines and turns.
    policy: str
    pool: str
    member_id: str
    # Number of members loaded so far.
    version: int
    # Probability that a training episode of this step draws it; 0 for slots of matches.
    probability: float


@dataclass(frozen=True)
class Population(Record):
    """The pools of a job with their payoffs, meta-strategies and ratings."""

    algorithm: str
    # Whether all agents draw from one pool, so that the order of a cell's members does not matter.
    symmetric: bool
    iteration: int
    # The order of members and payoffs in cells.
    agents: tuple[str, ...]
    pools: tuple[Pool, ...]
    cells: tuple[PayoffCell, ...]
    # One per solved iteration, oldest first.
    history: tuple[MetaStrategy, ...]
    ratings: tuple[MemberRating, ...]
    slots: tuple[Slot, ...]
    matches_played: int
    matches_due: int
    # Why no further iteration begins; empty otherwise.
    stopped: str
    activity: str

    def pool_of(self, agent: str) -> Pool:
        """Return the pool that an agent draws from. Raises KeyError."""
        for pool in self.pools:
            if agent in pool.agents:
                return pool
        raise KeyError(agent)


@dataclass(frozen=True)
class Match(Record):
    """One evaluation match between members: a trajectory, whose conversation
    `JobHandle.trajectory` returns."""

    trajectory_id: str
    iteration: int
    # Member id by agent.
    members: dict[str, str]
    # Payoff by agent; empty unless the match was completed.
    payoffs: dict[str, float]
    state: str
    # Why it was not completed; empty if it was.
    reason: str
    seconds: float
    at: datetime
