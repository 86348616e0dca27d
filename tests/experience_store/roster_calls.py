"""A store that may die at any call, together with the model of a job whose rosters change."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from services.experience_store.store import Store
from tests.support.crashing import MOMENTS, CrashError, CrashingDatabase
from tests.support.experience import Stage
from tests.support.roster_model import Job, Line, Step, Table

T = TypeVar("T")
POLICIES: Final = ("checker", "solver")
MOST_STEPS: Final = 4


class AbandonedError(Exception):
    """The store died, and no client repeats the call."""


class RosterCalls(RuleBasedStateMachine):
    """Makes calls that may kill the store, and applies them to the model."""

    url = ""
    stage: Stage
    job: Job

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = CrashingDatabase(self.url)
        self.numbers = itertools.count()
        self.versions = dict.fromkeys(POLICIES, 0)
        self.appended: dict[str, set[str]] = {policy: set() for policy in POLICIES}
        self.trained: dict[str, Counter[str]] = {policy: Counter() for policy in POLICIES}
        # Tables may not know the job's decision yet.
        self.lagging = False
        # Trajectory -> every step that names it.
        self.names: dict[str, list[int]] = {}
        self.busy = True

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def attempt(
        self,
        data: st.DataObject,
        call: Callable[[], Coroutine[Any, Any, T]],
        *,
        drops: bool = False,
    ) -> tuple[T, bool]:
        """Return the reply of a call, and whether it was repeated because the store died.

        With `drops` the caller may be gone too: then it raises `AbandonedError`.
        """
        if data.draw(st.integers(0, 3), "dies") != 0:
            return self.do(call()), False
        self.database.die(data.draw(st.integers(1, 5), "trip"), data.draw(st.sampled_from(MOMENTS)))
        try:
            return self.do(call()), False
        except CrashError:
            self.do(self.database.close())
            self.database = CrashingDatabase(self.url, clustered=data.draw(st.booleans(), "long"))
            self.stage.store = Store(self.database)
        finally:
            self.database.live()
        if drops and data.draw(st.booleans(), "abandoned"):
            raise AbandonedError
        if data.draw(st.booleans(), "sweeps"):
            self.do(self.stage.store.sweeper.sweep())
        return self.do(call()), True

    def tables(self) -> list[tuple[str, Table]]:
        return [(name, table) for step in self.job.steps for name, table in step.tables.items()]

    def running(self) -> list[tuple[int, str]]:
        """Return queries with trajectories to end, by every step that ever had them."""
        return [
            (step.number, query)
            for step in self.job.steps
            for query in [*step.queries, *step.dropped, *step.carried]
            if self.unended(step.number, query)
        ]

    def unended(self, number: int, query: str) -> list[str]:
        """Return trajectories without a reported ending, whether it still counts or not."""
        home = self.job.home(number, query)
        names = (f"{query}-t{index}" for index in range(home.size))
        return [name for name in names if name not in home.ended]

    def pending(self) -> list[tuple[str, str, Line]]:
        return [
            (policy, name, row)
            for policy, table in self.tables()
            for name, row in table.rows.items()
            if row.state == "P"
        ]

    def trainable(self) -> list[tuple[Step, str]]:
        """Return the steps that may be committed now: every policy commits in order."""
        found = []
        for policy in POLICIES:
            left = [s for s in self.job.steps if s.tables[policy].committed is None]
            if left and left[0].sealed and not left[0].tables[policy].ids("P"):
                found.append((left[0], policy))
        return found

    def settle(self, data: st.DataObject | None = None) -> None:
        """Let the next caller complete the decision."""
        self.lagging = False
        for step in self.job.steps:
            self.do(self.stage.store.steps.settle(self.stage.job, step.number))
