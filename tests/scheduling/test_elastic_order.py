"""The order of actions: shortest remaining time first, as far as it is known, without
starvation."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.test_elastic import decide
from troupe.scheduling.elastic import Action, Discipline, Running
from troupe.scheduling.elastic.order import FCFS, SHORTEST, Remaining, later

WORK = st.floats(1e-3, 1e6)
WAITERS = st.integers(1, 64)


@given(WORK, WORK, WAITERS, WAITERS, st.floats(1e-3, 1e3), st.floats(0.1, 1e4))
def test_property_calls_that_come_together_run_in_the_order_of_work_per_waiter(
    one: float, other: float, few: int, many: int, typical: float, patience: float
) -> None:
    first = later(one, few, typical=typical, patience=patience)
    second = later(other, many, typical=typical, patience=patience)
    assert 0 <= first <= patience
    assert 0 <= second <= patience
    if one / few < (1 - 1e-6) * other / many < 1e3 * typical:
        assert first < second


@given(st.lists(st.tuples(WORK, WAITERS, st.floats(0, 100)), min_size=2, max_size=20))
def test_property_no_call_is_passed_by_one_that_comes_after_its_patience(
    asked: list[tuple[float, int, float]],
) -> None:
    discipline, now, places = Discipline(patience=50.0), 0.0, []
    for work, waiters, pause in asked:
        now += pause
        places.append((discipline.place(now, "job", "", work, waiters), now))
    for place, came in places:
        assert all(place <= other for other, late in places if late >= came + 50.0)


def ends(queue: list[Action], cores: int) -> dict[str, float]:
    """When each action ends that waits on `cores`, in the order of `queue`."""
    now, free, found = 0.0, {"cores": cores}, dict[str, float]()
    running: list[tuple[float, str, int]] = []
    queue = list(queue)
    while queue or running:
        held = [Running({"cores": n}, end) for end, _, n in running]
        for grant in decide(queue, free, held, now):
            running.append((now + grant.seconds, grant.action.action_id, grant.holds["cores"]))
            free["cores"] -= grant.holds["cores"]
            queue.remove(grant.action)
        now, name, given_back = running.pop(running.index(min(running)))
        found[name] = now
        free["cores"] += given_back
    return found


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=6))
def test_property_on_one_machine_it_is_the_best_of_all_orders(
    jobs: list[tuple[int, int]],
) -> None:
    places, works = [], {}
    for index, (seconds, waiters) in enumerate(jobs):
        place = later(seconds, waiters, typical=1.0)
        places.append((place, f"{index}", float(seconds)))
        works[f"{index}"] = (seconds, waiters)
    queue = [Action(name, 0.0, {"cores": 1}, None, alone) for _, name, alone in sorted(places)]
    found = sum(works[name][1] * end for name, end in ends(queue, 1).items())

    def total(order: tuple[str, ...]) -> float:
        now = value = 0.0
        for name in order:
            now += works[name][0]
            value += works[name][1] * now
        return value

    assert found == pytest.approx(min(total(order) for order in permutations(works)))


def test_first_come_is_left_alone() -> None:
    discipline = Discipline(FCFS)
    assert discipline.place(3.0, "job", "t", 1e9) == 3.0
    assert discipline.place(4.0, "job", "t", 0.0, waiters=4) == 2.0  # a head start


@pytest.mark.parametrize(
    "kwargs", [{"order": "longest"}, {"patience": 0.0}, {"patience": math.inf}]
)
def test_invalid_disciplines_are_refused(kwargs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        Discipline(**kwargs)  # type: ignore[arg-type]


def test_a_last_action_goes_before_one_with_more_to_come() -> None:
    discipline = Discipline(SHORTEST)
    for name in ("a", "b", "c"):
        for _ in range(4):
            discipline.place(0.0, "job", name, 1.0)
            discipline.ran("job", name, 1.0)
        discipline.place(0.0, "job", name, 5.0, last=True)
        discipline.ran("job", name, 5.0, last=True)
    fresh = discipline.place(0.0, "job", "new", 1.0)
    old = [discipline.place(0.0, "job", "old", 1.0) for _ in range(4)][-1]
    last = discipline.place(0.0, "job", "done", 5.0, last=True)
    assert last < old < fresh
    # Another job knows nothing of that.
    assert discipline.place(0.0, "other", "new", 1.0) != fresh


def drawn(count: int, mean: float, sigma: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    lengths = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(1, np.round(lengths)).astype(int)


def test_remaining_actions_are_learned_from_unfinished_trajectories() -> None:
    lengths = drawn(3000, 8.0, 0.7)
    remaining = Remaining()
    # Every second one has come to its sixth action when it is asked.
    for index, length in enumerate(lengths):
        open_still = index % 2 and length > 6
        for _ in range(6 if open_still else length):
            remaining.asked(f"{index}", 1.0, last=False)
        if not open_still:
            remaining.asked(f"{index}", 1.0, last=True)
    for steps in (1, 4, 8, 12):
        truth = float((lengths[lengths >= steps] - steps).mean())
        assert remaining.further(steps) == pytest.approx(truth, rel=0.2)


def test_remaining_work_includes_the_last_action() -> None:
    remaining = Remaining()
    for index in range(500):
        for _ in range(3):
            remaining.asked(f"{index}", 2.0, last=False)
            remaining.ran(2.0, last=False)
        remaining.asked(f"{index}", 10.0, last=True)
        remaining.ran(10.0, last=True)
    left = [remaining.asked("new", 2.0, last=False) for _ in range(3)]
    assert left == pytest.approx([2 + 2 * 2 + 10, 2 + 2 + 10, 2 + 10], abs=0.5)
    assert remaining.asked("new", 7.0, last=True) == 7.0


def test_trajectories_that_end_without_a_last_action_are_counted_too() -> None:
    remaining = Remaining()
    for index in range(500):
        remaining.asked(f"{index}", 1.0, last=False)
        remaining.asked(f"{index}", 1.0, last=False)
        remaining.closed(f"{index}")
        remaining.closed(f"{index}")  # told twice, or again by another way
    assert remaining.further(1) == pytest.approx(1.0, abs=0.1)
    assert remaining.further(2) < 0.1


def test_old_trajectory_lengths_are_forgotten() -> None:
    remaining = Remaining()
    for length in (2, 9):
        for index in range(6000):
            for _ in range(length):
                remaining.asked(f"{index}", 1.0, last=False)
            remaining.asked(f"{index}", 1.0, last=True)
    assert remaining.further(1) == pytest.approx(8.0, rel=0.1)
