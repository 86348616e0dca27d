"""What is remembered of a job's population: one record, which moves as a whole."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from troupe.populations.payoffs import Members, PayoffTable
from troupe.populations.ratings import Rating

FORMAT: Final = 1
CANDIDATE: Final = "candidate"
SETTLED: Final = "settled"
RETIRED: Final = "retired"
# Name of -> probability. A learner as it is now is named by `live`.
Mixture = dict[str, float]
_LIVE: Final = "="


def live(policy: str) -> str:
    """A learner as an opponent, not one of its frozen versions."""
    return f"{_LIVE}{policy}"


def live_policy(name: str) -> str | None:
    """Whom `live` named; None for a member."""
    return name[1:] if name.startswith(_LIVE) else None


@dataclass
class Member:
    """A frozen version of a learner."""

    member_id: str
    learner: str
    kind: str
    version: int
    checksum: str
    step: int
    """Optimizer steps that were done."""
    iteration: int
    parent: str
    """The member that its learner went on from."""
    state: str
    num_bytes: int
    frozen_at: float


@dataclass
class Solution:
    """What was decided after one iteration."""

    iteration: int
    step: int
    mixtures: dict[str, Mixture]
    """By pool."""
    values: list[float]
    """By player."""
    gains: dict[str, float]
    """By pool: what the newest members get beyond what was played before."""
    nash_conv: float | None = None
    """What all agents would gain by best responses in the whole game, where that can be walked."""


@dataclass
class Casting:
    """Who plays the opponents in training, until the next draw."""

    step: int
    """The first that it is for."""
    members: dict[str, str]
    """By slot."""
    shares: dict[str, dict[str, Mixture]]
    """By learner and pool: slots and `live` policies."""


@dataclass
class PopulationState:
    """Everything that a resume goes on from. Places of members in `pools` are those of cells."""

    pools: dict[str, list[str]]
    """Member ids."""
    table: PayoffTable
    members: dict[str, Member] = field(default_factory=dict)
    iteration: int = 0
    began: int = 0
    """Steps that were done when the iteration began."""
    pending: bool = True
    """Members are there whose payoffs nothing was decided upon yet."""
    mixtures: dict[str, dict[str, Mixture]] = field(default_factory=dict)
    """Whom each learner meets, by learner and pool."""
    history: list[Solution] = field(default_factory=list)
    attempts: dict[Members, int] = field(default_factory=dict)
    """Matches of each cell that have ended, however."""
    planned: int = 0
    """Matches of the iteration that have ended, however."""
    failed: int = 0
    """Those of them that have failed."""
    wins: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Of a member against another: won, drawn, played."""
    ratings: dict[str, Rating] = field(default_factory=dict)
    """By member."""
    played: int = 0
    slots: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The member in each slot, and how often one was loaded there."""
    casting: Casting | None = None
    settled_at: dict[str, int] = field(default_factory=dict)
    """By learner: the iteration in which a version of it was settled last."""
    restarting: dict[str, int] = field(default_factory=dict)
    """By learner that is to begin again with its first weights: the version that it leaves."""
    began_with: dict[str, int] = field(default_factory=dict)
    """By learner: the version that its best response began with, where that was a restart."""
    stopped: str = ""

    def win_rates(self) -> dict[tuple[str, str], float]:
        """How often each member beats another, draws half."""
        return {
            pair: (won + 0.5 * drawn) / played for pair, (won, drawn, played) in self.wins.items()
        }

    def newest(self, learner: str) -> Member:
        """Its newest member."""
        own = [one for one in self.members.values() if one.learner == learner]
        return max(own, key=lambda one: (one.iteration, one.version))

    def first(self, learner: str) -> Member:
        """Its first version, with which it begins again."""
        own = [one for one in self.members.values() if one.learner == learner]
        return min(own, key=lambda one: one.version)

    def parent(self, learner: str) -> Member:
        """The member that it has gone on from."""
        newest = self.newest(learner)
        if self.began_with.get(learner, 0) > newest.version:
            return self.first(learner)
        return newest

    def unneeded(self, since: int = 0) -> list[Member]:
        """Retired members of the iterations from `since` on whom nobody plays, or may draw."""
        needed = {member for member, _ in self.slots.values()}
        for pools in self.mixtures.values():
            for mixture in pools.values():
                needed.update(mixture)
        return [
            one
            for one in self.members.values()
            if one.state == RETIRED and one.iteration >= since and one.member_id not in needed
        ]

    def places(self, pool: str, *states: str) -> list[int]:
        """Where members of the pool in one of `states` are, oldest first."""
        found = enumerate(self.pools[pool])
        return [at for at, member in found if self.members[member].state in states]

    def to_fields(self) -> list[str]:
        """As fields of a hash, in pairs."""
        rest = {
            "format": FORMAT,
            "pools": self.pools,
            "members": [asdict(one) for one in self.members.values()],
            "iteration": self.iteration,
            "began": self.began,
            "pending": self.pending,
            "mixtures": self.mixtures,
            "history": [asdict(one) for one in self.history],
            "attempts": [[list(key), count] for key, count in sorted(self.attempts.items())],
            "planned": self.planned,
            "failed": self.failed,
            "wins": [[*pair, *counts] for pair, counts in sorted(self.wins.items())],
            "ratings": {name: asdict(one) for name, one in sorted(self.ratings.items())},
            "played": self.played,
            "settled_at": self.settled_at,
            "restarting": self.restarting,
            "began_with": self.began_with,
            "stopped": self.stopped,
            "table": self.table.to_json(),
        }
        return ["state", json.dumps(rest), *self.slot_fields()]

    def slot_fields(self) -> list[str]:
        """Those that change with what is loaded."""
        casting = None if self.casting is None else asdict(self.casting)
        return ["slots", json.dumps(self.slots), "casting", json.dumps(casting)]

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> PopulationState:
        """What `to_fields` gave, bit for bit."""
        rest: dict[str, Any] = json.loads(fields["state"])
        casting = json.loads(fields["casting"])
        members = [Member(**one) for one in rest["members"]]
        return cls(
            pools=rest["pools"],
            table=PayoffTable.from_json(rest["table"]),
            members={one.member_id: one for one in members},
            iteration=rest["iteration"],
            began=rest["began"],
            pending=rest["pending"],
            mixtures=rest["mixtures"],
            history=[Solution(**one) for one in rest["history"]],
            attempts={tuple(key): count for key, count in rest["attempts"]},
            # Of a job that began before there were any.
            planned=rest.get("planned", 0),
            failed=rest.get("failed", 0),
            wins={(one, other): counts for one, other, *counts in rest["wins"]},
            ratings={name: Rating(**one) for name, one in rest["ratings"].items()},
            played=rest["played"],
            slots={slot: (one, n) for slot, (one, n) in json.loads(fields["slots"]).items()},
            casting=None if casting is None else Casting(**casting),
            settled_at=rest["settled_at"],
            # Of a job that began before there were any.
            restarting=rest.get("restarting", {}),
            began_with=rest.get("began_with", {}),
            stopped=rest["stopped"],
        )
