"""An existing agent is tried without a model: scripted replies behind an endpoint."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.other_environment import workflow as example
from tests.support.waiting import PATIENCE, until
from troupe.client.cli.app import main
from troupe.workflow import ScriptedPolicy, WorkflowError, play
from troupe.workflow.trying import policies

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
QUERY = {"question": "What is 3 + 4?", "sum": 7}
HERE = Path(example.__file__).parent


class Answer(BaseModel):
    number: int


async def test_frameworks_speak_to_a_script() -> None:
    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        endpoint = agents["solver"].endpoint(lenient=True)
        provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
        model = OpenAIChatModel(endpoint.model, provider=provider)
        helper = Agent(model, instructions="You add.")

        @helper.tool_plain
        def add(a: int, b: int) -> int:
            """Add two integers."""
            return a + b

        assert (await helper.run(query["question"])).output == "It is 7."
        typed: Agent[None, Answer] = Agent(model, output_type=NativeOutput(Answer))
        assert (await typed.run(query["question"])).output.number == 7
        by_tool = Agent(model, output_type=Answer)
        assert (await by_tool.run(query["question"])).output.number == 8

        def blocking() -> str | None:
            with OpenAI(base_url=endpoint.base_url, api_key="x") as client:
                said = client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}]
                )
                return said.choices[0].message.content

        assert await asyncio.to_thread(blocking) == "bye"
        return {"solver": 1.0}

    final = '<tool_call>{"name": "final_result", "arguments": {"number": 8}}</tool_call>'
    # Wrong, then as asked for.
    script = ["<think>a call</think>" + CALL, "It is 7.", "seven", '{"number": 7}', final, "bye"]
    played = await play(workflow, QUERY, policy=ScriptedPolicy(script))
    assert len(played.turns) == len(script)
    assert played.metrics["unmet_promises"] == 1
    assert [turn.prefix_broken for turn in played.turns] == [False] * len(script)
    [first] = [turn for turn in played.turns if turn.number == 2]
    assert "number" in first.messages[0][1], "the model sees the schema"


async def test_the_address_ends_with_the_trajectory() -> None:
    kept: list[str] = []

    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        kept.append(agents["solver"].endpoint().base_url)
        async with AsyncOpenAI(base_url=kept[0], api_key="x") as client:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
        return {"solver": 0.0}

    await play(workflow, {})
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", int(kept[0].split(":")[2].split("/")[0]))


async def test_without_its_libraries_an_endpoint_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        agents["solver"].endpoint()
        return {}

    monkeypatch.setattr(policies, "find_spec", lambda name: None)
    with pytest.raises(WorkflowError, match="pip install") as caught:
        await play(workflow, {})
    assert caught.value.kind == "no_endpoint"


def test_the_command_tries_an_existing_agent_with_one_client_for_all_trajectories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tried_agent.py"
    file.write_text(
        # Its connections belong to the event loop of the first trajectory.
        "from openai import AsyncOpenAI, DefaultAsyncHttpxClient\n"
        "HTTP = DefaultAsyncHttpxClient()\n"
        "async def workflow(query, agents, tools):\n"
        "    endpoint = agents['solver'].endpoint()\n"
        "    client = AsyncOpenAI(\n"
        "        base_url=endpoint.base_url, api_key='x', http_client=HTTP, max_retries=0)\n"
        "    said = await client.chat.completions.create(\n"
        "        model='m', messages=[{'role': 'user', 'content': query['question']}])\n"
        "    return {'solver': float(said.choices[0].message.content == '7')}\n"
    )
    script = tmp_path / "script.yaml"
    script.write_text('solver: "<think>3 + 4</think>7"\n')
    arguments = ["workflow", "try", str(file), "--script", str(script), "--json"]
    status = main([*arguments, "--query", json.dumps(QUERY), "--group-size", "2"])
    record = json.loads(capsys.readouterr().out)
    assert status == 0, record
    assert [one["rewards"]["solver"] for one in record["trajectories"]] == [1.0, 1.0]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with only its standard library."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place, with_pip=False)
    return str(place / "bin" / "python")


@pytest.fixture
def server(bare_python: str) -> Iterator[str]:
    """The example's agent as a server of another environment."""
    with subprocess.Popen(
        [bare_python, str(HERE / "agent.py"), "--serve", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}/"
        process.kill()


async def test_an_agent_of_another_environment_is_a_child_process(
    bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "PYTHON", bare_python)
    played = await play(example.child, QUERY, policy=ScriptedPolicy([CALL, "7"]))
    assert played.rewards["solver"] == 1.0
    assert len(played.turns) == 2
    with pytest.raises(example.AgentFailed, match="status 1"):
        await play(example.child, QUERY, policy=ScriptedPolicy([]))


async def test_an_agent_of_another_environment_is_asked_over_http(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "URL", server)
    played = await play(example.remote, QUERY, policy=ScriptedPolicy([CALL, "7"]))
    assert played.rewards["solver"] == 1.0
    with pytest.raises(example.AgentFailed, match="500"):
        await play(example.remote, QUERY, policy=ScriptedPolicy([]))


async def test_a_child_process_that_hangs_or_talks_for_ever_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "PYTHON", sys.executable)
    for program, seconds, said in [
        ("import time; time.sleep(600)", 2.0, "within 2 s"),
        ("while True: print('x' * 1000)", PATIENCE, "more than"),
        ("print('[1]')", PATIENCE, r"status 0: \[1\]"),
    ]:
        monkeypatch.setattr(example, "SECONDS", seconds)
        file = tmp_path / "program.py"
        file.write_text(program)
        monkeypatch.setattr(example, "PROGRAM", str(file))
        with pytest.raises(example.AgentFailed, match=said):
            await play(example.child, QUERY)


async def test_a_child_process_is_ended_while_much_that_it_printed_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio then stops reading the pipe, and does not see its end."""
    file = tmp_path / "program.py"
    file.write_text("while True: print('x' * 1000)")
    monkeypatch.setattr(example, "PYTHON", sys.executable)
    monkeypatch.setattr(example, "PROGRAM", str(file))

    async def _read(stream: asyncio.StreamReader) -> bytes:
        await until(lambda: stream._paused)  # type: ignore[attr-defined]
        raise example.AgentFailed("enough")

    monkeypatch.setattr(example, "_read", _read)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(example.AgentFailed, match="enough"):
            await example.ask_process({})
