"""Turns that ended together: told in groups, so that what follows the first need not wait."""

from __future__ import annotations

import asyncio

import pytest

from services.rollout.engines.base import SamplingParams
from services.rollout.engines.endings import GROUP, STEPS, tell
from services.rollout.engines.turns import Turn


def turns(count: int) -> list[Turn]:
    how = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, drawn=0)
    return [
        Turn(str(n), [1], how, max_new_tokens=1, stop_ids=frozenset(), seed=n) for n in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, GROUP, GROUP + 1, 5 * GROUP + 3])
async def test_every_turn_is_told_once_and_in_order(count: int) -> None:
    told: list[Turn] = []
    made = turns(count)
    tell([(lambda turn, error: told.append(turn), turn) for turn in made])
    assert told == made[:GROUP]
    for _ in range(count // GROUP * STEPS + 1):
        await asyncio.sleep(0)
    assert told == made


async def test_what_follows_the_first_group_is_done_before_the_next_one_is_told() -> None:
    moves: list[tuple[str, int]] = []

    async def follow(number: int) -> None:
        for _ in range(STEPS - 3):
            await asyncio.sleep(0)
        moves.append(("done", number))

    tasks = []

    def ended(turn: Turn, _error: str | None) -> None:
        moves.append(("told", int(turn.request_id)))
        tasks.append(asyncio.create_task(follow(int(turn.request_id))))

    tell([(ended, turn) for turn in turns(3 * GROUP)])
    for _ in range(4 * STEPS):
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    groups = [moves[n : n + GROUP] for n in range(0, len(moves), GROUP)]
    assert [{what for what, _ in group} for group in groups] == [{"told"}, {"done"}] * 3
    assert [number for what, number in moves if what == "done"] == list(range(3 * GROUP))
