"""The durable state of a job's population: one Redis record that is replaced atomically."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from services.orchestrator.populations import on_demand
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import not_a_page
from services.orchestrator.state.redis import JobKeys, RedisAccess
from troupe.job import JobSpec
from troupe.rpc import NotFound
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

if TYPE_CHECKING:  # numpy and scipy are slow to import, and most jobs have no population
    from troupe.populations.payoffs import Members, PayoffTable, Rating

CANDIDATE: Final = "candidate"
SETTLED: Final = "settled"
RETIRED: Final = "retired"
# Probabilities by opponent: a member's id, or the name of a live learner (`live`).
Mixture = dict[str, float]
_LIVE: Final = "="
# Fields of `PopulationState` that are stored as plain JSON.
_PLAIN: Final = (
    *("pools", "iteration", "began", "pending", "mixtures", "planned", "failed", "played"),
    *("settled_at", "restarting", "began_with", "stopped"),
)
# Maximum digits of an index into a Redis list.
_DIGITS: Final = 18


class PopulationStore:
    """Store of population records and matches, by job.

    Writes raise `Superseded` if another orchestrator has taken the job over.
    """

    def __init__(self, redis: RedisAccess, jobs: JobStore) -> None:
        self._redis = redis
        self._jobs = jobs
        # Lock: matches and steps write concurrently, and an older state must not overwrite a newer
        # one.
        self._writing = WeakValueDictionary[str, asyncio.Lock]()

    async def load(self, job_id: str) -> PopulationState | None:
        """Return the population as saved last; None if it was never saved."""
        found = await self._redis.call("HGETALL", JobKeys(job_id).population)
        if not found:
            return None
        fields = {name.decode(): value.decode() for name, value in found.items()}
        # Imports numpy and scipy in a thread, or raises an error that names the missing library.
        await on_demand("decisions")
        return PopulationState.from_fields(fields)

    async def complete(self, job_id: str, spec: JobSpec, seconds: float) -> str:
        """Return why a population that was complete still is under `spec`, `seconds` after the job
        began; empty if it goes on."""
        state = await self.load(job_id)
        if state is None or not state.stopped:
            return ""
        why: str = (await on_demand("decisions")).stop_reason(spec, state, seconds)
        return why

    async def save(self, job_id: str, epoch: int, state: PopulationState) -> None:
        """Replace the record. Raises `Superseded`."""
        async with self._writing.setdefault(job_id, asyncio.Lock()):
            await self._write(job_id, epoch, state.to_fields())

    async def save_slots(
        self,
        job_id: str,
        epoch: int,
        state: PopulationState,
        loaded: Mapping[str, tuple[str, int]],
    ) -> None:
        """Write which members the slots serve, with the ones that are about to be `loaded`.

        `state` is changed once the write is durable. Raises `Superseded`.
        """
        async with self._writing.setdefault(job_id, asyncio.Lock()):
            slots = {**state.slots, **loaded}
            await self._write(job_id, epoch, replace(state, slots=slots).slot_fields())
            state.slots = slots

    async def _write(self, job_id: str, epoch: int, fields: list[str]) -> None:
        await self._fenced("population", [JobKeys(job_id).population], job_id, epoch, fields)

    async def answers(self, job_id: str, names: Collection[str]) -> dict[str, str]:
        """Return the answers of the named members that `add_answers` has stored."""
        if not names:
            return {}
        found = await self._redis.call("HMGET", JobKeys(job_id).answers, *names)
        kept = zip(names, found, strict=True)
        return {name: one.decode() for name, one in kept if one is not None}

    async def forget_answers(self, job_id: str, epoch: int, *, but: Collection[str]) -> None:
        """Delete the answers of all members except those in `but`. Raises `Superseded`."""
        key = JobKeys(job_id).answers
        names = {name.decode() for name in await self._redis.call("HKEYS", key)}
        if over := names.difference(but):
            await self._jobs.check_epoch(job_id, epoch)
            await self._redis.call("HDEL", key, *over)

    async def add_answers(self, job_id: str, epoch: int, answers: Mapping[str, str]) -> None:
        """Store members' answers in a game, JSON by `{pool}/{member}`. Raises `Superseded`."""
        args = [part for item in answers.items() for part in item]
        await self._fenced("population", [JobKeys(job_id).answers], job_id, epoch, args)

    async def add_matches(
        self, job_id: str, epoch: int, matches: Mapping[str, orchestrator_pb.Match]
    ) -> None:
        """Store outcomes of matches, by trajectory id. Raises `Superseded`."""
        if not matches:
            return
        args = [part for name, one in matches.items() for part in (name, one.SerializeToString())]
        await self._fenced("matches", JobKeys(job_id).matches, job_id, epoch, args)

    async def matches(
        self, job_id: str, names: Collection[str]
    ) -> dict[str, orchestrator_pb.Match]:
        """Return the outcomes of the named matches that have ended, by trajectory id."""
        if not names:
            return {}
        found = await self._redis.call("HMGET", JobKeys(job_id).matches[1], *names)
        return {
            name: orchestrator_pb.Match.FromString(one)
            for name, one in zip(names, found, strict=True)
            if one is not None
        }

    async def ended(self, job_id: str) -> int:
        """Return the number of matches that have ended, counted in the payoffs or not."""
        return int(await self._redis.call("LLEN", JobKeys(job_id).matches[0]))

    async def page(
        self, job_id: str, size: int, token: str, member_id: str = ""
    ) -> tuple[list[orchestrator_pb.Match], str]:
        """Return up to `size` matches, newest first, after the match `token`, and the next token.

        Raises InvalidArgument for a token of another list.
        """
        order, kept = JobKeys(job_id).matches
        # The list only grows, so that an index in it always names the same match.
        before = int(await self._redis.call("LLEN", order))
        if token:
            before = await self._place(order, token)
        page: list[orchestrator_pb.Match] = []
        place = before
        while before > 0 and len(page) < size:
            first = max(0, before - size)
            names = await self._redis.call("LRANGE", order, first, before - 1)
            found = await self._redis.call("HMGET", kept, *names)
            for at in range(before - 1, first - 1, -1):
                match = orchestrator_pb.Match.FromString(found[at - first])
                if member_id and member_id not in match.members.values():
                    continue
                page.append(match)
                place = at
                if len(page) == size:
                    break
            before = first
        more = bool(page) and len(page) == size and place > 0
        return page, f"{place}:{page[-1].trajectory_id}" if more else ""

    async def _place(self, order: str, token: str) -> int:
        """Return the index of the match that `token` names."""
        place, _, name = token.partition(":")
        if place.isdecimal() and len(place) < _DIGITS:
            found = await self._redis.call("LINDEX", order, int(place))
            if found is not None and found.decode() == name:
                return int(place)
        raise not_a_page(token)

    async def _fenced(
        self,
        script: str,
        where: Iterable[str],
        job_id: str,
        epoch: int,
        args: Iterable[str | bytes],
    ) -> None:
        """Run a script that writes only if `epoch` is the job's newest. Raises `Superseded`."""
        keys = [JobKeys(job_id).record, *where]
        if await self._redis.run_script(script, keys, [str(epoch), *args]) != b"written":
            await self._jobs.check_epoch(job_id, epoch)


