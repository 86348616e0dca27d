"""Calls of trainers to a store and its model."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.experience_store.roster_calls import RosterCalls
from tests.support.experience import Response, ids_of
from tests.support.roster_model import Step, Table
from troupe.rpc import FailedPrecondition
from troupe.v1 import experience_store_pb2 as store_pb

CLAIMANTS = st.sampled_from(["alice", "bob"])


class RosterTraining(RosterCalls):
    """Trainers claim, release, lose their claims and commit."""

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
        self.do(self.database.call("ZADD", leases, "XX", 0, claim))
        table.expire(claim)

    def commit(self, data: st.DataObject) -> None:
        """Run a trainer that starts afresh and is only disturbed by crashes."""
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
