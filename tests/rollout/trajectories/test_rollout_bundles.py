"""Events in messages: all of them, in order, as few messages as a message's size allows."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.trajectories import runner
from services.rollout.trajectories.runner import TrajectoryListener
from tests.support.waiting import PATIENCE
from troupe.rpc import Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED


def event(number: int, size: int = 0) -> rollout_pb.TrajectoryEvent:
    return rollout_pb.TrajectoryEvent(trajectory_id=str(number), state=COMPLETED, reason="x" * size)


def split(data: bytes) -> list[rollout_pb.TrajectoryEvent]:
    first = rollout_pb.TrajectoryEvent.FromString(data)
    events = [first, *first.together]
    first.ClearField("together")
    return events


@given(st.lists(st.integers(0, 300), max_size=12))
def test_property_messages_hold_all_events_in_order(sizes: list[int]) -> None:
    most = 256
    given = [event(number, size) for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_MAX_MESSAGE_BYTES", most)
        found = [split(message) for message in runner.messages(given)]
    assert [one for message in found for one in message] == given
    for message, following in pairwise(found):
        size = sum(one.ByteSize() for one in message)
        assert len(message) == 1 or size <= most
        assert size + following[0].ByteSize() > most


class Left:
    """A runner that records leaving listeners."""

    def __init__(self) -> None:
        self.gone: Counter[Any] = Counter()

    def leave(self, key: tuple[str, str], listener: TrajectoryListener) -> None:
        self.gone[key] += 1


async def test_events_before_a_lost_trajectory_are_delivered_first() -> None:
    runner = Left()
    listener = TrajectoryListener(runner, "job", {"0", "1", "2"}, endings_only=True)  # type: ignore[arg-type]
    for news in (event(0), event(1), Unavailable("the store is away"), event(2)):
        listener.deliver(news)
    told = listener.bundles()
    async with asyncio.timeout(PATIENCE):
        assert [one.trajectory_id for one in await anext(told)] == ["0", "1"]
        with pytest.raises(Unavailable, match="the store is away"):
            await anext(told)
    assert runner.gone == {("job", "2"): 1}
