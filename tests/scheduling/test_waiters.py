"""The order of actions: more waiting trajectories first, and none waits forever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.prepared_job import OpenGroups
from troupe.scheduling.elastic.order import first_come, group_waiters, head_start

COUNTS = st.integers(0, 1 << 20)


@given(COUNTS, COUNTS, st.floats(0, 100))
def test_more_waiters_go_first_and_nobody_is_passed_by_what_comes_much_later(
    few: int, many: int, later: float
) -> None:
    few, many = sorted((few, many))
    first, second = first_come(0.0, few), first_come(later, many)
    assert head_start(few) <= head_start(many) <= 10.0
    if later > 10.0:
        assert first < second
    elif later < head_start(many) - head_start(few):
        assert second < first


@given(st.integers(1, 64), st.data())
def test_the_last_of_a_group_has_all_of_it_waiting(size: int, data: st.DataObject) -> None:
    left = data.draw(st.integers(1, size))
    assert group_waiters(size, left) == 1 + size - left
    assert group_waiters(size, 1) == size


def test_a_group_is_counted_while_it_runs() -> None:
    groups = OpenGroups([])
    for _ in range(3):
        groups.begin("q")
    assert groups.waiters("q") == 1
    groups.end("q")
    groups.end("q")
    assert groups.waiters("q") == 3
    groups.end("q")
    groups.begin("q")
    assert groups.waiters("q") == 1
    assert groups.waiters("unknown") == 1
