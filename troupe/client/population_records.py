"""What the SDK returns about populations: pools, members, payoffs, matches."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from troupe.client.records import when, word
from troupe.v1 import common_pb2
from troupe.v1 import orchestrator_pb2 as pb


@dataclass(frozen=True)
class Member:
    """A frozen version of a policy."""

    # `{learner}@{version}`, unique in the job.
    id: str
    # The policy that it is a version of.
    learner: str
    # In a league: "main", "main_exploiter" or "league_exploiter".
    kind: str
    version: int
    # Optimizer steps that were done when it was frozen.
    step: int
    iteration: int
    checksum: str
    # The member that its learner went on from; empty for the first.
    parent: str
    # "candidate" (to be measured), "settled" (for good) or "retired" (a newer one took its place).
    state: str
    num_bytes: int
    frozen_at: datetime

    @classmethod
    def of(cls, one: pb.PopulationMember) -> Member:
        """From the wire."""
        return cls(
            id=one.member_id,
            learner=one.learner,
            kind=one.kind,
            version=one.version,
            step=one.step,
            iteration=one.iteration,
            checksum=one.checksum,
            parent=one.parent,
            state=word(pb.MemberState, one.state),
            num_bytes=one.num_bytes,
            frozen_at=when(one.frozen_at),
        )


@dataclass(frozen=True)
class Pool:
    """The members that one or more agents draw from."""

    name: str
    agents: tuple[str, ...]
    # Policies whose versions become its members.
    learners: tuple[str, ...]
    # In the order of their places.
    members: tuple[Member, ...]

    @classmethod
    def of(cls, one: pb.PopulationPool) -> Pool:
        """From the wire."""
        members = tuple(Member.of(member) for member in one.members)
        return cls(one.name, tuple(one.agents), tuple(one.learners), members)


@dataclass(frozen=True)
class PayoffCell:
    """What one joint choice of members got."""

    # The place of each agent's member in its pool; in a symmetric game in rising order.
    members: tuple[int, ...]
    # Of what each of them got; `variance` is of one match, empty before the second.
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    matches: int
    # Computed, not sampled.
    exact: bool
    # Of the 95 % confidence interval of the least certain mean; None before the second match.
    half_width: float | None

    @classmethod
    def of(cls, one: pb.PayoffCell) -> PayoffCell:
        """From the wire."""
        return cls(
            members=tuple(one.members),
            mean=tuple(one.mean),
            variance=tuple(one.variance),
            matches=one.matches,
            exact=one.exact,
            half_width=one.half_width if one.HasField("half_width") else None,
        )


@dataclass(frozen=True)
class MetaStrategy:
    """What the meta-solver made of the payoffs after one iteration."""

    iteration: int
    step: int
    # By pool: probabilities by member id; those of 0 are left out.
    mixtures: dict[str, dict[str, float]]
    # What the agents get when all draw from these.
    values: tuple[float, ...]
    # By how much the newest members beat what was played before, by pool; empty at first.
    gains: tuple[float, ...]
    # What the agents together would gain by best responses in the whole game, where it is known.
    nash_conv: float | None

    @classmethod
    def of(cls, one: pb.MetaStrategy) -> MetaStrategy:
        """From the wire."""
        return cls(
            iteration=one.iteration,
            step=one.step,
            mixtures={mixture.pool: dict(mixture.probabilities) for mixture in one.mixtures},
            values=tuple(one.values),
            gains=tuple(one.gains),
            nash_conv=one.nash_conv if one.HasField("nash_conv") else None,
        )


@dataclass(frozen=True)
class MemberRating:
    """How strong a member is, by the matches that it played (Plackett-Luce)."""

    member_id: str
    mean: float
    deviation: float
    matches: int

    @property
    def cautious(self) -> float:
        """What it is almost surely worth: three deviations below the mean."""
        return self.mean - 3.0 * self.deviation


@dataclass(frozen=True)
class Slot:
    """A frozen policy that serves members as opponents."""

    # As engines and turns name it.
    policy: str
    pool: str
    member_id: str
    # Counts its loads.
    version: int
    # The chance that a training episode of this step draws it; 0 for slots of matches.
    probability: float


@dataclass(frozen=True)
class Population:
    """The pools of a job and what is known of them."""

    algorithm: str
    # All agents draw from one pool; cells that differ in the order of members are one cell.
    symmetric: bool
    iteration: int
    # In the order in which cells name members and payoffs.
    agents: tuple[str, ...]
    pools: tuple[Pool, ...]
    cells: tuple[PayoffCell, ...]
    # One per iteration that was solved, oldest first.
    history: tuple[MetaStrategy, ...]
    ratings: tuple[MemberRating, ...]
    slots: tuple[Slot, ...]
    matches_played: int
    matches_due: int
    # Why no further iteration begins; empty while some do.
    stopped: str
    activity: str

    def pool_of(self, agent: str) -> Pool:
        """The pool that an agent draws from. Raises KeyError."""
        for pool in self.pools:
            if agent in pool.agents:
                return pool
        raise KeyError(agent)

    @classmethod
    def of(cls, one: pb.Population) -> Population:
        """From the wire."""
        return cls(
            algorithm=one.algorithm,
            symmetric=one.symmetric,
            iteration=one.iteration,
            agents=tuple(one.agents),
            pools=tuple(Pool.of(pool) for pool in one.pools),
            cells=tuple(PayoffCell.of(cell) for cell in one.cells),
            history=tuple(MetaStrategy.of(solved) for solved in one.history),
            ratings=tuple(
                MemberRating(r.member_id, r.mean, r.deviation, r.matches) for r in one.ratings
            ),
            slots=tuple(
                Slot(s.policy, s.pool, s.member_id, s.version, s.probability) for s in one.slots
            ),
            matches_played=one.matches_played,
            matches_due=one.matches_due,
            stopped=one.stopped,
            activity=one.activity,
        )


@dataclass(frozen=True)
class Match:
    """One evaluation match between members. It is a trajectory: `JobHandle.trajectory` has what
    was said."""

    trajectory_id: str
    iteration: int
    # Who played, by agent: member ids.
    members: dict[str, str]
    # What they got, by agent; empty unless it was completed.
    payoffs: dict[str, float]
    state: str
    # Why it did not come to its end.
    reason: str
    seconds: float
    at: datetime

    @classmethod
    def of(cls, one: pb.Match) -> Match:
        """From the wire."""
        return cls(
            trajectory_id=one.trajectory_id,
            iteration=one.iteration,
            members=dict(one.members),
            payoffs=dict(one.payoffs),
            state=word(common_pb2.TrajectoryState, one.state),
            reason=one.reason,
            seconds=one.seconds,
            at=when(one.at),
        )
