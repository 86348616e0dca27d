"""How often, and for how long, the collector walks the objects of trajectories."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from services.rollout.garbage import collect_seldom, collect_survivors, exempt_new
from tests.rollout.house import House, evaluation

# Objects of one collection: 0.4 to 1.3 us each, so at most 33 ms.
WALKED = 25_000


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[tuple[int, int]]]:
    """The generation of each collection, and how many objects it walked, one after the other."""
    before, found = gc.get_threshold(), []

    def told(phase: str, about: dict[str, Any]) -> None:
        if phase == "start":
            walked = range(about["generation"] + 1)
            found.append(
                (about["generation"], sum(len(gc.get_objects(generation=g)) for g in walked))
            )

    gc.callbacks.append(told)
    yield found
    gc.callbacks.remove(told)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_no_collection_walks_more_than_is_new(collections: list[tuple[int, int]]) -> None:
    collect_seldom()
    collections.clear()
    waiting = [[number] for number in range(1_000_000)]
    assert waiting
    assert {generation for generation, _ in collections} == {0}  # nothing is walked twice
    assert max(walked for _, walked in collections) <= WALKED


def test_a_jobs_start_walks_no_imported_object(collections: list[tuple[int, int]]) -> None:
    collect_seldom()
    frozen = gc.get_freeze_count()
    left, kept = weakref.ref(_Cycle()), _Cycle()
    collections.clear()
    exempt_new()
    assert left() is None
    assert kept.itself is kept
    assert sum(walked for _, walked in collections) <= WALKED < frozen
    # Counts of what is exempt say nothing: what earlier tests left there may go meanwhile.
    assert not any(one is kept for one in gc.get_objects())


def test_cycles_that_a_trajectory_leaves_still_go(collections: list[tuple[int, int]]) -> None:
    collect_seldom()
    left = weakref.ref(_Cycle())
    waiting = [[number] for number in range(400_000) if left() is not None]
    assert left() is None
    assert len(waiting) < 400_000


async def test_older_cycles_go_when_few_trajectories_run(
    rewarded_house: House, collections: list[tuple[int, int]]
) -> None:
    await rewarded_house.prepare("one_turn")
    collect_seldom()
    collections.clear()
    cycle = _Cycle()
    left = weakref.ref(cycle)
    waiting = [[number] for number in range(400_000)]
    del cycle
    assert left() is not None, waiting
    assert {generation for generation, _ in collections} <= {0}
    await rewarded_house.run(evaluation(2))
    assert left() is None


def test_a_process_that_does_not_collect_seldom_is_left_alone(
    collections: list[tuple[int, int]],
) -> None:
    gc.set_threshold(700, 1_000, 10)
    for _ in range(100):
        gc.collect(0)
    collections.clear()
    collect_survivors()
    assert not collections
