"""Any result or exception of a workflow or its tasks ends only that trajectory, with a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.rollout import hostile_plays
from tests.rollout.house import House, evaluation, make_spec, open_house
from tests.rollout.processes import ServiceProcess
from troupe.rpc import InvalidArgument
from troupe.v1 import common_pb2 as common_pb

FAILED = common_pb.TRAJECTORY_STATE_FAILED
COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
HERE = "tests.rollout.hostile_plays"


async def prepare(house: House, workflow: str, **changes: Any) -> None:
    await house.prepare_raw(make_spec("fine", **changes) | {"workflow": f"{HERE}:{workflow}"})


async def test_every_outcome_of_a_workflow_is_an_end_with_a_reason(house: House) -> None:
    names = hostile_plays.NAMES
    await prepare(house, "play", tasks={"source": f"{HERE}:Cases"})
    ended = await house.run(evaluation(len(names)))
    for index, name in enumerate(names):
        event, wanted = ended[f"h{index}-e0-t0"], hostile_plays.CASES[name][1]
        state = COMPLETED if wanted is None else FAILED
        assert event.state == state, (name, event.reason)
        assert len(event.reason) <= 1100, name
        start = re.escape(wanted or "").replace(re.escape("{}"), ".*")
        assert re.match(start, event.reason), (name, event.reason)
        assert event.HasField("problem") == (name == "unknown agent"), (name, event.problem)
        assert all(abs(value) < float("inf") for value in event.rewards.values()), name


async def test_every_item_of_the_tasks_is_one_or_fails_its_trajectory(house: House) -> None:
    await prepare(house, "fine", tasks={"source": f"{HERE}:Items"})
    ended = await house.run(evaluation(len(hostile_plays.ITEMS)))
    for index, (name, (_, wanted)) in enumerate(hostile_plays.ITEMS.items()):
        event = ended[f"h{index}-e0-t0"]
        if wanted is None:
            assert event.state == COMPLETED, (name, event.reason)
            continue
        assert event.state == FAILED, name
        assert event.reason.startswith(f"bad_task: held_out[{index}] of {HERE}:Items"), name
        assert wanted in event.reason, (name, event.reason)


@pytest.mark.parametrize("source", ["parses_arguments", "interrupted"])
async def test_tasks_that_end_processes_are_refused_by_their_field(
    house: House, source: str
) -> None:
    with pytest.raises(InvalidArgument, match="SystemExit") as found:
        await prepare(house, "fine", tasks={"source": f"{HERE}:{source}"})
    assert found.value.field == "tasks.source"


async def test_arguments_of_tools_that_are_not_json_are_refused(
    tmp_path: Path, reward_process: ServiceProcess
) -> None:
    async with open_house(tmp_path, reward=reward_process.address) as house:
        tools = {"add": {"entrypoint": "tests.rollout.plays:add"}}
        await prepare(house, "calls_tools", tools=tools)
        event = await house.run_one()
    assert event.state == COMPLETED, event.reason
    assert event.rewards["solver"] == 8.0
