"""Tools and reward functions in a real reward service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from services.rollout import rewards
from services.rollout.trajectories.clock import TrajectoryClock
from tests.rollout.house import PLAYS, House, evaluation, open_house
from tests.rollout.processes import ServiceProcess
from tests.support.cluster import job_yaml
from tests.support.needs import BUBBLEWRAP
from tests.support.waiting import until
from troupe.functions.costs import to_spec
from troupe.functions.sources import SourceStore
from troupe.job import parse_job
from troupe.rpc import connect
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub
from troupe.workflow import Tools

FAILED = common_pb.TRAJECTORY_STATE_FAILED
COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED


@pytest.fixture
async def house(tmp_path: Path, reward_process: ServiceProcess) -> AsyncIterator[House]:
    async with open_house(tmp_path, reward=reward_process.address) as house:
        yield house


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"entrypoint": f"{PLAYS}:{name}", **fields}


async def test_rewards_of_functions_add_up_with_the_workflows(house: House) -> None:
    await house.prepare(
        "one_turn", rewards={"length": function("answer_length"), "all": function("one_for_all")}
    )
    event = await house.run_one(index=3)
    assert event.state == COMPLETED, event.reason
    length = len(event.turns[0].response)
    assert dict(event.rewards) == {"solver": length + (length + 3) + 10.0, "checker": 12.0}


async def test_a_tool_gives_its_value(house: House) -> None:
    await house.prepare("uses_tool", tools={"add": function("add")})
    event = await house.run_one(index=3)
    assert event.rewards["solver"] == 4.0


async def test_a_job_without_functions_asks_no_reward_service() -> None:
    class Stub:
        def __getattr__(self, method: str) -> None:
            raise AssertionError(method)

    job = parse_job(job_yaml())
    await rewards.JobFunctions(cast(Any, Stub()), "job", job, SourceStore()).announce()
    tools = {"add": function("add")}
    job = parse_job(job_yaml(tools=tools))
    with pytest.raises(AssertionError, match="RegisterFunction"):
        await rewards.JobFunctions(cast(Any, Stub()), "job", job, SourceStore()).announce()


async def test_a_service_that_forgets_its_functions_is_told_of_them_again(
    reward_process: ServiceProcess,
) -> None:
    """A service may restart between the registration of a function and its call."""
    async with connect(reward_process.address) as channel:
        stub = RewardStub(channel)
        forgotten = 0

        class Forgetful:
            RegisterFunction = stub.RegisterFunction

            async def Invoke(
                self, request: reward_pb.InvokeRequest, timeout: float
            ) -> reward_pb.InvokeResponse:
                nonlocal forgotten
                if forgotten < 2:
                    forgotten += 1
                    where = {"name": request.name, "version": request.version}
                    await stub.DeleteFunction(
                        reward_pb.DeleteFunctionRequest(request_id=f"forget-{forgotten}", **where)
                    )
                response: reward_pb.InvokeResponse = await stub.Invoke(request, timeout=timeout)
                return response

        spec = parse_job(job_yaml(tools={"add": function("add")}))
        functions = rewards.JobFunctions(cast("Any", Forgetful()), "forgetful", spec, SourceStore())
        await functions.register()
        assert [one["function"]["name"] for one in functions.definitions] == ["add"]
        assert forgotten == 2


async def test_functions_of_shipped_code_run_from_it(
    reward_process: ServiceProcess, tmp_path: Path
) -> None:
    """Two jobs with two versions of a package that the reward service does not have."""
    store = SourceStore(tmp_path)
    async with connect(reward_process.address) as channel:
        for version in (1, 2):
            text = f"import troupe\n\n\n@troupe.tool\ndef told() -> int:\n    return {version}\n"
            sha256 = store.put([reward_pb.SourceFile(path="flown/told.py", content=text.encode())])
            code = {"include": ["flown"], "sha256": sha256}
            tool = {"entrypoint": "flown.told:told"}
            spec = parse_job(job_yaml(tools={"told": tool}, code=code))
            functions = rewards.JobFunctions(RewardStub(channel), f"j{version}", spec, store)
            await functions.announce()
            assert [one["function"]["name"] for one in functions.definitions] == ["told"]
            clock = TrajectoryClock(60, longest=60, patient=False)
            tools = Tools(["told"], rewards.TrajectoryTools(functions, "t", clock, lambda: 1, "q"))
            assert await tools.call("told") == version


async def test_the_service_is_told_the_query_and_what_the_workflow_expects() -> None:
    asked: list[reward_pb.InvokeRequest] = []

    class Stub:
        async def Invoke(
            self, request: reward_pb.InvokeRequest, timeout: float
        ) -> reward_pb.InvokeResponse:
            asked.append(request)
            return reward_pb.InvokeResponse(result_json="3")

    spec = parse_job(job_yaml(tools={"add": function("add")}, priority=20))
    functions = rewards.JobFunctions(cast("Any", Stub()), "job", spec, SourceStore())
    clock = TrajectoryClock(60, longest=60, patient=False)
    tools = Tools(["add"], rewards.TrajectoryTools(functions, "t", clock, lambda: 1, "q7"))
    assert await tools.expecting(4.5).call("add", a=1, b=2) == 3
    assert await tools.call("add", a=1, b=2) == 3
    assert [(one.query_id, one.expected_seconds) for one in asked] == [("q7", 4.5), ("q7", 0.0)]
    assert {one.weight for one in asked} == {4.0}, "20 units of priority double its share twice"


@pytest.mark.slow
@BUBBLEWRAP
async def test_a_trajectory_has_a_sandbox_until_it_ends(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("stateful-reward")
    process = ServiceProcess("reward", directory)
    process.start()
    try:
        async with open_house(tmp_path, reward=process.address) as house:
            tool = function("counts", sandbox="bubblewrap", stateful=True)
            await house.prepare("uses_what_it_left", tools={"counts": tool})
            for _ in range(2):  # another trajectory has another
                event = await house.run_one(index=3)
                assert event.rewards["solver"] == 2.0, event.reason
            await until(
                lambda: (directory / "reward.log").read_text().count("trajectory was closed") >= 2
            )
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("explodes", {}, "reward_raised: rewards/score: "),
        ("hangs", {"timeout_seconds": 0.3}, "reward_timeout: rewards/score: "),
        ("not_a_number", {}, "reward_bad_result: rewards/score: "),
        ("dies", {}, "reward_worker_died: rewards/score: "),
        ("unknown_agent", {}, "reward_unknown_agent: rewards.score rewards 'nobody'"),
        ("no_such_function", {}, "reward_not_importable: rewards/score: "),
    ],
)
async def test_a_bad_reward_function_fails_the_trajectory_by_name(
    house: House, name: str, fields: dict[str, Any], reason: str
) -> None:
    await house.prepare("scored_elsewhere", rewards={"score": function(name, **fields)})
    event = await house.run_one()
    assert event.state == FAILED
    assert event.reason.startswith(reason), event.reason
    fatal = name in ("unknown_agent", "no_such_function")
    assert event.HasField("problem") == fatal
    assert not fatal or event.problem.remedy
    assert len(event.turns) == 1


async def test_a_reward_that_hangs_ends_with_the_trajectory(house: House) -> None:
    await house.prepare(
        "scored_elsewhere",
        rewards={"score": function("hangs", timeout_seconds=30)},
        limits={"trajectory_seconds": 0.7},
    )
    event = await house.run_one()
    assert event.state == FAILED
    assert "deadline" in event.reason


async def test_a_tool_that_is_missing_or_fails_ends_the_trajectory(house: House) -> None:
    await house.prepare("uses_tool")
    event = await house.run_one()
    assert event.problem.kind == "tool_unknown_tool"
    assert event.problem.remedy


async def test_a_job_is_prepared_while_the_reward_service_is_away(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "_ANNOUNCE_SECONDS", 0.2)
    process = ServiceProcess("reward", tmp_path_factory.mktemp("late-reward"))
    process.start()
    process.kill()
    try:
        async with open_house(tmp_path, reward=process.address) as house:
            await house.prepare("one_turn", rewards={"all": function("one_for_all")})
            running = asyncio.create_task(house.run(evaluation(2)))
            await asyncio.to_thread(process.start)
            assert {e.state for e in (await running).values()} == {COMPLETED}
    finally:
        process.stop()


async def test_a_restarted_reward_service_is_told_its_functions_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    process = ServiceProcess("reward", tmp_path_factory.mktemp("own-reward"))
    process.start()
    try:
        async with open_house(tmp_path, reward=process.address) as house:
            await house.prepare("one_turn", rewards={"all": function("one_for_all")})
            process.kill()
            # Here it would hold the event loop, for which the house ends trajectories.
            await asyncio.to_thread(process.start)
            ended = await house.run(evaluation(4))
            assert {e.state for e in ended.values()} == {COMPLETED}
    finally:
        process.stop()


async def test_models_are_told_of_declared_and_of_deployed_tools(
    reward_process: ServiceProcess,
) -> None:
    channel = connect(reward_process.address)
    stub = RewardStub(channel)
    source = "tests.functions.declared:look_up"
    deployed = to_spec("finder", "7", source, {}, description="Deployed.", parameters={"type": "x"})
    await stub.RegisterFunction(
        reward_pb.RegisterFunctionRequest(request_id="f", function=deployed)
    )
    spec = parse_job(
        job_yaml(
            tools={
                "look": {"entrypoint": source, "arguments": {"order": "old"}, "quota": ""},
                "find": {"function": "finder@7"},
            }
        )
    )
    functions = rewards.JobFunctions(stub, "told", spec, SourceStore())
    await functions.register()
    by_name = {one["function"]["name"]: one["function"] for one in functions.definitions}
    assert by_name["look"]["description"] == "Finds pages."
    assert set(by_name["look"]["parameters"]["properties"]) == {"words", "limit"}
    assert by_name["find"]["parameters"] == {"type": "x"}
    called = await functions.call(
        "tools/look",
        '{"words": "a", "limit": 2}',
        reward_pb.InvokeRequest(trajectory_id="t"),
        60,
        rewards.TrajectorySandboxes(),
    )
    assert json.loads(called) == ["a", "a"]
    listed = (await stub.ListFunctions(reward_pb.ListFunctionsRequest())).functions
    (look,) = (one.function for one in listed if one.function.name == "told/tools/look")
    assert (look.version, look.cores, look.timeout_seconds, look.kind) == ("2", 0, 5.0, "tool")
    await channel.close(None)
