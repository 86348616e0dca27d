"""The costs of calls, in round trips instead of seconds, do not grow with a step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.experience_store.records import Ending
from services.experience_store.store import Store
from services.experience_store.trajectories import Append, Appended
from tests.support.experience import (
    Response,
    Stage,
    ids_of,
    make_sample,
    make_stage,
    staged_row,
)
from tests.support.waiting import PATIENCE
from troupe.rpc import new_id


async def trips_of(stage: Stage, call: Callable[[], Awaitable[Any]]) -> int:
    """Return the number of round trips to Redis of `call`."""
    database = stage.store.database
    original, trips = database.call_each, 0

    async def counting(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal trips
        trips += 1
        return await original(*args, **kwargs)

    database.call_each = counting  # type: ignore[method-assign]
    try:
        await call()
    finally:
        database.call_each = original  # type: ignore[method-assign]
    return trips


@pytest.mark.parametrize("size", [2, 64])
async def test_round_trips_do_not_depend_on_the_size_of_a_step(store: Store, size: int) -> None:
    queries = tuple(f"q{number}" for number in range(size))
    stage = await make_stage(store, new_id("job"), queries=queries)
    *most, last = stage.trajectories
    for query, trajectory in most:
        await stage.append(query, trajectory)
    # Stage, decide, carry out, for any number of policies and rows.
    assert await trips_of(stage, lambda: stage.append(*last)) == 1
    # The script: the payloads are in memory since their append.
    assert await trips_of(stage, lambda: stage.claim(claim="c1", samples=3)) == 1
    await stage.claim(claim="c2", samples=2 * size)
    assert await trips_of(stage, lambda: stage.renew("trainer")) == 1
    # The ids behind the digest, then the script.
    assert await trips_of(stage, lambda: stage.commit(["c1", "c2"])) == 2


async def test_endings_of_one_call_are_noted_by_one_command_per_table_before_their_rows(
    stage: Stage,
) -> None:
    database, sent = stage.store.database, list[Any]()
    original = database.call_each

    async def noting(commands: Any, **rest: Any) -> list[Any]:
        sent.extend(commands)
        return await original(commands, **rest)

    appends = [
        Append(
            stage.job,
            stage.step,
            trajectory,
            Ending("COMPLETED", new_id("append"), query, ""),
            [
                staged_row(make_sample(query, turn, trajectory, policy=policy, agent=policy))
                for turn, policy in enumerate(stage.policies)
            ],
        )
        for query, trajectory in stage.trajectories
    ]
    database.call_each = noting  # type: ignore[method-assign]
    ended = await stage.store.trajectories.append_each(appends)
    database.call_each = original  # type: ignore[method-assign]
    assert all(isinstance(one, Appended) and one.accepted for one in ended)
    number = len(stage.policies)
    kinds = ["SADD"] * number, ["HSET"] * number * len(appends), ["EVALSHA"] * number
    assert [one[0] for one in sent] == [kind for some in kinds for kind in some]
    assert {len(one) - 2 for one in sent[:number]} == {len(appends)}


async def test_a_burst_of_trajectories_is_taken_whole(store: Store) -> None:
    """Like a demo step: 256 trajectories of three turns, all at once, while a trainer claims."""
    queries = tuple(f"q{number}" for number in range(32))
    stage = await make_stage(store, new_id("job"), queries=queries, group_size=8)

    def rows(query: str, trajectory: str) -> list[Any]:
        policies = ("solver", "checker", "solver")
        return [
            make_sample(query, turn, trajectory, policy=policy, agent=f"{policy}-{turn}")
            for turn, policy in enumerate(policies)
        ]

    async def train() -> list[str]:
        seen: list[str] = []
        while True:
            response = await stage.claim(claim=new_id("claim"), samples=32, wait=PATIENCE)
            if response.outcome == Response.OUTCOME_EXHAUSTED:
                return seen
            assert len(response.samples) == 32
            seen += ids_of(response)

    training = asyncio.create_task(train())
    accepted = await asyncio.gather(
        *(stage.append(query, name, rows(query, name)) for query, name in stage.trajectories)
    )
    assert all(accepted)
    seen = await training
    assert len(seen) == len(set(seen)) == 512
    assert await stage.counts() == {"claimed": 512}
