"""Unmodified agent frameworks, in separate environments, against a running trajectory.

Slow: each framework is installed from PyPI.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import pytest_asyncio

from examples.other_environment import agent as example
from tests.endpoint.stage import Stage, calls, in_turn, open_stage, says
from tests.rollout.processes import ServiceProcess
from tests.support import frameworks
from tests.support.own_python import own_python
from troupe.v1 import common_pb2 as common_pb

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
PROGRAMS: Final = Path(frameworks.__file__).parent
CALL: Final = "I add. " + calls("add", a=3, b=4)
# A framework's start imports for seconds, on a busy machine for longer.
RUN_SECONDS: Final = 240.0


class Framework(NamedTuple):
    """A framework and a conversation of its agent."""

    program: Path
    packages: tuple[str, ...]
    # The policy's replies, and the agent's results.
    said: tuple[str, ...]
    answer: str = "It is 7."
    # Turns whose prompt does not continue the sampled ids: the framework rewrites its past, or
    # requests without its tools.
    breaks: int = 0
    # Whether it requests options that an endpoint only accepts with `lenient`.
    lenient: bool = False


FRAMEWORKS: Final = {
    "openai-agents": Framework(
        PROGRAMS / "openai_agents.py", ("openai-agents==0.24.0",), (CALL, "It is 7.")
    ),
    "langgraph": Framework(
        PROGRAMS / "langgraph_agent.py",
        ("langgraph==1.2.24", "langchain", "langchain-openai==1.7.4"),
        (CALL, "It is 7."),
    ),
    "autogen": Framework(
        Path(example.__file__).with_name("autogen_agent.py"),
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        (CALL, "It is 7."),
        breaks=1,
    ),
    "smolagents": Framework(
        PROGRAMS / "smolagents_agent.py",
        ("smolagents[openai]==1.26.0",),
        (CALL, calls("final_answer", answer="It is 7.")),
        breaks=1,
        lenient=True,  # `tool_choice: required`
    ),
    "dspy": Framework(
        PROGRAMS / "dspy_agent.py",
        ("dspy==3.4.1",),
        ("[[ ## answer ## ]]\nIt is 7.\n\n[[ ## completed ## ]]",),
    ),
    "crewai": Framework(PROGRAMS / "crewai_agent.py", ("crewai==1.15.30",), (CALL, "It is 7.")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(
    tmp_path_factory: pytest.TempPathFactory, store_process: ServiceProcess
) -> AsyncIterator[Stage]:
    """A stage whose contexts hold the long instructions of frameworks."""
    directory = tmp_path_factory.mktemp("stage")
    limits = {"turn_seconds": RUN_SECONDS, "trajectory_seconds": RUN_SECONDS}
    async with open_stage(
        directory, context=32_768, limits=limits, store=store_process.address
    ) as stage:
        yield stage


async def run(python: str, program: Path, home: Path, request: dict[str, str]) -> str:
    """The answer of the agent in `program`."""
    child = await asyncio.create_subprocess_exec(
        python,
        program,
        cwd=home,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", "NO_PROXY": "*"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await child.communicate(json.dumps(request).encode())
    except asyncio.CancelledError:
        child.kill()
        raise
    assert child.returncode == 0, err.decode()[-400:]
    return str(json.loads(out.decode().strip().splitlines()[-1])["answer"])


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_an_agent_of_a_framework_is_trained_unchanged(
    stage: Stage, name: str, tmp_path: Path
) -> None:
    one = FRAMEWORKS[name]
    python = own_python(tmp_path, one.packages)
    stage.script.speak = in_turn(*(says(text) for text in one.said))
    answers: list[str] = []

    async def act(query: Any, agents: Any) -> dict[str, float]:
        endpoint = agents["solver"].endpoint(lenient=one.lenient)
        request = {
            "question": "What is 3 + 4?",
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
        }
        answers.append(await run(python, one.program, tmp_path, request))
        return {"solver": 2.0}

    event, rows = await stage.train(act)

    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason
    assert answers == [one.answer]
    # The sampled ids are trained, in a spelling that the tokenizer would not choose.
    assert [row.response for row in rows] == [says(text) for text in one.said]
    assert all(row.reward == 2.0 for row in rows)
    assert event.metrics["prefix_breaks"] == one.breaks
