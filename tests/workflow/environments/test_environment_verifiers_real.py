"""Unmodified environments of the `verifiers` library, of both of its generations. The library is
installed in separate environments. Environments of PyPI (`marble-v1`, `user-sim` over it,
`stardata`) are played unchanged; `tests/support/verifiers_envs` adds features that these lack:
tools, several turns, trouble.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.own_python import OWN, RUBRICS, TASKSETS, own_python
from tests.support.waiting import until
from troupe.data.tasks import TaskSplit, open_tasks
from troupe.job.sections.data import TasksSpec, VerifiersSpec
from troupe.workflow import (
    EntrypointError,
    Played,
    ScriptedPolicy,
    TurnError,
    WorkflowError,
    play,
)
from troupe.workflow.environments import EnvironmentFault
from troupe.workflow.environments.adapters import verifiers
from troupe.workflow.environments.adapters.verifiers_process import close_pools, pool_of

pytestmark = pytest.mark.slow
ADD = '<tool_call>{"name": "add", "arguments": {"a": 0, "b": 4}}</tool_call>'


@pytest.fixture(scope="module")
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_python(tmp_path_factory.mktemp("verifiers"), TASKSETS)


@pytest.fixture(scope="module")
def rubrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_python(tmp_path_factory.mktemp("verifiers"), RUBRICS)


@pytest.fixture(autouse=True)
def own_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the working directory are found by the interpreter."""
    monkeypatch.chdir(OWN)


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """Importing the library takes seconds: tests share the processes, which end with the last."""
    yield
    close_pools()


async def tasks_of(split: str = "train", **fields: Any) -> TaskSplit:
    held_out = fields.pop("held_out", None)
    spec = TasksSpec.model_validate({"verifiers": fields, "held_out": held_out, "shuffle": False})
    return await asyncio.to_thread(open_tasks, spec, split, 0)


async def played(
    script: Any, *agents: str, index: int = 0, split: str = "train", **fields: Any
) -> Played:
    tasks = await tasks_of(split, **fields)
    query: Mapping[str, Any] = await asyncio.to_thread(tasks.__getitem__, tasks.position(index))
    return await play(
        verifiers.play, query, policy=ScriptedPolicy(script), agents=agents or ["agent"]
    )


async def test_a_public_taskset_is_played_unchanged(tasksets: str) -> None:
    one = await tasks_of(environment="marble-v1", python=tasksets)
    query = dict(await asyncio.to_thread(one.__getitem__, 2))
    task = query["task"]
    answer = f"```json\n{task['solution']}\n```".replace("'", '"')
    right = await play(verifiers.play, query, policy=ScriptedPolicy([answer]), agents=["solver"])
    wrong = await play(verifiers.play, query, policy=ScriptedPolicy(["no"]), agents=["solver"])
    assert right.rewards == {"solver": 1.0, "team": 1.0}
    assert wrong.rewards == {"solver": 0.0, "team": 0.0}
    assert (right.metrics["answered_legally"], right.metrics["closeness"]) == (1.0, 1.0)
    assert right.turns[0].messages == (("user", task["prompt"]),)


async def test_two_roles_of_a_public_environment_are_two_agents(tasksets: str) -> None:
    found = await played(
        {"assistant": ["What for?", "Done."], "user": ["Place it.", "Now.", "###DONE###"]},
        *("assistant", "user"),
        environment="marble-v1",
        python=tasksets,
        args={"id": "user-sim"},
    )
    assert [turn.role.name for turn in found.turns] == ["user", "assistant"] * 2 + ["user"]
    assert set(found.rewards) == {"assistant", "user", "team"}
    assert found.metrics["assistant/user_turns"] == 3
    assert found.metrics["prefix_breaks"] == 0
    assert dict(found.turns[-1].messages)["user"] == "Done."


async def test_several_conversations_of_a_role_have_rewards_of_their_own(tasksets: str) -> None:
    found = await played(
        {"writer": ["a", "b"], "judge": ["yes"]},
        *("writer", "judge"),
        environment="relay-v1",
        python=tasksets,
        args={"drafts": 2},
    )
    writing = [turn.reply for turn in found.turns if turn.role.name == "writer"]
    assert [reply and reply.reward for reply in writing] == [2.0, 0.0]
    assert len({reply and reply.chain for reply in writing}) == 2
    assert found.rewards == {"team": 1.0, "judge": 1.0, "writer": 1.0}


async def test_a_public_environment_of_rubrics_is_played_unchanged(rubrics: str) -> None:
    gym = {"environment": "stardata.envs.constraint_gym", "python": rubrics}
    tasks = await tasks_of(**gym)
    assert len(tasks) == 36
    found = await played(["an old silent pond\na frog jumps in\nsplash"], **gym)
    assert 0 < found.rewards["agent"] < 1
    assert found.metrics["prosody_reward"] == found.rewards["agent"]


async def test_tools_of_a_taskset_are_called(tasksets: str) -> None:
    shared = {"environment": "counting-v1", "python": tasksets}
    found = await played([ADD, "It is 4."], **shared)
    assert found.rewards["agent"] == 1.0
    assert found.metrics["asked"] == 2
    assert found.turns[1].messages[-1] == ("tool", "4")
    assert found.metrics["prefix_breaks"] == 0


async def test_tools_of_rubrics_are_called(rubrics: str) -> None:
    sums = {"environment": "sums-env", "python": rubrics}
    found = await played([ADD, "4"], **sums)
    assert found.rewards["agent"] == 1.25
    assert (found.metrics["correct"], found.metrics["calls"]) == (1.0, 1.0)
    assert [turn.messages[-1] for turn in found.turns][1] == ("tool", "4")
    reweighed = await played([ADD, "4"], **sums, weights={"calls": 0.0, "correct": 3.0})
    assert reweighed.rewards["agent"] == 3.0


