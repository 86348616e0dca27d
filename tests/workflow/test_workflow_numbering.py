"""The program determines the numbers of turns in concurrent branches, not their speed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workflow import Agents, Prompt, play
from troupe.workflow.numbering import places

Delays = Callable[[], float]


async def outcome(workflow: Any, seed: int) -> list[tuple[Any, ...]]:
    """Return the rows to store when turns and tools take random times."""
    delays = random.Random(seed)

    async def policy(prompt: Prompt) -> str:
        await asyncio.sleep(delays.random() * 0.004)
        return f"{prompt.random.random():.6f}"

    def tool() -> int:
        return 1

    workflow_delay = [delays.random() * 0.004 for _ in range(100)]
    played = await play(
        workflow,
        {"delays": workflow_delay},
        policy=policy,
        tools={"tool": tool},
        group_by="turn",
        seed=3,
    )
    return [
        (row.sample_id, row.group_id, row.turn.number, row.turn.messages, row.turn.reply.text)
        for row in played.samples
        if row.turn.reply is not None
    ]


async def two_lines(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
    """Two branches of several turns each, with equal first prompts; a common end."""

    async def line(number: int) -> str:
        said = "begin"
        for _ in range(2 + number):
            said = (await agents["solver"].chat(said)).text
        return said

    ends = await asyncio.gather(line(0), line(1))
    await agents["solver"].chat(" ".join(ends))
    return {"solver": 1.0}


async def late_starters(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
    """Branches whose first turn comes after something that takes its time."""

    async def line(number: int) -> None:
        await asyncio.sleep(query["delays"][number])
        await tools.call("tool")
        reply = await agents["solver"].chat("same")
        await agents["checker"].chat(reply.text)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(line(number))
    return {"solver": 1.0, "checker": 1.0}


async def nested(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
    """Branches of branches, together with tasks without turns."""

    async def leaf(number: int) -> None:
        await asyncio.sleep(query["delays"][number])
        await agents["solver"].chat("leaf")

    async def inner(number: int) -> None:
        idle = asyncio.create_task(asyncio.sleep(query["delays"][10 + number]))
        await asyncio.gather(leaf(2 * number), leaf(2 * number + 1))
        await agents["checker"].chat("inner", n=2)
        await idle

    await asyncio.gather(inner(0), inner(1))
    return {"solver": 1.0, "checker": 1.0}


@pytest.mark.parametrize("workflow", [two_lines, late_starters, nested])
async def test_numbers_of_turns_do_not_depend_on_timing(workflow: Any) -> None:
    first = await outcome(workflow, 0)
    for seed in range(1, 8):
        assert await outcome(workflow, seed) == first


async def test_a_branchs_turns_are_counted_by_themselves() -> None:
    rows = await outcome(two_lines, 0)
    assert [row[1].removeprefix("q0/solver/") for row in rows] == [
        *("0:0", "0:1"),
        *("1:0", "1:1", "1:2"),
        "0",
    ]
    assert [row[2] for row in rows] == list(range(6))
    assert [row[0] for row in rows] == [f"q0_{n}_q0-t0" for n in range(6)]


async def test_tasks_without_turns_do_not_count() -> None:
    places_of = [row[1].removeprefix("q0/") for row in await outcome(nested, 0)]
    assert places_of == [
        *("solver/0.0:0", "solver/0.1:0", "checker/0:0", "checker/0:0"),
        *("solver/1.0:0", "solver/1.1:0", "checker/1:0", "checker/1:0"),
    ]


async def test_turns_asked_for_by_the_workflow_itself_count_as_they_are_written() -> None:
    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        await asyncio.gather(*(agents["solver"].chat(str(b)) for b in range(4)))
        await agents["solver"].chat("end")
        return {"solver": 1.0}

    assert [row[1] for row in await outcome(workflow, 0)] == [f"q0/solver/{n}" for n in range(5)]


async def test_a_task_factory_that_was_there_is_kept() -> None:
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(factory)
    try:
        assert await outcome(two_lines, 0) == await outcome(two_lines, 1)
    finally:
        loop.set_task_factory(None)
    assert any(name.endswith("line") for name in made)


# A workflow at random: turns of agents, alone or several at once, and branches that run together.
programs = st.recursive(
    st.sampled_from(["a", "b", "a*2"]),
    lambda inner: st.lists(st.lists(inner, max_size=3), min_size=1, max_size=3),
    max_leaves=8,
)


def workflow_of(program: list[Any]) -> Any:
    async def walk(agents: Agents, lines: list[Any], said: str) -> str:
        for item in lines:
            if isinstance(item, str):
                agent, _, many = item.partition("*")
                replies = await agents[agent].chat(said, n=int(many or 1))
                said = replies[-1].text
            else:
                ends = await asyncio.gather(*(walk(agents, line, said) for line in item))
                said = "".join(ends)
        return said

    async def workflow(query: Any, agents: Agents, tools: Any) -> dict[str, float]:
        await walk(agents, program, "begin")
        return {"a": 1.0, "b": 1.0}

    return workflow


@given(st.lists(programs, min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_a_workflow_stores_the_same_rows_in_any_order_of_completion(program: list[Any]) -> None:
    workflow = workflow_of(program)
    rows = asyncio.run(outcome(workflow, 0))
    assert rows == asyncio.run(outcome(workflow, 1))
    assert [row[0] for row in rows] == [f"q0_{n}_q0-t0" for n in range(len(rows))]


paths = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)


@given(paths)
@settings(max_examples=200, deadline=None)
def test_places_keep_the_order_and_have_no_gaps(given: list[tuple[int, ...]]) -> None:
    found = places(given)
    assert found.keys() == set(given)
    assert sorted(given) == sorted(given, key=found.__getitem__)
    for place in found.values():
        for depth in range(len(place)):
            if place[depth]:  # someone stands before it
                before = (*place[:depth], place[depth] - 1)
                assert any(other[: depth + 1] == before for other in found.values())
