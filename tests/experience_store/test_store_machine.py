"""The life of samples against a model: in any order of calls, each is trained exactly once.

The model knows no Redis, no Lua and no clock. Leases "run out" by setting their expiry into the
past.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

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

from services.experience_store.database import Database
from services.experience_store.records import STATE_OF, PolicyKeys, SampleRecord
from services.experience_store.store import Store
from tests.experience_store.test_store_high_water import counted, held
from tests.support.experience import Response, Stage, ids_of, make_sample
from tests.support.experience_model import Model, Row
from troupe import states
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")
POLICY = "solver"
CLAIMANTS = st.sampled_from(["alice", "bob"])
# Rewards of a trajectory's samples; None comes late.
ENDINGS: list[list[float | None]] = [[1.0], [None], [0.0, 1.0], [None, 0.0], []]
APPLIED = store_pb.STEP_OUTCOME_APPLIED
SKIPPED = store_pb.STEP_OUTCOME_SKIPPED
EMPTY = store_pb.STEP_OUTCOME_EMPTY


class Life(RuleBasedStateMachine):
    """Calls in any order, by two claimants, each of which may be a zombie."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = Database(self.url)
        # Not started: only the calls below change state.
        self.store = Store(self.database, keep_steps=2)
        self.seen: dict[str, str] = {}
        self.delivered: dict[str, list[str]] = {}
        self.trained = Counter[str]()
        self.version = 0
        # Names must be the same in every run of an example.
        self.numbers = itertools.count()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        # In every case the log adds up, and the bytes equal those in Redis.
        report = self.do(self.store.audit.check(self.stage.job))
        assert list(report.violations) == []
        assert self.do(counted(self.stage)) == self.do(held(self.stage))
        self.do(self.store.tables.drop(self.stage.job))
        report = self.do(self.store.audit.check(self.stage.job))
        assert list(report.violations) == []
        assert sum(policy.trained for policy in report.policies) == self.trained.total()
        self.do(self.store.tables.drop(self.stage.job, purge_log=True))
        self.do(self.database.close())
        self.runner.close()

    @initialize(
        queries=st.integers(1, 2),
        group_size=st.integers(1, 2),
        redundant=st.sampled_from([0, 0, 1]),
        clustered=st.booleans(),
    )
    def open(self, queries: int, group_size: int, redundant: int, clustered: bool) -> None:
        # The long way of endings, as in a cluster, or the short one.
        self.database.clustered = clustered
        names = tuple(f"q{number}" for number in range(queries))
        self.stage = Stage(
            self.store, new_id("job"), (POLICY,), names, group_size, redundant=redundant
        )
        self.model = Model(names, group_size, redundant=redundant)
        self.do(self.store.tables.create(self.stage.job, [POLICY], []))
        self.do(self.stage.open(0))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Make one of the calls that are possible now, more likely if it is named more often."""
        model, actions = self.model, ["claim"]
        if model.committed is not None:
            actions = ["next_step", "next_step", "too_late"]
        else:
            actions += ["append"] * 4 + ["roll_out"] if not model.sealed else ["commit"]
            actions += ["end_again"] if model.ended else []
            actions += ["fill_pending"] * 4 + ["drop"] if model.ids("P") else []
            actions += ["claim"] * 3 + ["fill_any"] if model.rows else []
            actions += ["repeat_claim", "renew", "release"] if model.known_claims else []
            actions += ["supersede", "zombie_commit"] if model.known_claims else []
            actions += ["expire", "drop_gone"] if model.live else []
            actions += ["train"] * 2 if model.may_train else []
        getattr(self, data.draw(st.sampled_from(actions), "action"))(data)

    # -- rollout and rewards

    def append(self, data: st.DataObject) -> None:
        self.end(self.pick(data, ended=False), data.draw(st.sampled_from([*ENDINGS, None])))

    def roll_out(self, data: st.DataObject) -> None:
        rewards = data.draw(st.sampled_from(ENDINGS))
        for place in self.stage.trajectories:
            if place[1] not in self.model.ended:
                self.end(place, rewards)

    def end_again(self, data: st.DataObject) -> None:
        self.end(self.pick(data, ended=True), data.draw(st.sampled_from([ENDINGS[0], None])))

    def pick(self, data: st.DataObject, *, ended: bool) -> tuple[str, str]:
        places = self.stage.trajectories
        return data.draw(
            st.sampled_from([p for p in places if (p[1] in self.model.ended) == ended])
        )

    def end(self, place: tuple[str, str], rewards: list[float | None] | None) -> None:
        query, trajectory = place
        rows = [
            make_sample(query, turn, trajectory, reward=reward)
            for turn, reward in enumerate(rewards or [])
        ]
        if rewards is None:
            accepted = self.do(self.stage.fail(query, trajectory))
        else:
            accepted = self.do(self.stage.append(query, trajectory, rows))
        assert accepted == self.model.end(query, trajectory, completed=rewards is not None)
        if accepted:
            for row in rows:
                reward = row.reward if row.HasField("reward") else None
                self.model.rows[row.sample_id] = Row(query, reward)
            self.model.ripen()

    def fill_pending(self, data: st.DataObject) -> None:
        self.fill(data.draw(st.sampled_from(self.model.ids("P"))), 0.25)

    def fill_any(self, data: st.DataObject) -> None:
        self.fill(data.draw(st.sampled_from(sorted(self.model.rows))), 0.75)

    def fill(self, name: str, reward: float) -> None:
        row = self.model.rows[name]
        _, accepted = self.do(self.stage.fill(name, reward=reward))
        assert accepted == (row.state == "P" and row.reward is None)
        if accepted:
            row.reward = reward
            self.model.ripen()

    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.rows)))
        row = self.model.rows[name]
        if row.state in ("P", "D"):
            _, accepted = self.do(self.stage.fill(name, drop_reason="reward_timeout: 1 s"))
            assert accepted == (row.state == "P")
            row.state = "D"
            self.model.ripen()
        else:
            with pytest.raises(FailedPrecondition, match="final"):
                self.do(self.stage.fill(name, drop_reason="too late"))

    # -- claims

    def claim(self, data: st.DataObject) -> None:
        self.claim_as(data.draw(CLAIMANTS), data.draw(st.integers(1, 4)))

    def claim_as(self, claimant: str, size: int) -> None:
        name = f"c{next(self.numbers)}"
        outcome, expected = self.model.outcome_of_claim(claimant, size)
        if outcome == "LOST":
            with pytest.raises(FailedPrecondition, match="lost"):
                self.do(self.stage.claim(claimant, claim=name, samples=size))
            return
        response = self.do(self.stage.claim(claimant, claim=name, samples=size))
        assert Response.Outcome.Name(response.outcome) == f"OUTCOME_{outcome}"
        assert ids_of(response) == expected
        if outcome == "CLAIMED":
            self.check_group_rewards(response)
            self.delivered[name] = expected
            self.model.take(name, claimant, expected)

    def check_group_rewards(self, response: Response) -> None:
        for claimed in response.samples:
            query = claimed.sample.query_id
            group = sorted(n for n, row in self.model.rows.items() if row.query == query)
            rows = [self.model.rows[name] for name in group]
            members = [row for row in rows if row.state != "D" or row.gone]
            assert list(claimed.group_rewards) == [row.reward for row in members]

    def repeat_claim(self, data: st.DataObject) -> None:
        claimant = data.draw(CLAIMANTS)
        name = data.draw(st.sampled_from(self.model.known_claims))
        if self.model.live.get(name, ("", []))[0] == claimant:
            response = self.do(self.stage.claim(claimant, claim=name))
            assert ids_of(response) == self.delivered[name]
        else:
            with pytest.raises(FailedPrecondition, match="lost"):
                self.do(self.stage.claim(claimant, claim=name))

    def renew(self, data: st.DataObject) -> None:
        claimant = data.draw(CLAIMANTS)
        if self.model.is_fenced(claimant):
            with pytest.raises(FailedPrecondition, match="lost"):
                self.do(self.stage.renew(claimant))
        else:
            held = len(self.model.claims_of(claimant))
            assert self.do(self.stage.renew(claimant)) == held

    def drop_gone(self, data: st.DataObject) -> None:
        """Report lost values of some samples; any claimant may report another's samples."""
        claimant = data.draw(CLAIMANTS)
        name = data.draw(st.sampled_from(self.model.known_claims))
        holder, held = self.model.live.get(name, ("", []))
        some = data.draw(
            st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1, unique=True)
        )
        call = self.store.claims.drop_gone(
            self.stage.job, POLICY, self.stage.step, claimant, name, some
        )
        if holder != claimant:
            with pytest.raises(FailedPrecondition, match="lost"):
                self.do(call)
            return
        assert self.do(call) == len(set(some) & set(held))
        self.delivered[name] = self.model.drop_gone(name, some)

    def expire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.live)))
        leases = f"troupe:{{{self.stage.job}/{POLICY}}}:{self.stage.step}:leases"
        self.do(self.database.call("ZADD", leases, "XX", 0, name))
        self.model.expire(name)

    def release(self, data: st.DataObject) -> None:
        self.release_as(data.draw(CLAIMANTS))

    def release_as(self, claimant: str) -> None:
        held = len(self.model.held(claimant))
        assert self.do(self.stage.release(claimant)) == held
        self.model.release(claimant)

    def supersede(self, data: st.DataObject) -> None:
        held = sum(len(names) for _, names in self.model.live.values())
        assert self.do(self.stage.release("")) == held
        self.model.supersede()

    # -- commits

    def commit(self, data: st.DataObject) -> None:
        claimant = data.draw(CLAIMANTS)
        outcome = data.draw(st.sampled_from([APPLIED, SKIPPED, EMPTY]))
        self.try_commit(claimant, outcome, self.model.claims_of(claimant))

    def zombie_commit(self, data: st.DataObject) -> None:
        """One of the claims may be lost, or another claimant's."""
        claimant = data.draw(CLAIMANTS)
        stale = data.draw(st.sampled_from(self.model.known_claims))
        self.try_commit(claimant, APPLIED, [*self.model.claims_of(claimant), stale])

    def train(self, data: st.DataObject) -> None:
        """Run a trainer that starts afresh and is not disturbed."""
        claimant = data.draw(CLAIMANTS)
        self.release_as(claimant)
        size = data.draw(st.integers(1, 3))
        while self.model.outcome_of_claim(claimant, size)[0] == "CLAIMED":
            self.claim_as(claimant, size)
        outcome = data.draw(st.sampled_from([APPLIED, APPLIED, SKIPPED]))
        outcome = outcome if self.model.ids("C") else EMPTY
        self.try_commit(claimant, outcome, self.model.claims_of(claimant))

    def try_commit(
        self, claimant: str, outcome: store_pb.StepOutcome.ValueType, names: list[str]
    ) -> None:
        model = self.model
        call = self.stage.commit(
            names,
            claimant,
            outcome=outcome,
            version=self.version + (outcome == APPLIED),
            reason="nan_loss: inf" if outcome == SKIPPED else "",
        )
        if model.committed is not None:
            commit, existed = self.do(call)
            assert existed
            assert store_pb.StepOutcome.Name(commit.outcome) == model.committed
            return
        if not model.may_commit(claimant, names, empty=outcome == EMPTY):
            with pytest.raises((FailedPrecondition, InvalidArgument)):
                self.do(call)
            return
        commit, existed = self.do(call)
        assert not existed
        gradient = [sample for name in set(names) for sample in self.delivered[name]]
        kept = [name for name, row in model.rows.items() if row.state != "D"]
        assert Counter(gradient) == Counter(kept), "each once, none missing"
        assert commit.num_samples == len(gradient)
        if outcome == APPLIED:
            self.version += 1
            self.trained.update(gradient)
        model.commit(store_pb.StepOutcome.Name(outcome), gradient)

    def too_late(self, data: st.DataObject) -> None:
        """Make calls about a finished step, which change nothing."""
        claimant = data.draw(CLAIMANTS)
        response = self.do(self.stage.claim(claimant))
        assert response.outcome == Response.OUTCOME_EXHAUSTED
        assert self.do(self.stage.renew(claimant)) == 0
        assert self.do(self.stage.release(claimant)) == 0
        assert self.do(self.stage.release("")) == 0
        self.try_commit(claimant, SKIPPED, ["never made"])
        for name, row in self.model.rows.items():
            if row.state == "T":
                assert self.do(self.stage.fill(name, reward=5.0)) == ("T", False)

    def next_step(self, data: st.DataObject) -> None:
        """Open the next step, whose trajectories and samples have new names."""
        self.seen.clear()
        model = self.model
        self.model = Model(model.queries, model.group_size, redundant=model.redundant)
        self.do(self.stage.open(self.stage.step + 1, self.version))

    # -- invariants

    @invariant()
    def every_move_is_in_the_table(self) -> None:
        if not hasattr(self, "stage"):
            return
        keys = PolicyKeys(self.stage.job, POLICY)
        committed, stored = self.do(
            self.database.call_each(
                [
                    ("HEXISTS", keys.commits, self.stage.step),
                    ("HGETALL", keys.step(self.stage.step, "book")),
                ]
            )
        )
        now = {
            name.decode(): SampleRecord.parse(text.decode()).settled(bool(committed)).state
            for name, text in stored.items()
        }
        for name, letter in now.items():
            before = self.seen.get(name, "P")
            # `train` is many calls, an undisturbed life in one go.
            passed = (before, letter) == ("R", "T")
            if letter != before and not passed:
                states.check(states.SAMPLE, STATE_OF[before], STATE_OF[letter])
        self.seen = now

    @invariant()
    def counts_are_the_models(self) -> None:
        if not hasattr(self, "stage"):
            return
        counted = Counter(row.state for row in self.model.rows.values())
        letters = {"P": "pending", "R": "ready", "C": "claimed", "T": "trained", "D": "dropped"}
        expected = {letters[state]: number for state, number in counted.items()}
        assert self.do(self.stage.counts(POLICY)) == expected

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(number == 1 for number in self.trained.values())


def test_every_sample_is_trained_exactly_once(redis_url: str) -> None:
    Life.url = redis_url
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
