"""Turns that ended together: told in groups, so that what follows the first need not wait."""

from __future__ import annotations

import asyncio

import pytest

from services.rollout.engines.embedded.adapters import LiveVersion
from services.rollout.engines.embedded.batcher import (
    NOTIFY_GROUP,
    NOTIFY_ITERATIONS,
    Ended,
    notify_ended,
)
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import TurnReturned
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.turns import EngineTurn
from tests.rollout.engines.models import make_model
from troupe.job import PolicySpec
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling
from troupe.workflow.token_ids import TokenIds


def turns(count: int) -> list[EngineTurn]:
    how = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, drawn=0)
    return [
        EngineTurn(str(n), TokenIds.of([1]), how, max_new_tokens=1, stop_ids=frozenset(), seed=n)
        for n in range(count)
    ]


class Idle:
    """A batcher in which nothing happens by itself."""

    alive = True

    def __init__(self) -> None:
        self.submitted: list[tuple[Ended, EngineTurn]] = []

    def submit(self, turn: EngineTurn, live: LiveVersion, ended: Ended) -> None:
        self.submitted.append((ended, turn))

    def cancel(self, turn: EngineTurn) -> None:
        turn.closed = True

    def stop(self, timeout: float) -> None:
        pass


async def generating(
    count: int,
) -> tuple[EmbeddedEngine, list[asyncio.Task[EngineResponse]], list[tuple[Ended, EngineTurn]]]:
    """An engine that has begun so many turns of one token, its calls, and what its batcher has."""
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "nowhere"}
    how = {"in_flight": "restart", "max_running": count}
    spec = PolicySpec.model_validate({"model": model, "engine": how})
    engine, batcher = EmbeddedEngine("e", "p", spec), Idle()
    engine.max_context = 100
    engine._host.batcher = batcher  # type: ignore[assignment]
    engine._host.model = make_model(0)
    engine._life.started()
    engine._life.updating(1)
    engine._life.verified(1, "")
    asked = Sampling(max_new_tokens=1, seed=0)
    calls = [
        asyncio.create_task(engine.generate(str(n), [1], asked, deadline_seconds=60))
        for n in range(count)
    ]
    await asyncio.sleep(0.01)
    assert len(batcher.submitted) == count
    return engine, calls, batcher.submitted


@pytest.mark.parametrize("count", [0, 1, NOTIFY_GROUP, NOTIFY_GROUP + 1, 5 * NOTIFY_GROUP + 3])
async def test_every_turn_is_told_once_and_in_order(count: int) -> None:
    told: list[EngineTurn] = []
    made = turns(count)
    notify_ended([(lambda turn, error: told.append(turn), turn) for turn in made])
    assert told == made[:NOTIFY_GROUP]
    for _ in range(count // NOTIFY_GROUP * NOTIFY_ITERATIONS + 1):
        await asyncio.sleep(0)
    assert told == made


async def test_work_after_a_group_of_ended_turns_precedes_the_next_group() -> None:
    moves: list[tuple[str, int]] = []

    async def follow(number: int) -> None:
        for _ in range(NOTIFY_ITERATIONS - 3):
            await asyncio.sleep(0)
        moves.append(("done", number))

    tasks = []

    def ended(turn: EngineTurn, _error: str | None) -> None:
        moves.append(("told", int(turn.request_id)))
        tasks.append(asyncio.create_task(follow(int(turn.request_id))))

    notify_ended([(ended, turn) for turn in turns(3 * NOTIFY_GROUP)])
    for _ in range(4 * NOTIFY_ITERATIONS):
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    groups = [moves[n : n + NOTIFY_GROUP] for n in range(0, len(moves), NOTIFY_GROUP)]
    assert [{what for what, _ in group} for group in groups] == [{"told"}, {"done"}] * 3
    assert [number for what, number in moves if what == "done"] == list(range(3 * NOTIFY_GROUP))


@pytest.mark.parametrize("died", [False, True])
async def test_a_turn_that_waits_to_be_told_is_not_lost_with_its_engine(died: bool) -> None:
    count = 2 * NOTIFY_GROUP
    engine, calls, some = await generating(count)
    for _, turn in some:
        turn.append(5, -1.0, 1)
    notify_ended(some[:-1])  # the last one has its token, too, and the pass has not said so yet
    if died:
        engine._die("gone")
    else:
        engine._return_turns(common_pb.WeightsRef(version=2))
    got = await asyncio.gather(*calls)
    assert [generation.token_ids for generation in got] == [[5]] * count


async def test_a_turn_with_tokens_to_come_is_given_back() -> None:
    engine, [call], _ = await generating(1)
    engine._return_turns(common_pb.WeightsRef(version=2))
    with pytest.raises(TurnReturned):
        await call