def no_population(job_id: str) -> NotFound:
    """Return the error for a job without a population."""
    return NotFound(
        f"job {job_id} has no population",
        kind="no_population",
        field="job_id",
        value=job_id,
        remedy="Give its specification a `population:` section.",
    )


def live(policy: str) -> str:
    """Return the name of a live learner in a mixture, as opposed to one of its frozen versions."""
    return f"{_LIVE}{policy}"


def live_policy(name: str) -> str | None:
    """Return the learner of a name that `live` made; None for a member's id."""
    return name[1:] if name.startswith(_LIVE) else None


@dataclass
class FrozenMember:
    """A frozen version of a learner."""

    member_id: str
    learner: str
    kind: str
    version: int
    checksum: str
    step: int
    """Optimizer steps that its learner had done."""
    iteration: int
    parent: str
    """The member from which its learner continued."""
    state: str
    num_bytes: int
    frozen_at: float


@dataclass
class Solution:
    """The meta-strategy that was computed after one iteration."""

    iteration: int
    step: int
    mixtures: dict[str, Mixture]
    """By pool: the meta-strategy over its members."""
    values: list[float]
    """By player: the expected payoff."""
    gains: dict[str, float]
    """By pool: how much more the newest members get than the previous mixture."""
    nash_conv: float | None = None
    """Sum of the agents' gains from best responses in the whole game, if it can be enumerated."""


@dataclass
class Casting:
    """The opponents drawn for training, valid until the next draw."""

    step: int
    """The first step to which it applies."""
    members: dict[str, str]
    """By slot: the member in it."""
    shares: dict[str, dict[str, Mixture]]
    """By learner and pool: probabilities of slots and of `live` learners."""


