"""A model of one policy's step, without Redis, Lua or a clock, for comparison in the store's
tests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    """The model's record of a sample."""

    query: str
    reward: float | None
    state: str = "P"
    gone: bool = False
    """Dropped after its group's statistics were final: its value is gone."""


@dataclass
class Model:
    """One step of one policy; a group is the samples of a query."""

    queries: tuple[str, ...]
    group_size: int
    ended: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    live: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    fenced: dict[str, str] = field(default_factory=dict)
    owner: str | None = None
    committed: str | None = None
    redundant: int = 0
    failed: set[str] = field(default_factory=set)
    """Trajectories that ended without completing."""
    spared: dict[str, int] = field(default_factory=dict)
    """Query whose group was complete -> trajectories that had not ended."""

    @property
    def size(self) -> int:
        """Trajectories that a query begins with."""
        return self.group_size + self.redundant

    def ended_of(self, query: str) -> int:
        own = sum(1 for of in self.ended.values() if of == query)
        return own + self.spared.get(query, 0)

    def end(self, query: str, trajectory: str, *, completed: bool) -> bool:
        """A trajectory ends; whether that counts."""
        if trajectory in self.ended or query in self.spared:
            return False
        self.ended[trajectory] = query
        if not completed:
            self.failed.add(trajectory)
        members = sum(of == query for t, of in self.ended.items() if t not in self.failed)
        if completed and members == self.group_size and self.ended_of(query) < self.size:
            self.spared[query] = self.size - self.ended_of(query)
        return True

    def ripen(self) -> None:
        """Complete groups become ready."""
        for query in self.queries:
            members = [row for row in self.rows.values() if row.query == query]
            pending = [row for row in members if row.state == "P"]
            if self.ended_of(query) == self.size and all(row.reward is not None for row in pending):
                for row in pending:
                    row.state = "R"

    @property
    def sealed(self) -> bool:
        return sum(map(self.ended_of, self.queries)) == len(self.queries) * self.size

    def ids(self, state: str) -> list[str]:
        return sorted(name for name, row in self.rows.items() if row.state == state)

    @property
    def may_train(self) -> bool:
        """Claims came before: otherwise most lives would be short and undisturbed."""
        idle = self.sealed and not self.ids("P") and self.committed is None
        return idle and (len(self.known_claims) > 1 or not self.rows)

    @property
    def known_claims(self) -> list[str]:
        return sorted({*self.live, *self.lost})

    def held(self, claimant: str) -> list[str]:
        return [name for by, names in self.live.values() if by == claimant for name in names]

    def claims_of(self, claimant: str) -> list[str]:
        return [name for name, (by, _) in self.live.items() if by == claimant]

    def take(self, claim: str, claimant: str, names: list[str]) -> None:
        """A claim was granted."""
        self.live[claim] = (claimant, names)
        self.fenced.pop(claimant, None)
        self.owner = self.owner or claimant
        for name in names:
            self.rows[name].state = "C"

    def lose(self, claim: str) -> None:
        """A claim is over; its samples are ready again."""
        claimant, names = self.live.pop(claim)
        self.lost[claim] = claimant
        for name in names:
            self.rows[name].state = "R"

    def drop_gone(self, claim: str, names: list[str]) -> list[str]:
        """Drop values of samples; return the claim's other samples."""
        claimant, held = self.live[claim]
        for name in set(names) & set(held):
            self.rows[name].state, self.rows[name].gone = "D", True
        kept = [name for name in held if name not in names]
        self.live[claim] = (claimant, kept)
        return kept

    def expire(self, claim: str) -> None:
        """A lease ran out: its holder must start over."""
        self.fenced[self.live[claim][0]] = "expired"
        self.lose(claim)

    def release(self, claimant: str) -> None:
        """A claimant starts afresh, unless somebody superseded it."""
        for claim in self.claims_of(claimant):
            self.lose(claim)
        if not (self.fenced.get(claimant) == "superseded" and self.is_fenced(claimant)):
            self.fenced.pop(claimant, None)

    def supersede(self) -> None:
        """End all claims; the next claimant continues."""
        known = {by for by, _ in self.live.values()} | set(self.lost.values())
        for claim in list(self.live):
            self.lose(claim)
        self.fenced |= dict.fromkeys(known, "superseded")
        self.owner = None

    def may_commit(self, claimant: str, claims: list[str], *, empty: bool) -> bool:
        """Whether a commit that names `claims` must be accepted."""
        if self.is_fenced(claimant) or not self.sealed:
            return False
        if not set(claims) <= set(self.claims_of(claimant)):
            return False
        samples = {name for claim in claims for name in self.live[claim][1]}
        kept = {name for name, row in self.rows.items() if row.state != "D"}
        return samples == kept and empty == (not samples)

    def commit(self, outcome: str, samples: list[str]) -> None:
        """The step is over."""
        self.committed = outcome
        for name in samples:
            self.rows[name].state = "D" if outcome == "STEP_OUTCOME_SKIPPED" else "T"
        self.live.clear()
        self.lost.clear()

    def is_fenced(self, claimant: str) -> bool:
        why = self.fenced.get(claimant)
        if why == "superseded":
            return self.owner not in (None, claimant)
        return why is not None

    def outcome_of_claim(self, claimant: str, size: int) -> tuple[str, list[str]]:
        """Return the expected answer of a fresh claim."""
        if self.committed is not None:
            return "EXHAUSTED", []
        if self.is_fenced(claimant):
            return "LOST", []
        ready = self.ids("R")
        final = self.sealed and not self.ids("P")
        if len(ready) >= size or (ready and final):
            return "CLAIMED", ready[:size]
        if final and len(self.ids("C")) == len(self.held(claimant)):
            return "EXHAUSTED", []
        return "WAIT", []
