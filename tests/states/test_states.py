"""The transition tables: the guarantees of every state machine of Troupe, for any path."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe import states
from troupe.v1 import common_pb2 as common_pb

TABLES = {
    "job": (states.JOB, common_pb.JobState),
    "trajectory": (states.TRAJECTORY, common_pb.TrajectoryState),
    "sample": (states.SAMPLE, common_pb.SampleState),
    "engine": (states.ENGINE, common_pb.EngineState),
    "binding": (states.BINDING, common_pb.BindingState),
}


def reachable(table: states.Table, source: int) -> set[int]:
    """States that some path from `source` visits, itself included."""
    found, frontier = {source}, [source]
    while frontier:
        new = table[frontier.pop()] - found
        found |= new
        frontier += new
    return found


def paths(table: states.Table, start: int) -> st.SearchStrategy[list[int]]:
    """Walks of up to 30 allowed moves."""

    @st.composite
    def walk(draw: st.DrawFn) -> list[int]:
        path = [start]
        for _ in range(draw(st.integers(0, 30))):
            targets = sorted(table[path[-1]])
            if not targets:
                break
            path.append(draw(st.sampled_from(targets)))
        return path

    return walk()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_holds_every_state_of_its_enum_and_no_other(name: str) -> None:
    table, enum = TABLES[name]
    known = {number for number in enum.values() if number != 0}
    assert set(table) == known
    assert set().union(*table.values()) <= known


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_from_the_first(name: str) -> None:
    table, _ = TABLES[name]
    assert reachable(table, min(table)) == set(table)


@pytest.mark.parametrize("name", TABLES)
def test_no_state_leads_to_itself(name: str) -> None:
    table, _ = TABLES[name]
    assert all(state not in targets for state, targets in table.items())


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
def test_check_agrees_with_the_table(name: str, data: st.DataObject) -> None:
    table, enum = TABLES[name]
    source, target = (data.draw(st.sampled_from(sorted(table))) for _ in range(2))
    if target in table[source]:
        states.check(table, source, target)
    else:
        told = enum.Name(target)  # type: ignore[arg-type]
        with pytest.raises(states.IllegalTransition, match=told):
            states.check(table, source, target)


@pytest.mark.parametrize("name", TABLES)
def test_no_table_allows_the_unspecified_state(name: str) -> None:
    table, _ = TABLES[name]
    for state in table:
        assert not states.allowed(table, 0, state)
        assert not states.allowed(table, state, 0)


# -- samples: exactly once


@given(path=paths(states.SAMPLE, common_pb.SAMPLE_STATE_PENDING))
def test_a_sample_is_trained_or_dropped_but_never_both_nor_twice(path: list[int]) -> None:
    ends = [
        s for s in path if s in (common_pb.SAMPLE_STATE_TRAINED, common_pb.SAMPLE_STATE_DROPPED)
    ]
    assert len(ends) <= 1
    assert not ends or path[-1] == ends[0]


@given(path=paths(states.SAMPLE, common_pb.SAMPLE_STATE_PENDING))
def test_a_sample_is_trained_only_out_of_a_claim(path: list[int]) -> None:
    for before, after in itertools.pairwise(path):
        if after == common_pb.SAMPLE_STATE_TRAINED:
            assert before == common_pb.SAMPLE_STATE_CLAIMED
        if after == common_pb.SAMPLE_STATE_CLAIMED:
            assert before == common_pb.SAMPLE_STATE_READY
        # A claimed sample never waits for columns again.
        assert after != common_pb.SAMPLE_STATE_PENDING


def test_every_sample_can_still_end() -> None:
    for state in states.SAMPLE:
        ends = {s for s in reachable(states.SAMPLE, state) if states.is_terminal(states.SAMPLE, s)}
        assert ends, "no state is a trap"


# -- jobs: every wait ends


def test_every_job_can_still_end() -> None:
    ends = {
        common_pb.JOB_STATE_SUCCEEDED,
        common_pb.JOB_STATE_FAILED,
        common_pb.JOB_STATE_CANCELLED,
    }
    for state in states.JOB:
        assert reachable(states.JOB, state) & ends


def test_a_job_that_is_paused_or_has_ended_only_begins_again() -> None:
    for state in (
        common_pb.JOB_STATE_SUCCEEDED,
        common_pb.JOB_STATE_FAILED,
        common_pb.JOB_STATE_CANCELLED,
        common_pb.JOB_STATE_PAUSED,
    ):
        assert states.allowed(states.JOB, state, common_pb.JOB_STATE_SUBMITTED)


@given(path=paths(states.JOB, common_pb.JOB_STATE_SUBMITTED))
def test_a_job_runs_only_when_it_was_prepared(path: list[int]) -> None:
    for before, after in itertools.pairwise(path):
        if after == common_pb.JOB_STATE_RUNNING:
            assert before == common_pb.JOB_STATE_STARTING
        if before == common_pb.JOB_STATE_CANCELLING:
            assert after == common_pb.JOB_STATE_CANCELLED, (
                "a cancelled job does nothing else any more"
            )


@given(path=paths(states.JOB, common_pb.JOB_STATE_SUBMITTED))
def test_a_job_succeeds_only_after_it_ran(path: list[int]) -> None:
    if common_pb.JOB_STATE_SUCCEEDED in path:
        # Or resumed while pausing, where the step in flight was the last one.
        earlier = path[: path.index(common_pb.JOB_STATE_SUCCEEDED)]
        assert earlier[-1] in (common_pb.JOB_STATE_RUNNING, common_pb.JOB_STATE_PAUSING)


# -- engines: verified weights only


@given(path=paths(states.ENGINE, common_pb.ENGINE_STATE_STARTING))
def test_an_engine_serves_only_after_a_verified_update(path: list[int]) -> None:
    """In all histories UPDATING lies between DEAD (or STALE) and HEALTHY."""
    verified = False
    for state in path:
        if state == common_pb.ENGINE_STATE_UPDATING:
            verified = True
        elif state in (
            common_pb.ENGINE_STATE_STARTING,
            common_pb.ENGINE_STATE_STALE,
            common_pb.ENGINE_STATE_DEAD,
            common_pb.ENGINE_STATE_STOPPED,
        ):
            verified = False
        elif state in (common_pb.ENGINE_STATE_HEALTHY, common_pb.ENGINE_STATE_SUSPECT):
            assert verified


def test_a_dead_engine_comes_back_only_through_stale() -> None:
    targets = states.ENGINE[common_pb.ENGINE_STATE_DEAD] - {common_pb.ENGINE_STATE_STOPPED}
    assert targets == {common_pb.ENGINE_STATE_STALE}


def test_every_engine_can_be_stopped_and_may_die() -> None:
    for state in set(states.ENGINE) - {common_pb.ENGINE_STATE_STOPPED}:
        assert common_pb.ENGINE_STATE_STOPPED in reachable(states.ENGINE, state)
        if state != common_pb.ENGINE_STATE_DEAD:
            assert states.allowed(states.ENGINE, state, common_pb.ENGINE_STATE_DEAD)