@dataclass
class PopulationState:
    """The whole state of a population, from which a job resumes.

    Cells of `table` are indices into `pools`.
    """

    pools: dict[str, list[str]]
    """By pool: member ids, oldest first."""
    table: PayoffTable
    members: dict[str, FrozenMember] = field(default_factory=dict)
    iteration: int = 0
    began: int = 0
    """Steps that were done when the iteration began."""
    pending: bool = True
    """Whether decisions on the newest members' payoffs are still due."""
    mixtures: dict[str, dict[str, Mixture]] = field(default_factory=dict)
    """By learner and pool: probabilities of opponents."""
    history: list[Solution] = field(default_factory=list)
    attempts: dict[Members, int] = field(default_factory=dict)
    """By cell: matches that have ended, failed ones included."""
    planned: int = 0
    """Matches of the iteration that have ended, failed ones included."""
    failed: int = 0
    """Matches of the iteration that have failed."""
    wins: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By member and opponent: matches won, drawn, played."""
    ratings: dict[str, Rating] = field(default_factory=dict)
    """By member: its skill rating."""
    played: int = 0
    slots: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By slot: its member, and the slot's version, which counts the loads."""
    casting: Casting | None = None
    settled_at: dict[str, int] = field(default_factory=dict)
    """By learner: the iteration in which one of its members was last settled."""
    restarting: dict[str, int] = field(default_factory=dict)
    """By learner due for a restart from its first weights: the version before the restart."""
    began_with: dict[str, int] = field(default_factory=dict)
    """By restarted learner: the version of the restart."""
    stopped: str = ""

    def win_rates(self) -> dict[tuple[str, str], float]:
        """Return the win rate of the first of each pair of members, draws counting half."""
        return {
            pair: (won + 0.5 * drawn) / played for pair, (won, drawn, played) in self.wins.items()
        }

    def newest(self, learner: str) -> FrozenMember:
        """Return a learner's newest member."""
        own = [one for one in self.members.values() if one.learner == learner]
        return max(own, key=lambda one: (one.iteration, one.version))

    def first(self, learner: str) -> FrozenMember:
        """Return a learner's first member, whose weights it restarts from."""
        own = [one for one in self.members.values() if one.learner == learner]
        return min(own, key=lambda one: one.version)

    def parent(self, learner: str) -> FrozenMember:
        """Return the member whose weights the learner has continued from."""
        newest = self.newest(learner)
        if self.began_with.get(learner, 0) > newest.version:
            return self.first(learner)
        return newest

    def unneeded(self, since: int = 0) -> list[FrozenMember]:
        """Return the retired members, from iteration `since` on, that are in no slot and no
        mixture."""
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
        """Return the indices of a pool's members in one of `states`, oldest first."""
        found = enumerate(self.pools[pool])
        return [at for at, member in found if self.members[member].state in states]

    def to_fields(self) -> list[str]:
        """Return the fields of the Redis hash, as a flat list of names and values."""
        values = {name: getattr(self, name) for name in _PLAIN} | {
            "members": [asdict(one) for one in self.members.values()],
            "history": [asdict(one) for one in self.history],
            "attempts": [[list(key), count] for key, count in sorted(self.attempts.items())],
            "wins": [[*pair, *counts] for pair, counts in sorted(self.wins.items())],
            "ratings": {name: asdict(one) for name, one in sorted(self.ratings.items())},
            "table": self.table.to_json(),
        }
        return ["state", json.dumps(values), *self.slot_fields()]

    def slot_fields(self) -> list[str]:
        """Return the fields that change when members are loaded into slots, as `to_fields`."""
        casting = None if self.casting is None else asdict(self.casting)
        return ["slots", json.dumps(self.slots), "casting", json.dumps(casting)]

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> PopulationState:
        """Invert `to_fields`, bit for bit."""
        from troupe.populations.payoffs import PayoffTable, Rating

        values: dict[str, Any] = json.loads(fields["state"])
        casting = json.loads(fields["casting"])
        members = [FrozenMember(**one) for one in values["members"]]
        return cls(
            table=PayoffTable.from_json(values["table"]),
            members={one.member_id: one for one in members},
            history=[Solution(**one) for one in values["history"]],
            attempts={tuple(key): count for key, count in values["attempts"]},
            wins={(one, other): counts for one, other, *counts in values["wins"]},
            ratings={name: Rating(**one) for name, one in values["ratings"].items()},
            slots={slot: (one, n) for slot, (one, n) in json.loads(fields["slots"]).items()},
            casting=None if casting is None else Casting(**casting),
            **{name: values[name] for name in _PLAIN},
        )
