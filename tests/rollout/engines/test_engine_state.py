"""The life of an engine, against its table of allowed moves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.rollout.engines.state import EngineState
from troupe.states import ENGINE, IllegalTransition, allowed
from troupe.v1 import common_pb2 as common_pb

MOVES = {
    "started": lambda life: life.started(),
    "updating": lambda life: life.updating(1),
    "awaits_commit": lambda life: life.awaits_commit(2),
    "verified": lambda life: life.verified(1, "c"),
    "lost_weights": lambda life: life.lost_weights("lost"),
    "suspect": lambda life: life.suspect("late"),
    "recovered": lambda life: life.recovered(),
    "draining": lambda life: life.draining("moves"),
    "handed_over": lambda life: life.handed_over("moves"),
    "died": lambda life: life.died("crash"),
    "stopped": lambda life: life.stopped(),
}
HOLDING = (
    common_pb.ENGINE_STATE_HEALTHY,
    common_pb.ENGINE_STATE_SUSPECT,
    common_pb.ENGINE_STATE_DRAINING,
)


class Life(RuleBasedStateMachine):
    """Any sequence of calls: a move happens if the table allows it, else nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.life = EngineState()
        # Whether a verified update came after the last loss of weights.
        self.verified = False

    @rule(move=st.sampled_from(sorted(MOVES)))
    def move(self, move: str) -> None:
        before = (self.life.now, self.life.version, self.life.restarts)
        try:
            MOVES[move](self.life)
        except IllegalTransition:
            assert (self.life.now, self.life.version, self.life.restarts) == before
            return
        after = self.life.now
        if after != before[0] and not (
            move == "updating" and before[0] == common_pb.ENGINE_STATE_SUSPECT
        ):
            assert allowed(ENGINE, before[0], after)
        if move == "verified":
            self.verified = True
        if move == "awaits_commit":  # what is loaded serves nothing yet
            assert after == before[0] == common_pb.ENGINE_STATE_UPDATING
            assert not self.life.serves
        if after in (
            common_pb.ENGINE_STATE_STALE,
            common_pb.ENGINE_STATE_DEAD,
            common_pb.ENGINE_STATE_STOPPED,
        ):
            self.verified = False
        if move == "updating" and before[0] == common_pb.ENGINE_STATE_SUSPECT:
            self.verified = False
        assert self.life.restarts - before[2] == (
            move == "started" and before[0] == common_pb.ENGINE_STATE_DEAD
        )

    @invariant()
    def serves_only_what_was_verified(self) -> None:
        assert (self.life.version is not None) == self.verified
        assert bool(self.life.checksum) == self.verified
        if self.life.serves or self.life.now in HOLDING:
            assert self.verified

    @invariant()
    def says_what_is_wrong(self) -> None:
        if self.life.now not in (common_pb.ENGINE_STATE_HEALTHY, common_pb.ENGINE_STATE_STOPPED):
            assert self.life.message


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_dead_leads_back_through_stale_only() -> None:
    life = EngineState()
    life.started()
    life.updating(4)
    life.verified(4, "c")
    life.died("first reason")
    life.died("second reason")
    assert life.message == "first reason"
    for move in ("updating", "verified", "recovered", "suspect", "draining"):
        with pytest.raises(IllegalTransition, match="DEAD"):
            MOVES[move](life)
    life.started()
    assert (life.name, life.restarts) == ("STALE", 1)
