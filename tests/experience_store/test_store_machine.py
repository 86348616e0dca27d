"""The life of samples against a model: whatever the order of calls, each is trained exactly once.

The model knows no Redis, no Lua and no clock. Leases "run out" by setting their expiry into the
past.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.experience_store.database import Database
from services.experience_store.records import STATE_OF, Record
from services.experience_store.store import Store
from tests.support.experience import Response, Stage, ids_of, make_sample
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


@dataclass
class Row:
    """What the model knows of a sample."""

    query: str
    reward: float | None
    state: str = "P"


@dataclass
class Model:
    """One step of one policy."""

    queries: tuple[str, ...]
    group_size: int
    ended: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    live: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    fenced: dict[str, str] = field(default_factory=dict)
    owner: str | None = None
    committed: str | None = None

    def ripen(self) -> None:
        """Complete groups become ready."""
        for query in self.queries:
            members = [row for row in self.rows.values() if row.query == query]
            ended = sum(1 for of in self.ended.values() if of == query)
            pending = [row for row in members if row.state == "P"]
            if ended == self.group_size and all(row.reward is not None for row in pending):
                for row in pending:
                    row.state = "R"

    @property
    def sealed(self) -> bool:
        return len(self.ended) == len(self.queries) * self.group_size

    def ids(self, state: str) -> list[str]:
        return sorted(name for name, row in self.rows.items() if row.state == state)

    @property
    def may_train(self) -> bool:
        """Claims came before: otherwise most lives would be short and undisturbed."""
        idle = self.sealed and not self.ids("P") and self.committed is None
        return idle and (bool(self.known_claims) or not self.rows)

    @property
    def known_claims(self) -> list[str]:
        return sorted({*self.live, *self.lost})

    def held(self, claimant: str) -> list[str]:
        return [name for by, names in self.live.values() if by == claimant for name in names]

    def lose(self, claim: str, why: str) -> None:
        claimant, names = self.live.pop(claim)
        self.lost[claim] = claimant
        for name in names:
            self.rows[name].state = "R"
        if why == "expired":
            self.fenced[claimant] = why

    def is_fenced(self, claimant: str) -> bool:
        why = self.fenced.get(claimant)
        if why == "superseded":
            return self.owner not in (None, claimant)
        return why is not None

    def outcome_of_claim(self, claimant: str, size: int) -> tuple[str, list[str]]:
        """What a fresh claim must answer."""
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


class Life(RuleBasedStateMachine):
    """Calls in any order, by two claimants of which each may be the other's zombie."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = Database(self.url)
        # Not started: nothing but the calls below moves anything.
        self.store = Store(self.database, keep_steps=2)
        self.seen: dict[str, str] = {}
        self.delivered: dict[str, list[str]] = {}
        self.trained = Counter[str]()
        self.version = 0

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.do(self.store.tables.drop(self.stage.job))
        self.do(self.database.close())
        self.runner.close()

    @initialize(queries=st.integers(1, 2), group_size=st.integers(1, 2))
    def open(self, queries: int, group_size: int) -> None:
        names = tuple(f"q{number}" for number in range(queries))
        self.stage = Stage(self.store, new_id("job"), (POLICY,), names, group_size)
        self.model = Model(names, group_size)
        self.do(self.store.tables.create(self.stage.job, [POLICY], []))
        self.do(self.stage.open(0))

    # -- rollout and rewards

    @precondition(lambda self: not self.model.sealed)
    @rule(data=st.data(), rewards=st.sampled_from([*ENDINGS, None]))
    def append(self, data: st.DataObject, rewards: list[float | None] | None) -> None:
        self.end(self.pick(data, ended=False), rewards)

    @precondition(lambda self: self.model.ended and self.model.committed is None)
    @rule(data=st.data(), rewards=st.sampled_from([[1.0], None]))
    def end_again(self, data: st.DataObject, rewards: list[float | None] | None) -> None:
        self.end(self.pick(data, ended=True), rewards)

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
        assert accepted == (trajectory not in self.model.ended)
        if accepted:
            self.model.ended[trajectory] = query
            for row in rows:
                reward = row.reward if row.HasField("reward") else None
                self.model.rows[row.sample_id] = Row(query, reward)
            self.model.ripen()

    @precondition(lambda self: self.model.ids("P"))
    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.5]))
    def fill_pending(self, data: st.DataObject, reward: float) -> None:
        self.fill(data.draw(st.sampled_from(self.model.ids("P"))), reward)

    @precondition(lambda self: self.model.rows and self.model.committed is None)
    @rule(data=st.data())
    def fill_any(self, data: st.DataObject) -> None:
        self.fill(data.draw(st.sampled_from(sorted(self.model.rows))), 0.75)

    def fill(self, name: str, reward: float) -> None:
        row = self.model.rows[name]
        _, accepted = self.do(self.stage.fill(name, reward=reward))
        assert accepted == (row.state == "P" and row.reward is None)
        if accepted:
            row.reward = reward
            self.model.ripen()

    @precondition(lambda self: self.model.ids("P"))
    @rule(data=st.data())
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

    @precondition(lambda self: self.model.rows and self.model.committed is None)
    @rule(claimant=CLAIMANTS, size=st.integers(1, 4))
    def claim(self, claimant: str, size: int) -> None:
        name = new_id("claim")
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
            self.model.live[name] = (claimant, expected)
            self.model.fenced.pop(claimant, None)
            self.model.owner = self.model.owner or claimant
            for sample in expected:
                self.model.rows[sample].state = "C"

    def check_group_rewards(self, response: Response) -> None:
        for claimed in response.samples:
            query = claimed.sample.query_id
            group = sorted(n for n, row in self.model.rows.items() if row.query == query)
            rows = [self.model.rows[name] for name in group]
            assert list(claimed.group_rewards) == [r.reward for r in rows if r.state != "D"]

    @precondition(lambda self: self.model.committed is None and self.model.known_claims)
    @rule(data=st.data(), claimant=CLAIMANTS)
    def repeat_claim(self, data: st.DataObject, claimant: str) -> None:
        name = data.draw(st.sampled_from(self.model.known_claims))
        if self.model.live.get(name, ("", []))[0] == claimant:
            response = self.do(self.stage.claim(claimant, claim=name))
            assert ids_of(response) == self.delivered[name]
        else:
            with pytest.raises(FailedPrecondition, match="lost"):
                self.do(self.stage.claim(claimant, claim=name))

    @precondition(lambda self: self.model.known_claims)
    @rule(claimant=CLAIMANTS)
    def renew(self, claimant: str) -> None:
        if self.model.committed is None and self.model.is_fenced(claimant):
            with pytest.raises(FailedPrecondition, match="lost"):
                self.do(self.stage.renew(claimant))
            return
        number = sum(1 for by, _ in self.model.live.values() if by == claimant)
        assert self.do(self.stage.renew(claimant)) == number

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.live)))
        leases = f"troupe:{{{self.stage.job}/{POLICY}}}:{self.stage.step}:leases"
        self.do(self.database.execute("ZADD", leases, "XX", 0, name))
        self.model.lose(name, "expired")

    @precondition(lambda self: self.model.known_claims)
    @rule(claimant=CLAIMANTS)
    def release(self, claimant: str) -> None:
        model = self.model
        assert self.do(self.stage.release(claimant)) == len(model.held(claimant))
        if model.committed is None:
            for name in [n for n, (by, _) in model.live.items() if by == claimant]:
                model.lose(name, "released")
            # Whom somebody superseded stays out; any other claimant starts afresh.
            if not (model.fenced.get(claimant) == "superseded" and model.is_fenced(claimant)):
                model.fenced.pop(claimant, None)

    @precondition(lambda self: self.model.known_claims)
    @rule()
    def supersede(self) -> None:
        model = self.model
        held = sum(len(names) for _, names in model.live.values())
        assert self.do(self.stage.release("")) == held
        if model.committed is None:
            known = {by for by, _ in model.live.values()} | set(model.lost.values())
            for name in list(model.live):
                model.lose(name, "superseded")
            model.fenced |= dict.fromkeys(known, "superseded")
            model.owner = None

    # -- commits

    @precondition(lambda self: self.model.sealed and self.model.committed is None)
    @rule(claimant=CLAIMANTS, outcome=st.sampled_from([APPLIED, APPLIED, SKIPPED, EMPTY]))
    def commit(self, claimant: str, outcome: store_pb.StepOutcome.ValueType) -> None:
        """With all live claims of a claimant."""
        self.try_commit(claimant, outcome, self.claims_of(claimant))

    @precondition(lambda self: self.model.known_claims)
    @rule(data=st.data(), claimant=CLAIMANTS)
    def zombie_commit(self, data: st.DataObject, claimant: str) -> None:
        """Among the claims may be a lost one, or somebody else's."""
        stale = data.draw(st.sampled_from(self.model.known_claims))
        self.try_commit(claimant, APPLIED, [*self.claims_of(claimant), stale])

    @precondition(lambda self: self.model.may_train)
    @rule(claimant=CLAIMANTS, size=st.integers(1, 3), usable=st.booleans())
    def train(self, claimant: str, size: int, usable: bool) -> None:
        """What a trainer does that is not disturbed."""
        self.release(claimant)
        while self.model.outcome_of_claim(claimant, size)[0] == "CLAIMED":
            self.claim(claimant, size)
        outcome = APPLIED if usable else SKIPPED
        outcome = outcome if self.model.ids("C") else EMPTY
        self.try_commit(claimant, outcome, self.claims_of(claimant))

    def claims_of(self, claimant: str) -> list[str]:
        return [name for name, (by, _) in self.model.live.items() if by == claimant]

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
        mine = all(name in model.live and model.live[name][0] == claimant for name in names)
        samples = {s for name in set(names) if mine for s in model.live[name][1]}
        everything = {name for name, row in model.rows.items() if row.state != "D"}
        fits = (outcome == EMPTY) == (not samples)
        fenced = model.is_fenced(claimant)
        if not (mine and not fenced and model.sealed and samples == everything and fits):
            with pytest.raises((FailedPrecondition, InvalidArgument)):
                self.do(call)
            return
        commit, existed = self.do(call)
        assert not existed
        assert commit.num_samples == len(samples)
        model.committed = store_pb.StepOutcome.Name(outcome)
        gradient = [sample for name in set(names) for sample in self.delivered[name]]
        assert Counter(gradient) == Counter(everything), "each once, none missing"
        for sample in samples:
            model.rows[sample].state = "D" if outcome == SKIPPED else "T"
        if outcome == APPLIED:
            self.version += 1
            self.trained.update(gradient)
        model.live.clear()
        model.lost.clear()

    @precondition(lambda self: self.model.committed is not None)
    @rule(claimant=CLAIMANTS)
    def too_late(self, claimant: str) -> None:
        """Whatever is said about a step that is over changes nothing."""
        response = self.do(self.stage.claim(claimant))
        assert response.outcome == Response.OUTCOME_EXHAUSTED
        assert self.do(self.stage.renew(claimant)) == 0
        assert self.do(self.stage.release(claimant)) == 0
        assert self.do(self.stage.release("")) == 0
        self.try_commit(claimant, SKIPPED, ["never made"])
        for name, row in self.model.rows.items():
            if row.state == "T":
                assert self.do(self.stage.fill(name, reward=5.0)) == ("T", False)

    @precondition(lambda self: self.model.committed is not None)
    @rule()
    def next_step(self) -> None:
        """Trajectories and samples of a step have names of their own."""
        self.seen.clear()
        self.model = Model(self.model.queries, self.model.group_size)
        self.do(self.stage.open(self.stage.step + 1, self.version))

    # -- what holds at any time

    @invariant()
    def every_move_is_in_the_table(self) -> None:
        if not hasattr(self, "stage"):
            return
        key = f"troupe:{{{self.stage.job}/{POLICY}}}:{self.stage.step}:book"
        stored = self.do(self.database.execute("HGETALL", key))
        now = {n.decode(): Record.parse(r.decode()).state for n, r in stored.items()}
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
