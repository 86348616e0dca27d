"""Where a job's queries come from."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from services.rollout.trajectories import queries
from services.rollout.trajectories.queries import QuerySource
from tests.support.waiting import PATIENCE
from troupe.job import TasksSpec
from troupe.workflow import WorkflowError

MADE: list[int] = []
THREADS: set[int] = set()


class Words:
    """Item 3 is none, item 5 takes longer than others."""

    def __init__(self, split: str) -> None:
        MADE.clear()
        THREADS.clear()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        MADE.append(index)
        THREADS.add(threading.get_ident())
        if index == 3:
            raise LookupError("no such word")
        if index == 5:
            time.sleep(2 * queries._TOGETHER_SECONDS)
        return {"word": index}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> QuerySource:
    monkeypatch.setattr(queries, "_TOGETHER_SECONDS", 0.2)
    return QuerySource(TasksSpec(source=f"{__name__}:Words"))


async def test_queries_that_are_wanted_at_once_are_made_together_and_once(
    source: QuerySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_TOGETHER_SECONDS", PATIENCE)
    wanted = [*range(6, 30), *range(6, 30)]
    found = await asyncio.gather(*(source.get("train", index) for index in wanted))
    assert [item["word"] for item in found] == wanted
    assert sorted(MADE) == list(range(6, 30))
    assert len(THREADS) <= 2


async def test_a_query_that_cannot_be_made_fails_only_its_own_caller(source: QuerySource) -> None:
    asked = (source.get("train", index) for index in range(5))
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [one for one in found if isinstance(one, WorkflowError)] == [found[3]]


async def test_queries_are_not_prefetched_after_a_slow_one(source: QuerySource) -> None:
    first = asyncio.create_task(source.get("train", 1))
    rest = [asyncio.create_task(source.get("train", index)) for index in (5, 6, 7)]
    await first
    assert 7 not in MADE
    assert [(await one)["word"] for one in rest] == [5, 6, 7]


async def test_few_queries_are_kept_and_a_caller_that_leaves_is_forgotten(
    source: QuerySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_KEPT", 4)
    await asyncio.gather(*(source.get("train", index) for index in range(8, 24)))
    assert len(source._items) == 4
    leaves = asyncio.create_task(source.get("train", 5))
    await asyncio.sleep(0)
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert not source._wanted
