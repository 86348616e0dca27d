"""How often the collector walks what trajectories hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from services.rollout.job_setup import collect_seldom


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected, one after the other."""
    before, found = gc.get_threshold(), []

    def told(phase: str, about: dict[str, Any]) -> None:
        if phase == "stop":
            found.append(about["generation"])

    gc.callbacks.append(told)
    yield found
    gc.callbacks.remove(told)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_waits_is_not_walked_again_and_again(collections: list[int]) -> None:
    collect_seldom()
    collections.clear()
    waiting = [[number] for number in range(1_000_000)]
    assert waiting
    assert 0 < len(collections) <= 4
    assert 2 not in collections


def test_cycles_that_a_trajectory_leaves_still_go(collections: list[int]) -> None:
    collect_seldom()
    left = weakref.ref(_Cycle())
    waiting = [[number] for number in range(400_000) if left() is not None]
    assert left() is None
    assert len(waiting) < 400_000
