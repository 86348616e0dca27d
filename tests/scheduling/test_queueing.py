"""Properties of the order of waiting turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from troupe.scheduling.routing import MOST_LEFT, TurnQueue, WaitingTurn


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_turns_leave_by_the_unfinished_trajectories_of_their_group(lefts: list[int]) -> None:
    queue: TurnQueue[tuple[int, int]] = TurnQueue()
    for number, left in enumerate(lefts):
        queue.push((left, number), group=f"g{number}", left=left, places=4)
    order = [queue.pop() for _ in lefts]
    assert order == sorted(order, key=lambda item: (min(item[0], MOST_LEFT), item[1]))


@given(st.lists(st.integers(0, 20), max_size=30))
def test_without_priority_first_come_first_served(lefts: list[int]) -> None:
    queue: TurnQueue[int] = TurnQueue(priority=False)
    for number, left in enumerate(lefts):
        queue.push(number, group="g", left=left, places=4)
        queue.regroup("g", 0)
    assert [queue.pop() for _ in lefts] == list(range(len(lefts)))


@given(
    st.integers(1, 8),
    st.integers(0, 6),
    st.integers(0, 20),
    st.lists(st.integers(0, 1), min_size=400, max_size=400),
)
def test_a_waiting_turn_is_served_within_a_bound(
    places: int, left: int, waiting: int, rivals: list[int]
) -> None:
    """However urgent later turns are, a turn waits for at most `left` fillings of all places and
    the turns already there."""
    queue: TurnQueue[str] = TurnQueue()
    for _ in range(waiting):
        queue.push("before", group="b", left=0, places=places)
    queue.push("patient", group="p", left=left, places=places)
    for served, rival in enumerate(rivals):
        queue.push("rival", group="r", left=rival, places=places)
        if queue.pop() == "patient":
            assert served <= left * places + waiting
            return
    raise AssertionError("it starved")


def test_a_group_that_shrinks_overtakes() -> None:
    queue: TurnQueue[str] = TurnQueue()
    queue.push("large", group="a", left=3, places=10)
    queue.push("larger", group="b", left=4, places=10)
    queue.regroup("b", 1)
    queue.regroup("nobody", 1)
    queue.regroup("b", 7)  # never back
    assert [queue.pop(), queue.pop()] == ["larger", "large"]


def test_a_turn_that_comes_back_keeps_its_place() -> None:
    queue: TurnQueue[str] = TurnQueue()
    first = queue.push("first")
    for number in range(3):
        queue.push(f"next{number}")
    assert queue.pop() == "first"
    queue.push("first again", since=first.since)
    assert queue.pop() == "next0"  # they came at the same time, and it has been served once
    for _ in range(2):
        queue.push("late")
    assert [queue.pop() for _ in range(3)] == ["next1", "next2", "first again"]


class QueueMachine(RuleBasedStateMachine):
    """No turn is lost or comes twice, for all pushes, removals and regroupings."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: TurnQueue[int] = TurnQueue()
        self.waiting: dict[int, WaitingTurn[Any]] = {}
        self.born = 0

    @rule(group=st.sampled_from(["", "a", "b"]), left=st.integers(0, 5))
    def push(self, group: str, left: int) -> None:
        self.waiting[self.born] = self.queue.push(self.born, group=group, left=left, places=3)
        self.born += 1

    @rule(group=st.sampled_from(["", "a", "b"]), left=st.integers(0, 5))
    def regroup(self, group: str, left: int) -> None:
        self.queue.regroup(group, left)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        shown = self.queue.peek()
        popped = self.queue.pop()
        assert popped == shown
        entry = self.waiting.pop(popped)
        assert all((entry.key, entry.number) < (e.key, e.number) for e in self.waiting.values())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.queue.remove(entry)
        self.queue.remove(entry)

    @invariant()
    def all_are_there(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert sorted(self.queue) == sorted(self.waiting)


TestQueue = QueueMachine.TestCase


def test_an_empty_queue_refuses_to_pop() -> None:
    with pytest.raises(IndexError):
        TurnQueue[int]().pop()
