"""Steps that overlap and change their rosters, against a model, while the store dies at any time.

Whatever the order of calls and wherever the store dies, every row ends TRAINED once or DROPPED
once, with its reason, and all tables agree with what the job decided.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.experience_store.records import Record
from services.experience_store.store import Store
from tests.support.crashing import MOMENTS, CrashError, CrashingDatabase
from tests.support.experience import Response, Stage, ids_of, make_sample
from tests.support.roster_model import Job, Line, Step, Table
from troupe.rpc import FailedPrecondition, new_id
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")
POLICIES: Final = ("checker", "solver")
CLAIMANTS = st.sampled_from(["alice", "bob"])
REWARDS = st.sampled_from([None, None, 0.0, 1.0])
MOST_STEPS: Final = 4


class AbandonedError(Exception):
    """The store died, and nobody repeats the call."""


class Life(RuleBasedStateMachine):
    """Calls of an orchestrator, workers and trainers; each may find the store dying."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = CrashingDatabase(self.url)
        self.numbers = itertools.count()
        self.versions = dict.fromkeys(POLICIES, 0)
        self.appended: dict[str, set[str]] = {policy: set() for policy in POLICIES}
        self.trained: dict[str, Counter[str]] = {policy: Counter() for policy in POLICIES}
        # Tables may not know yet what the job decided.
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
        """The reply of a call, and whether it was repeated because the store died.

        With `drops` the caller may be gone too: then it raises `AbandonedError`.
        """
        if data.draw(st.integers(0, 3), "dies") != 0:
            return self.do(call()), False
        self.database.die(data.draw(st.integers(1, 5), "trip"), data.draw(st.sampled_from(MOMENTS)))
        try:
            return self.do(call()), False
        except CrashError:
            self.do(self.database.close())
            self.database = CrashingDatabase(self.url)
            self.stage.store = Store(self.database)
        finally:
            self.database.live()
        if drops and data.draw(st.booleans(), "abandoned"):
            raise AbandonedError
        if data.draw(st.booleans(), "sweeps"):
            self.do(self.stage.store.sweeper.sweep())
        return self.do(call()), True

    def teardown(self) -> None:
        try:
            if not self.busy:
                self.finish()
        finally:
            self.do(self.stage.store.tables.drop(self.stage.job, purge_log=True))
            left = self.do(self.database.execute("KEYS", f"*{self.stage.job}*"))
            self.do(self.database.close())
            self.runner.close()
        assert left == []

    @initialize(
        group_size=st.sampled_from([1, 2, 2]),
        redundant=st.sampled_from([0, 0, 1, 2]),
        signal=st.booleans(),
        data=st.data(),
    )
    def begin(self, group_size: int, redundant: int, signal: bool, data: st.DataObject) -> None:
        store = Store(self.database)
        self.stage = Stage(store, new_id("job"), POLICIES, (), group_size, redundant=redundant)
        self.job = Job(group_size, signal, POLICIES, redundant)
        self.do(store.tables.create(self.stage.job, POLICIES, [], drop_without_signal=signal))
        for _ in range(2):
            self.open(data)
        self.busy = False

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One call out of those that mean something now, the likelier the more often named."""
        self.busy = True
        job, actions = self.job, ["settle"] if self.lagging else ["claim"]
        actions += ["open"] if len(job.steps) < MOST_STEPS else []
        actions += ["end"] * 7 if self.running() else []
        actions += ["end_again"] if self.names else []
        actions += ["amend"] * 4 if any(step.held for step in job.steps) else []
        actions += ["amend_closed"] if not all(step.held for step in job.steps) else []
        if not self.lagging:
            actions += ["fill"] * 4 + ["drop_row"] if self.pending() else []
            actions += ["claim"] * 3 if any(table.ids("R") for _, table in self.tables()) else []
            actions += (
                ["expire", "release"] if any(table.live for _, table in self.tables()) else []
            )
            actions += ["commit"] * 2 if self.trainable() else []
        getattr(self, data.draw(st.sampled_from(actions), "action"))(data)
        self.busy = False

    # -- what there is to do

    def tables(self) -> list[tuple[str, Table]]:
        return [(name, table) for step in self.job.steps for name, table in step.tables.items()]

    def running(self) -> list[tuple[int, str]]:
        """Queries, by every step that ever had them, that have trajectories to end."""
        return [
            (step.number, query)
            for step in self.job.steps
            for query in [*step.queries, *step.dropped, *step.carried]
            if self.unended(step.number, query)
        ]

    def unended(self, number: int, query: str) -> list[str]:
        """Trajectories whose ending nobody has told, whether it still counts or not."""
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
        """Steps that may be committed now: every policy commits in order."""
        found = []
        for policy in POLICIES:
            left = [s for s in self.job.steps if s.tables[policy].committed is None]
            if left and left[0].sealed and not left[0].tables[policy].ids("P"):
                found.append((left[0], policy))
        return found

    # -- the orchestrator

    def fresh(self, number: int) -> list[str]:
        return [f"q{next(self.numbers)}" for _ in range(number)]

    def open(self, data: st.DataObject) -> None:
        queries = self.fresh(data.draw(st.integers(1, 3)))
        held = data.draw(st.sampled_from([True, True, True, False]))
        number = len(self.job.steps)
        opened, repeated = self.attempt(
            data, lambda: self.stage.open(number, 0, held_open=held, queries=queries)
        )
        assert opened == (False, []) or (repeated and opened == (True, []))
        self.job.open(queries, held=held)

    def amend(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([step for step in self.job.steps if step.held]))
        later = [s.number for s in self.job.steps[step.number + 1 :] if s.held]
        fates = ["carry", "drop", "stay"] if later else ["drop", "stay"]
        fate = {query: data.draw(st.sampled_from(fates)) for query in step.queries}
        changes: dict[str, Any] = {
            "add": self.fresh(data.draw(st.integers(0, 1))),
            "drop": [query for query in step.queries if fate[query] == "drop"],
            "reason": data.draw(st.sampled_from(["surplus", "stale"])),
            "carry": [query for query in step.queries if fate[query] == "carry"],
            "carry_to": data.draw(st.sampled_from(later)) if later else 0,
            "close": not data.draw(st.integers(0, 2)),
        }
        self.stage.step = step.number
        after = self.job.copy()
        expected = after.amend(step.number, **changes)
        try:
            complete, _ = self.attempt(data, lambda: self.stage.amend(**changes), drops=True)
            assert complete == expected
        except AbandonedError:
            # One or the other, never half; and who comes next completes it.
            status = self.do(self.stage.status())
            if (status.query_ids, status.closed) != (
                after.steps[step.number].queries,
                not after.steps[step.number].held,
            ):
                return
            self.lagging = True
        self.job = after
        for step in self.job.steps:
            step.ripen()

    def amend_closed(self, data: st.DataObject) -> None:
        closed = [step for step in self.job.steps if not step.held]
        self.stage.step = data.draw(st.sampled_from(closed)).number
        with pytest.raises(FailedPrecondition, match="closed"):
            self.attempt(data, lambda: self.stage.amend(add=self.fresh(1)))

    def settle(self, data: st.DataObject | None = None) -> None:
        """Whoever comes next completes what was decided."""
        self.lagging = False
        for step in self.job.steps:
            self.do(self.stage.store.steps.settle(self.stage.job, step.number))

    # -- rollout and rewards

    def end(self, data: st.DataObject) -> None:
        number, query = data.draw(st.sampled_from(self.running()))
        trajectory = data.draw(st.sampled_from(self.unended(number, query)))
        self.end_as(data, number, query, trajectory)

    def end_again(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.names)))
        query = trajectory.partition("-")[0]
        self.end_as(data, data.draw(st.sampled_from(self.names[trajectory])), query, trajectory)

    def end_as(self, data: st.DataObject, number: int, query: str, trajectory: str) -> None:
        reason = data.draw(st.sampled_from(["", "", "", "deadline: 9 s"]))
        rows: dict[str, dict[str, Line]] = {}
        samples = []
        for turn, policy in enumerate(POLICIES):
            if reason or not data.draw(st.integers(0, 4)):
                continue
            reward = data.draw(REWARDS)
            sample = make_sample(
                query, turn, trajectory, policy=policy, agent=policy, reward=reward
            )
            samples.append(sample)
            line = Line(query, reward, trajectory=trajectory)
            rows[policy] = {sample.sample_id: line}
        state, id = "FAILED" if reason else "COMPLETED", f"a{next(self.numbers)}"
        self.stage.step = number
        home, after = self.job.home(number, query), self.job.copy()
        expected = after.end(number, query, trajectory, rows, reason.partition(":")[0])
        try:
            accepted, _ = self.attempt(
                data,
                lambda: self.stage.end(
                    query, trajectory, state, samples, reason=reason, attempt=id
                ),
                drops=True,
            )
            assert accepted == expected
            assert self.stage.counted == home.number
            self.check_group(after.home(number, query), query, expected=expected)
        except AbandonedError:
            self.stage.step = home.number
            ending = self.do(self.stage.status()).endings.get(trajectory)
            if ending is None or ending.attempt != id:
                return
            self.lagging = True
        self.job = after
        if expected:
            self.names[trajectory] = [
                step.number
                for step in self.job.steps
                if query in step.carried or step.number == home.number
            ]
            for policy, lines in rows.items():
                self.appended[policy] |= set(lines)

    def check_group(self, home: Step, query: str, *, expected: bool) -> None:
        """Whether its group is complete, whoever ends a trajectory of it is told."""
        appended = self.stage.appended
        assert appended is not None
        if expected:
            left_with_it = query in home.spared
            assert (appended.group_complete, appended.drop_reason) == (left_with_it, "")
        elif appended.drop_reason:
            dropped = home.dropped.get(query, (0, "redundant"))
            assert appended.drop_reason == dropped[1]

    def fill(self, data: st.DataObject) -> None:
        policy, name, row = data.draw(st.sampled_from(self.pending()))
        reward = data.draw(st.sampled_from([0.0, 1.0]))
        accepted = self.fill_as(data, policy, name, row, reward=reward)
        assert accepted is None or accepted == (row.reward is None)
        if row.reward is None:
            row.reward = reward
            for step in self.job.steps:
                step.ripen()

    def drop_row(self, data: st.DataObject) -> None:
        policy, name, row = data.draw(st.sampled_from(self.pending()))
        assert self.fill_as(data, policy, name, row, drop_reason="reward_timeout: 1 s") in (
            True,
            None,
        )
        row.state, row.reason = "D", "reward_timeout"
        for step in self.job.steps:
            step.ripen()

    def fill_as(
        self, data: st.DataObject, policy: str, name: str, row: Line, **value: Any
    ) -> bool | None:
        """Whether it was accepted, None when nobody can know; any step that had it is named."""
        steps = [s for s in self.job.steps if row.query in [*s.queries, *s.carried]]
        self.stage.step = data.draw(st.sampled_from(steps)).number
        (_, accepted), repeated = self.attempt(
            data, lambda: self.stage.fill(name, policy=policy, **value)
        )
        return None if repeated else accepted

    # -- trainers

    def turn_to(self, data: st.DataObject) -> tuple[str, Table]:
        policy, table = data.draw(st.sampled_from(self.tables()))
        self.stage.step = table.step.number
        return policy, table

    def claim(self, data: st.DataObject) -> None:
        policy, table = self.turn_to(data)
        self.claim_as(data, policy, table, data.draw(CLAIMANTS), data.draw(st.integers(1, 4)))

    def claim_as(
        self, data: st.DataObject, policy: str, table: Table, claimant: str, size: int
    ) -> None:
        outcome, expected = table.outcome_of_claim(claimant, size)
        name = f"c{next(self.numbers)}"

        def call() -> Coroutine[Any, Any, Response]:
            return self.stage.claim(claimant, claim=name, policy=policy, samples=size)

        if outcome == "LOST":
            with pytest.raises(FailedPrecondition, match="lost"):
                self.attempt(data, call)
            return
        response, _ = self.attempt(data, call)
        assert Response.Outcome.Name(response.outcome) == f"OUTCOME_{outcome}"
        assert ids_of(response) == expected
        if outcome == "CLAIMED":
            table.take(name, claimant, expected)

    def release(self, data: st.DataObject) -> None:
        policy, table = self.turn_to(data)
        self.release_as(data, policy, table, data.draw(CLAIMANTS))

    def release_as(self, data: st.DataObject, policy: str, table: Table, claimant: str) -> None:
        self.attempt(data, lambda: self.stage.release(claimant, policy=policy))
        table.release(claimant)

    def expire(self, data: st.DataObject) -> None:
        policy, table = data.draw(st.sampled_from([p for p in self.tables() if p[1].live]))
        claim = data.draw(st.sampled_from(sorted(table.live)))
        leases = f"troupe:{{{self.stage.job}/{policy}}}:{table.step.number}:leases"
        self.do(self.database.execute("ZADD", leases, "XX", 0, claim))
        table.expire(claim)

    def commit(self, data: st.DataObject) -> None:
        """What a trainer does that starts afresh and is not disturbed, but by crashes."""
        step, policy = data.draw(st.sampled_from(self.trainable()))
        self.train(data, step, policy, data.draw(CLAIMANTS), data.draw(st.integers(1, 3)))

    def train(self, data: st.DataObject, step: Step, policy: str, claimant: str, size: int) -> None:
        table, self.stage.step = step.tables[policy], step.number
        for other in ("alice", "bob"):
            self.release_as(data, policy, table, other)
        while table.outcome_of_claim(claimant, size)[0] == "CLAIMED":
            self.claim_as(data, policy, table, claimant, size)
        names = [name for claim in table.claims_of(claimant) for name in table.live[claim][1]]
        outcome = store_pb.STEP_OUTCOME_APPLIED if names else store_pb.STEP_OUTCOME_EMPTY
        version = self.versions[policy] + bool(names)
        (commit, existed), repeated = self.attempt(
            data,
            lambda: self.stage.commit(
                table.claims_of(claimant),
                claimant,
                policy=policy,
                version=version,
                outcome=outcome,
            ),
        )
        assert repeated or not existed
        assert commit.num_samples == len(names)
        self.versions[policy] = version
        self.trained[policy].update(names)
        table.commit(store_pb.StepOutcome.Name(outcome), names)

    # -- what holds at any time, and in the end

    @invariant()
    def the_store_is_as_the_model(self) -> None:
        if self.busy or self.lagging:
            return
        self.busy = True
        for step in self.job.steps:
            self.stage.step = step.number
            status = self.do(self.stage.status(queries=True))
            assert status.query_ids == step.queries
            assert (status.closed, status.sealed) == (not step.held, step.sealed)
            assert status.expected == step.expected_trajectories
            assert status.ended == step.ended_trajectories
            assert status.complete == sum(step.complete(query) for query in step.queries)
            assert status.ended_trajectories == sorted(step.ended)
            rows: dict[str, list[Line]] = {query: [] for query in step.queries}
            for counts in status.counts:
                table = step.tables[counts.policy]
                self.compare(counts, table)
                for row in table.rows.values():
                    rows.setdefault(row.query, []).append(row)
            for query in status.queries:
                states = Counter(row.state for row in rows[query.query_id])
                assert query.trajectories_ended == step.ended_of(query.query_id)
                assert query.complete == step.complete(query.query_id)
                assert (query.samples, query.pending) == (states.total(), states["P"])
                assert query.kept == states.total() - states["D"]
        self.busy = False

    def compare(self, counts: store_pb.PolicyCounts, table: Table) -> None:
        key = f"troupe:{{{self.stage.job}/{counts.policy}}}:{counts.step}:book"
        book = self.do(self.database.execute("HGETALL", key))
        stored = {name.decode(): Record.parse(text.decode()) for name, text in book.items()}
        assert {
            name: (record.state, record.reason.partition(":")[0]) for name, record in stored.items()
        } == {name: (row.state, row.reason) for name, row in table.rows.items()}
        states = Counter(row.state for row in table.rows.values())
        assert (
            counts.pending,
            counts.ready,
            counts.claimed,
            counts.trained,
            counts.dropped,
        ) == tuple(states[letter] for letter in "PRCTD")
        assert Counter(dict(counts.drop_reasons)) == table.reasons()

    def finish(self) -> None:
        """Everything is rolled out and trained: then each row has one fate."""
        self.busy = True
        self.settle()
        stage, job = self.stage, self.job
        for step in job.steps:
            stage.step = step.number
            if step.held:
                self.do(stage.amend(close=True))
                job.amend(step.number, add=[], drop=[], reason="", carry=[], carry_to=0, close=True)
            for query in step.queries:
                for index in range(step.size):
                    name = f"{query}-t{index}"
                    if name not in step.ended and query not in step.spared:
                        self.do(stage.fail(query, name, "over"))
                        job.end(step.number, query, name, {}, "over")
            for policy, table in step.tables.items():
                for name, row in table.rows.items():
                    if row.state == "P" and row.reward is None:
                        row.reward = float(len(self.appended[policy]))
                        self.do(stage.fill(name, policy=policy, reward=row.reward))
            step.ripen()
            for policy, table in step.tables.items():
                if table.committed is None:
                    self.finish_table(step, policy)
        for policy in POLICIES:
            dropped = [
                name
                for step in job.steps
                for name, row in step.tables[policy].rows.items()
                if row.state == "D"
            ]
            fates = self.trained[policy] + Counter(dropped)
            assert fates == Counter(self.appended[policy]), "one fate each"
        report = self.do(stage.store.audit.check(stage.job))
        assert list(report.violations) == []
        assert [audit.lost + audit.duplicated + audit.live for audit in report.policies] == [0, 0]
        assert report.trajectories_ended == report.trajectories_admitted
        held = self.do(stage.store.high_water.of_job(stage.job))
        assert set(held.values()) == {0}

    def finish_table(self, step: Step, policy: str) -> None:
        self.stage.step = step.number
        self.do(self.stage.release("", policy=policy))
        claim = self.do(self.stage.claim("last", claim=f"last{step.number}", policy=policy))
        names = ids_of(claim)
        assert names == sorted(step.tables[policy].ids("R") + step.tables[policy].ids("C"))
        version = self.versions[policy] + bool(names)
        outcome = store_pb.STEP_OUTCOME_APPLIED if names else store_pb.STEP_OUTCOME_EMPTY
        claims = [f"last{step.number}"] if names else []
        self.do(self.stage.commit(claims, "last", policy=policy, version=version, outcome=outcome))
        self.versions[policy] = version
        self.trained[policy].update(names)


def run(url: str, examples: int, steps: int) -> None:
    Life.url = url
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_row_has_one_fate_while_rosters_change(redis_url: str) -> None:
    run(redis_url, 15, 35)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_has_one_fate_in_long_lives(redis_url: str) -> None:
    run(redis_url, 120, 50)
