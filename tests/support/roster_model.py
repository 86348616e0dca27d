"""The required behaviour of steps whose rosters change, without Redis, Lua, a clock or a crash."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from tests.support.experience_model import Model, Row


@dataclass
class Line(Row):
    """A row and its outcome."""

    trajectory: str = ""
    reason: str = ""


class Table(Model):
    """One step of one policy, as `Model`; a group is the samples of a query."""

    rows: dict[str, Line]  # type: ignore[assignment]

    def __init__(self, step: Step) -> None:
        super().__init__((), step.group_size)
        self.step = step

    @property
    def sealed(self) -> bool:
        return self.step.sealed

    def ripen(self) -> None:
        for query in {row.query for row in self.rows.values()}:
            pending = [r for r in self.rows.values() if r.query == query and r.state == "P"]
            rewards = {row.reward for row in pending}
            if None in rewards or not self.step.complete(query):
                continue
            several = len({row.trajectory for row in pending}) > 1
            for row in pending:
                row.state = "R"
                if self.step.signal and several and len(rewards) == 1:
                    row.state, row.reason = "D", "no_signal"

    def reasons(self) -> Counter[str]:
        """Return the table's expected count of dropped samples."""
        found = Counter(row.reason for row in self.rows.values() if row.state == "D")
        found.update(reason for _, reason in self.step.failed.values())
        found["redundant"] += sum(self.step.spared.values())
        for lacking, reason in self.step.dropped.values():
            found[reason] += lacking
        return +found


@dataclass
class Step:
    """One step of a job, and its tables."""

    number: int
    group_size: int
    signal: bool
    """Groups without signal are dropped."""
    policies: tuple[str, ...]
    queries: list[str]
    held: bool
    redundant: int = 0
    ended: dict[str, str] = field(default_factory=dict)
    """Trajectory -> query."""
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Trajectory without rows -> query, reason."""
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Query -> trajectories that had not ended, reason."""
    carried: dict[str, int] = field(default_factory=dict)
    """Query -> step."""
    spared: dict[str, int] = field(default_factory=dict)
    """Query whose group was complete -> trajectories that had not ended."""
    tables: dict[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = {policy: Table(self) for policy in self.policies}

    @property
    def size(self) -> int:
        """Trajectories that a query begins with."""
        return self.group_size + self.redundant

    def ended_of(self, query: str) -> int:
        own = sum(1 for of in self.ended.values() if of == query)
        return own + self.spared.get(query, 0)

    def completed_of(self, query: str) -> int:
        return sum(1 for t, of in self.ended.items() if of == query and t not in self.failed)

    def complete(self, query: str) -> bool:
        return query in self.queries and self.ended_of(query) == self.size

    @property
    def expected_trajectories(self) -> int:
        return (len(self.queries) + len(self.dropped)) * self.size

    @property
    def ended_trajectories(self) -> int:
        dropped = sum(lacking for lacking, _ in self.dropped.values())
        return len(self.ended) + dropped + sum(self.spared.values())

    @property
    def sealed(self) -> bool:
        return not self.held and self.ended_trajectories == self.expected_trajectories

    def ripen(self) -> None:
        for table in self.tables.values():
            table.ripen()


@dataclass
class Job:
    """All steps of a job."""

    group_size: int
    signal: bool
    policies: tuple[str, ...]
    redundant: int = 0
    steps: list[Step] = field(default_factory=list)

    def open(self, queries: list[str], *, held: bool) -> Step:
        step = Step(
            len(self.steps),
            self.group_size,
            self.signal,
            self.policies,
            [*queries],
            held,
            self.redundant,
        )
        self.steps.append(step)
        return step

    def home(self, step: int, query: str) -> Step:
        """The step that calls reach which name `step`."""
        while (to := self.steps[step].carried.get(query)) is not None:
            step = to
        return self.steps[step]

    def end(
        self, step: int, query: str, trajectory: str, rows: dict[str, dict[str, Line]], reason: str
    ) -> bool:
        """A trajectory ends with `rows` (policy -> sample -> row), or for a reason without any."""
        home = self.home(step, query)
        if trajectory in home.ended or query in home.dropped or query in home.spared:
            return False
        home.ended[trajectory] = query
        if reason:
            home.failed[trajectory] = (query, reason)
        for policy, lines in rows.items():
            home.tables[policy].rows |= lines
        full = home.redundant and home.completed_of(query) == home.group_size
        if full and not reason and (left := home.size - home.ended_of(query)):
            home.spared[query] = left
        home.ripen()
        return True

    def amend(
        self,
        step: int,
        *,
        add: list[str],
        drop: list[str],
        reason: str,
        carry: list[str],
        carry_to: int,
        close: bool,
    ) -> list[str]:
        """Change a roster; the queries that were to leave but are complete."""
        home = self.steps[step]
        complete = [query for query in [*drop, *carry] if home.complete(query)]
        home.queries += add
        for query in (q for q in drop if q not in complete):
            home.dropped[query] = (home.size - home.ended_of(query), reason)
            home.queries.remove(query)
            for table in home.tables.values():
                for row in table.rows.values():
                    if row.query == query and row.state == "P":
                        row.state, row.reason = "D", reason
        for query in (q for q in carry if q not in complete):
            there = self.steps[carry_to]
            home.queries.remove(query)
            home.carried[query] = carry_to
            there.queries.append(query)
            for trajectory in [t for t, of in home.ended.items() if of == query]:
                there.ended[trajectory] = home.ended.pop(trajectory)
                if trajectory in home.failed:
                    there.failed[trajectory] = home.failed.pop(trajectory)
            for policy, table in home.tables.items():
                for name in [n for n, row in table.rows.items() if row.query == query]:
                    there.tables[policy].rows[name] = table.rows.pop(name)
        home.held = home.held and not close
        return complete

    def copy(self) -> Job:
        """This job as it is now."""
        return copy.deepcopy(self)