async def test_held_out_tasks_are_those_for_evaluation_or_a_part(
    rubrics: str, tasksets: str
) -> None:
    sums = {"environment": "sums-env", "python": rubrics}
    assert len(await tasks_of("held_out", **sums)) == 3
    (first, *_) = [(await tasks_of("held_out", **sums))[0]["task"]["question"]]
    assert first == "What is 1000 + 4?"
    bare = {**sums, "args": {"evaluated": False}}
    with pytest.raises(EntrypointError, match="no evaluation tasks") as caught:
        await tasks_of("held_out", **bare)
    assert caught.value.field == "tasks.held_out"
    parts = [await tasks_of(split, **bare, held_out=0.2) for split in ("train", "held_out")]
    assert list(map(len, parts)) == [16, 4]
    relay = {"environment": "relay-v1", "python": tasksets}
    others = await tasks_of("held_out", **relay, held_out_args={"taskset": {"letters": "x"}})
    assert others[0]["task"]["letter"] == "x"
    endless = await tasks_of("train", environment="counting-v1", python=tasksets, held_out=0.5)
    assert [endless[at]["task"]["total"] for at in (0, 1, 5000, 0)] == [5, 7, 10005, 5]


async def test_refusals_of_an_environment_have_their_kinds(rubrics: str, tasksets: str) -> None:
    for python, environment, args, kind in (
        (rubrics, "nowhere-env", {}, "environment_not_installed"),
        (tasksets, "nowhere-v1", {}, "environment_not_installed"),
        (rubrics, "sums-env", {"key": "RELAY_KEY"}, "environment_key_missing"),
        (rubrics, "sums-env", {"group": True}, "environment_unsupported"),
        (rubrics, "sums-env", {"colour": 1}, "environment_refused"),
        (tasksets, "relay-v1", {"taskset": {"colour": 1}}, "environment_refused"),
    ):
        with pytest.raises(EntrypointError) as caught:
            await tasks_of(environment=environment, python=python, args=args)
        assert caught.value.kind == kind, caught.value
        assert (caught.value.field or "").startswith("tasks.verifiers."), caught.value


@pytest.mark.parametrize(
    ("trouble", "said", "reason"),
    [
        ("raise", "the relay broke", "raised"),
        ("hang", "within 4 s", "deadline"),
        ("block", "within 4 s", "deadline"),
        ("die", "exited with status 7", "died"),
    ],
)
async def test_an_episode_that_fails_is_a_fault_and_the_next_one_is_played(
    tasksets: str, trouble: str, said: str, reason: str
) -> None:
    relay = {
        "environment": "relay-v1",
        "python": tasksets,
        "episode_seconds": 4.0,
        "args": {"trouble": trouble},
    }
    script = {"writer": ["a"], "judge": ["yes"]}
    with pytest.raises(EnvironmentFault, match=said) as caught:
        await played(script, "writer", "judge", **relay)
    assert caught.value.reason == reason
    # What hangs is ended, and the next episode has a process.
    pool = pool_of(VerifiersSpec.model_validate(relay))
    await until(lambda: trouble != "block" or not any(one.alive for one in pool._processes))
    assert (await pool.for_episode()).alive


async def test_a_cancelled_episode_ends_in_the_child(tasksets: str) -> None:
    relay = {"environment": "relay-v1", "python": tasksets, "args": {"trouble": "hang"}}
    task = asyncio.create_task(played({"writer": ["a"]}, "writer", "judge", **relay))
    pool = pool_of(VerifiersSpec.model_validate(relay))
    await until(lambda: any(one.playing for one in pool._processes))
    (process,) = pool._processes
    await asyncio.sleep(1.0)  # the episode hangs, if it has begun; it ends alike before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not process._pending)
    assert process.alive
    assert process.playing == 0


async def test_a_model_call_that_fails_is_not_the_environments_fault(
    tasksets: str, rubrics: str
) -> None:
    for python, environment in ((tasksets, "counting-v1"), (rubrics, "sums-env")):
        with pytest.raises((TurnError, WorkflowError), match="script") as caught:
            await played([], environment=environment, python=python)
        assert not isinstance(caught.value, EnvironmentFault)


async def test_a_killed_process_loses_its_episodes_and_no_others(tasksets: str) -> None:
    relay = {"environment": "relay-v1", "python": tasksets, "args": {"trouble": "hang"}}
    task = asyncio.create_task(played({"writer": ["a"]}, "writer", "judge", **relay))
    pool = pool_of(VerifiersSpec.model_validate(relay))
    await until(lambda: any(one.playing for one in pool._processes))
    (process,) = pool._processes
    assert process._process is not None
    os.killpg(process._process.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match="SIGKILL"):
        await task
    assert (await pool.for_episode()) is not process


def test_episodes_of_one_process_run_concurrently(tasksets: str) -> None:
    async def many() -> list[Played]:
        tasks = await tasks_of(environment="relay-v1", python=tasksets)
        query = tasks[0]
        script = {"writer": ["a"], "judge": ["yes"]}
        return await asyncio.gather(
            *(
                play(
                    verifiers.play,
                    query,
                    policy=ScriptedPolicy(script),
                    agents=["writer", "judge"],
                )
                for _ in range(24)
            )
        )

    # In a second event loop the same processes continue.
    for _ in range(2):
        for found in asyncio.run(many()):
            assert found.rewards == {"writer": 2.0, "judge": 1.0, "team": 1.5}
