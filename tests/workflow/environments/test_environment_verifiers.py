"""Environments of the `verifiers` library: the parts that do not need the library."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from troupe.data.tasks import open_tasks
from troupe.job.sections.data import TasksSpec, VerifiersSpec
from troupe.workflow import EntrypointError, WorkflowError, play
from troupe.workflow.environments.adapters import verifiers
from troupe.workflow.environments.adapters.verifiers import (
    EpisodeScores,
    Stride,
    assign_roles,
    merged,
)
from troupe.workflow.errors import EnvironmentContractError


def test_roles_are_agents_of_their_names_or_the_only_ones() -> None:
    assert assign_roles(["agent"], [], {}, ["solver"]) == {"agent": "solver"}
    both = ["writer", "judge"]
    assert assign_roles(both, [], {}, both) == {"writer": "writer", "judge": "judge"}
    assert assign_roles(both, [], {"judge": "critic"}, ["critic", "writer"]) == {
        "writer": "writer",
        "judge": "critic",
    }
    # One agent may play both, a model elsewhere one of them.
    assert assign_roles(both, [], dict.fromkeys(both, "all"), ["all"]) == dict.fromkeys(both, "all")
    assert assign_roles(both, ["judge"], {}, ["writer"]) == {"writer": "writer"}
    assert assign_roles(both, ["judge"], {"judge": "writer"}, ["writer"])["judge"] == "writer"


@pytest.mark.parametrize(
    ("roles", "fixed", "given", "agents", "field"),
    [
        (["a", "b"], [], {}, ["a"], "b"),
        (["agent"], [], {}, ["one", "two"], "agent"),
        (["a"], [], {"c": "one"}, ["one"], "c"),
    ],
)
def test_a_role_that_nobody_plays_is_named(
    roles: list[str], fixed: list[str], given: dict[str, str], agents: list[str], field: str
) -> None:
    with pytest.raises(EntrypointError) as caught:
        assign_roles(roles, fixed, given, agents)
    assert caught.value.kind == "environment_role"
    assert caught.value.field == f"tasks.verifiers.roles.{field}"
    assert caught.value.remedy


def trace(role: str, reward: float, session: str = "", **rewards: float) -> dict[str, Any]:
    named = {name: [score, 1.0] for name, score in rewards.items()}
    return {
        "role": role,
        "session": session,
        "reward": reward,
        "rewards": named,
        "metrics": {"length": 4.0},
    }


def scored(traces: list[dict[str, Any]], **weights: float) -> EpisodeScores:
    assigned = {one["role"]: one["role"] for one in traces}
    return EpisodeScores.of(traces, assigned, weights, single=len(assigned) == 1)


def test_rewards_are_those_of_the_roles_and_metrics_have_names() -> None:
    found = scored([trace("writer", 2.0, right=1.0, brief=1.0), trace("judge", 0.0)])
    # The environment does not reward the judge, who gets the team's reward.
    assert found.reward([]) == {"team": 2.0, "writer": 2.0, "judge": 2.0}
    assert found.metrics == {
        "writer/right": 1.0,
        "writer/brief": 1.0,
        "writer/length": 4.0,
        "judge/length": 4.0,
    }
    assert set(scored([trace("agent", 1.0, right=1.0)]).metrics) == {"right", "length"}
    nobody = scored([trace("agent", 0.0)])
    assert nobody.reward([]) == {"team": 0.0, "agent": 0.0}


def test_weights_replace_those_of_the_environment() -> None:
    one = trace("agent", 2.0, right=1.0, brief=1.0)
    assert scored([one], brief=0.0, length=0.5).reward([])["agent"] == 3.0
    with pytest.raises(EnvironmentContractError, match="brief, length, right") as caught:
        scored([one], lenght=1.0)
    assert caught.value.field == "tasks.verifiers.weights.lenght"


@given(st.floats(0.001, 0.5), st.integers(2, 500))
def test_every_task_is_of_one_split(fraction: float, count: int) -> None:
    parts = [Stride(fraction, training) for training in (True, False)]
    taken = [part.position(at) for part in parts for at in range(part.length(count))]
    assert sorted(taken) == list(range(count))


def test_arguments_are_merged_section_by_section() -> None:
    args = {"taskset": {"count": 2, "split": "train"}, "n": 1}
    held_out = {"taskset": {"split": "test"}, "n": {"a": 1}}
    both = merged(args, held_out)
    assert both == {"taskset": {"count": 2, "split": "test"}, "n": {"a": 1}}
    assert args["taskset"] == {"count": 2, "split": "train"}


def opened(**fields: Any) -> Any:
    spec = TasksSpec.model_validate({"verifiers": {"environment": "relay-v1", **fields}})
    return open_tasks(spec, "train", 0)


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="it is installed here")
def test_an_interpreter_without_the_library_says_what_to_install() -> None:
    with pytest.raises(EntrypointError, match="has no package `verifiers`") as caught:
        opened()
    assert caught.value.kind == "environment_not_installed"
    assert caught.value.field == "tasks.verifiers.python"
    assert "pip install verifiers" in str(caught.value)


FORKS = """
import asyncio, contextlib, os
from troupe.workflow.environments.adapters.verifiers_host import VerifiersHost, take_pipes
requests, answers = take_pipes()
host = VerifiersHost(answers)
if (pid := os.fork()) == 0:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"forged": 1}')
os.wait() if pid else None
host._write({"id": 0, "ok": {}})
"""


def test_a_process_that_an_environment_forks_does_not_answer_for_it() -> None:
    program = [sys.executable, "-c", FORKS]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.stdout == '{"id": 0, "ok": {}}\n', ended.stderr


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    with pytest.raises(EntrypointError, match="interpreter cannot be run") as caught:
        opened(python=python)
    assert caught.value.field == "tasks.verifiers.python"
    assert caught.value.value == python


def test_a_program_that_is_not_python_is_reported_with_its_output(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('not today')\n")
    program.chmod(0o755)
    with pytest.raises(WorkflowError, match="exited with status 1; not today") as caught:
        opened(python=str(program))
    assert caught.value.kind == "environment"


def test_a_program_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o755)
    with pytest.raises(WorkflowError, match=r"did not end its open within 0\.5 s"):
        opened(python=str(program), start_seconds=0.5)


async def test_other_tasks_are_refused_by_the_workflow() -> None:
    with pytest.raises(EntrypointError, match="is not a task of a verifiers environment"):
        await play(verifiers.play, {"question": "?"})


def test_a_query_carries_its_environment_in_short() -> None:
    spec = VerifiersSpec(environment="owner/wordle", roles={"agent": "solver"})
    short = spec.model_dump(mode="json", exclude_defaults=True)
    assert short == {"environment": "owner/wordle", "roles": {"agent": "solver"}}
    assert VerifiersSpec.model_validate(short) == spec
