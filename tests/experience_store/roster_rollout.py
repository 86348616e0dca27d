"""Calls of the orchestrator, rollout workers and rewarders to a store and its model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from tests.experience_store.roster_calls import POLICIES, AbandonedError, RosterCalls
from tests.support.experience import make_sample
from tests.support.roster_model import Line, Step
from troupe.rpc import FailedPrecondition

REWARDS = st.sampled_from([None, None, 0.0, 1.0])


class RosterRollout(RosterCalls):
    """Steps are opened and amended, trajectories end, rows get their rewards or are dropped."""

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
            # One or the other, never half; the next caller completes it.
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
        """Check that every ending of a trajectory returns whether its group is complete."""
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
        """Return whether it was accepted (None: unknown); any step that had it is named."""
        steps = [s for s in self.job.steps if row.query in [*s.queries, *s.carried]]
        self.stage.step = data.draw(st.sampled_from(steps)).number
        (_, accepted), repeated = self.attempt(
            data, lambda: self.stage.fill(name, policy=policy, **value)
        )
        return None if repeated else accepted
