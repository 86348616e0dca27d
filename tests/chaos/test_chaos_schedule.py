"""The schedule of faults is a function of the seed alone."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.chaos.faults import fault_of
from testbed.chaos.schedule import (
    DUPLICATE,
    FREEZE,
    KILL,
    KINDS,
    PlannedFault,
    parse_kinds,
    scaled,
    schedule,
)
from troupe.cluster import ClusterSettings
from troupe.cluster.layout import links, service_names
from troupe.rpc import InvalidArgument

SETTINGS = ClusterSettings(rollouts=2)
SERVICES = ["redis", *service_names(SETTINGS)]
PAIRS = links(SETTINGS)


def first(count: int, seed: int, kinds: frozenset[str] = frozenset(KINDS)) -> list[PlannedFault]:
    return list(islice(schedule(seed, SERVICES, PAIRS, kinds), count))


def test_the_same_seed_plans_the_same_faults() -> None:
    assert first(300, 7) == first(300, 7)
    assert first(300, 7) != first(300, 8)


def test_everything_that_can_go_wrong_does() -> None:
    planned = first(2000, 1)

    assert {one.kind for one in planned} == set(KINDS) - {DUPLICATE}  # that one is always on
    assert {name for one in planned for name in one.victims} == set(SERVICES)
    assert {one.variant for one in planned if one.kind == KILL} == {"", "again", "together"}
    assert {one.variant for one in planned if one.kind == "partition"} == {"severed", "silent"}
    assert {one.pair for one in planned if one.kind == "partition"} == set(PAIRS)
    kills = [one for one in planned if one.kind == KILL]
    assert 0.4 < len(kills) / len(planned) < 0.7
    for variant in ("again", "together"):
        share = sum(one.variant == variant for one in kills) / len(kills)
        assert 0.1 < share < 0.2


@given(seed=st.integers(), kinds=st.sets(st.sampled_from(KINDS)))
def test_a_schedule_has_only_the_requested_faults(seed: int, kinds: set[str]) -> None:
    for one in first(20, seed, frozenset(kinds)):
        assert one.kind in kinds
        assert 0.5 <= one.pause <= 3
        assert 0 <= one.seconds <= (20 if one.kind == FREEZE else 8)
        assert len(set(one.victims)) == len(one.victims)
        if one.kind != KILL:
            fault = fault_of(one)
            assert fault.kind == one.kind
            assert fault.victim


def test_kinds_are_read_and_misspelt_ones_named() -> None:
    assert parse_kinds("all") == parse_kinds("") == frozenset(KINDS)
    assert parse_kinds("kill, slow-disk") == {"kill", "slow_disk"}
    with pytest.raises(InvalidArgument, match=r"--faults = kil: 'kil' .*Choose from kill, stall"):
        parse_kinds("kil")


@given(pause=st.floats(0.5, 3), done=st.floats(0, 1), progress=st.floats(0, 1))
def test_faults_wait_for_a_job_that_lags_and_hurry_after_one_that_leads(
    pause: float, done: float, progress: float
) -> None:
    wait = scaled(pause, done, progress)
    assert 0.1 * pause <= wait <= 5 * pause
    assert (wait - pause) * (done - progress) >= 0
