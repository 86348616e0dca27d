"""Overlapping steps that change their rosters, against a model, while the store dies at any time.

Whatever the order of calls and wherever the store dies, every row ends TRAINED once or DROPPED
once, with its reason, and all tables agree with what the job decided.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from services.experience_store.records import PolicyKeys, SampleRecord
from services.experience_store.store import Store
from tests.experience_store.roster_calls import MOST_STEPS, POLICIES
from tests.experience_store.roster_rollout import RosterRollout
from tests.experience_store.roster_training import RosterTraining
from tests.support.experience import Stage, ids_of
from tests.support.roster_model import Job, Line, Step, Table
from troupe.rpc import new_id
from troupe.v1 import experience_store_pb2 as store_pb


class Life(RosterRollout, RosterTraining):
    """Calls of an orchestrator, workers and trainers; each may find the store dying."""

    @initialize(
        group_size=st.sampled_from([1, 2, 2]),
        redundant=st.sampled_from([0, 0, 1, 2]),
        signal=st.booleans(),
        data=st.data(),
    )
    def begin(self, group_size: int, redundant: int, signal: bool, data: st.DataObject) -> None:
        self.database.clustered = data.draw(st.booleans(), "long")
        store = Store(self.database)
        self.stage = Stage(store, new_id("job"), POLICIES, (), group_size, redundant=redundant)
        self.job = Job(group_size, signal, POLICIES, redundant)
        self.do(store.tables.create(self.stage.job, POLICIES, [], drop_without_signal=signal))
        for _ in range(2):
            self.open(data)
        self.busy = False

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Make one of the calls that are possible now, more likely if it is named more often."""
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

    # -- invariants, at any time and at the end

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
        keys = PolicyKeys(self.stage.job, counts.policy)
        committed, book = self.do(
            self.database.call_each(
                [
                    ("HEXISTS", keys.commits, counts.step),
                    ("HGETALL", keys.step(counts.step, "book")),
                ]
            )
        )
        stored = {
            name.decode(): SampleRecord.parse(text.decode()).settled(bool(committed))
            for name, text in book.items()
        }
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
        """Roll out and train everything: then each row has one fate."""
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

    def teardown(self) -> None:
        try:
            if not self.busy:
                self.finish()
        finally:
            self.do(self.stage.store.tables.drop(self.stage.job, purge_log=True))
            left = self.do(self.database.call("KEYS", f"*{self.stage.job}*"))
            self.do(self.database.close())
            self.runner.close()
        assert left == []


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
def test_every_row_has_one_fate_in_long_lives(redis_url: str) -> None:
    run(redis_url, 120, 50)
