"""Tools of real MCP servers over stdio and HTTP, in this process and in a job's trajectories."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.endpoint import dialogues
from tests.endpoint.stage import Stage, calls, in_turn, open_stage, says, text_of
from tests.reward.test_reward_service import client_of
from tests.rollout.conftest import _fresh, _settling, reward_process, store_process
from tests.rollout.house import make_spec
from tests.rollout.processes import ServiceProcess
from tests.support.waiting import PATIENCE
from troupe.functions.library.mcp import McpTool, call
from troupe.rpc.errors import FailedPrecondition
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.messages import ToolCall
from troupe.workflow.trying.setting import open_setting

__all__ = ["_fresh", "_settling", "reward_process", "store_process"]

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO: dict[str, Any] = {"command": [sys.executable, SERVER]}
RAW = str(Path(__file__).with_name("raw_mcp_server.py"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a server that speaks streamable HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server does not listen"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    tmp_path_factory: pytest.TempPathFactory,
    store_process: ServiceProcess,
    reward_process: ServiceProcess,
    url: str,
) -> AsyncIterator[Stage]:
    tools = {
        "calculator": {"mcp": STDIO, "timeout_seconds": 15, "max_concurrency": 1},
        "web": {"mcp": {"url": url, "prefix": "web_", "offered": ["add", "fail"]}},
    }
    neighbours = {"store": store_process.address, "reward": reward_process.address}
    limits = {"turn_seconds": PATIENCE, "trajectory_seconds": PATIENCE}
    directory = tmp_path_factory.mktemp("mcp")
    async with open_stage(
        directory, context=4096, tools=tools, limits=limits, **neighbours
    ) as stage:
        yield stage


def server(**fields: Any) -> dict[str, Any]:
    known = {"command": None, "env": {}, "url": None, "headers": {}, "start_seconds": PATIENCE}
    return {**known, **fields}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_calls_what_the_servers_offer(stage: Stage) -> None:
    said = [calls("add", a=3, b=4) + calls("web_add", a=40, b=2), "It is 7 and 42."]
    stage.script.speak = in_turn(*(says(text) for text in said))
    seen: dict[str, Any] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        tools = dialogues.TOOLS
        seen["names"] = [one["function"]["name"] for one in tools.definitions]
        messages: list[Any] = [{"role": "user", "content": "3 + 4, and 40 + 2?"}]
        reply = await agents["solver"].chat(messages, tools=tools.definitions)
        messages += [reply, *[await tools.run(one) for one in reply.tool_calls]]
        await agents["solver"].chat(messages, tools=tools.definitions)
        return {"solver": 1.0}

    event, turns = await stage.train(act)

    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason
    [first, second] = turns
    own = ["add", "process", "variable", "fail", "crash", "hang", "content", "unlike_its_schema"]
    assert sorted(seen["names"]) == sorted([*own, "web_add", "web_fail"])
    assert '"description": "Add two integers."' in text_of(first.prompt)
    assert second.prompt[: len(first.prompt + first.response)] == first.prompt + first.response
    assert "<tool_response>\n7\n</tool_response>" in text_of(second.prompt)
    assert "<tool_response>\n42\n</tool_response>" in text_of(second.prompt)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_that_a_server_does_loses_the_trajectory(stage: Stage) -> None:
    results: dict[str, str] = {}

    async def act(query: Any, agents: Any) -> dict[str, float]:
        async def run(name: str, **arguments: Any) -> str:
            made = await dialogues.TOOLS.run(ToolCall("c", name, json.dumps(arguments)))
            return str(made["content"])

        results["process"] = await run("process")
        for name in ("fail", "web_fail"):
            results[name] = await run(name, why="no such file")
        results["wrong"] = await run("add", a="x")
        results["unknown"] = await run("web_crash")
        results["crash"] = await run("crash")
        results["process after the crash"] = await run("process")
        results["hang"] = await run("hang")
        results["process after the hang"] = await run("process")
        return {"solver": 1.0}

    event = await stage.play(act)

    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED, event.reason
    for name in ("fail", "web_fail"):
        assert results[name].startswith("error: ")
        assert "no such file" in results[name]
    assert "integer" in results["wrong"]
    assert "no tool 'web_crash'" in results["unknown"]
    assert "ended during the call" in results["crash"]
    assert results["process after the crash"] != results["process"], "it was started anew"
    assert results["hang"] == "error: tools/calculator: did not end within 15 s"
    assert results["process after the hang"].isdigit()


@pytest.mark.parametrize(
    ("tools", "field", "said"),
    [
        ({"a": {"mcp": {"command": ["/no/such/program"]}}}, "tools.a.mcp", "does not start"),
        ({"a": {"mcp": {"command": [sys.executable, "-c", ""]}}}, "tools.a.mcp", "does not start"),
        (
            {"a": {"mcp": {"command": ["sleep", "60"], "start_seconds": 0.5}}},
            "tools.a.mcp",
            "did not answer within 0.5 s",
        ),
        ({"a": {"mcp": {"url": "http://127.0.0.1:9/mcp"}}}, "tools.a.mcp", "does not start"),
        ({"a": {"mcp": {**STDIO, "env": {"K": "$NO_SUCH"}}}}, "tools.a.mcp", "NO_SUCH is not set"),
        ({"a": {"mcp": {**STDIO, "offered": ["sub"]}}}, "tools.a.mcp.offered", "no tool 'sub'"),
        ({"a": {"mcp": STDIO}, "b": {"mcp": STDIO}}, "mcp.prefix", "two tools"),
    ],
)
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_job_whose_servers_cannot_be_used_does_not_begin(
    stage: Stage, tools: dict[str, Any], field: str, said: str
) -> None:
    spec = {**stage.spec, "tools": tools}
    with pytest.raises(FailedPrecondition, match=said) as caught:
        await stage.house.prepare_raw(spec)
    assert caught.value.field is not None
    assert field in caught.value.field


def test_a_process_keeps_its_server_and_finds_one_that_ended() -> None:
    one = server(**STDIO, env={"GREETING": "hi $HOME"})
    names = [tool["name"] for tool in call(one)["tools"]]
    assert names[:2] == ["add", "process"]
    first, second = (call(one, "process")["result"] for _ in range(2))
    assert first == second
    assert call(one, "variable", {"name": "GREETING"}) == {"result": f"hi {os.environ['HOME']}"}
    os.kill(int(first), 9)
    time.sleep(1.1)  # from here on it is not taken for granted that the server is there
    assert call(one, "process")["result"] != first, "nothing was lost: it had not been called"
    assert call(one, "divide")["error"] == "unknown_tool"


async def test_a_worker_of_the_reward_service_keeps_its_server_from_call_to_call() -> None:
    entrypoint = "troupe.functions.library.mcp:call"
    async with client_of(reward_workers=1) as client:
        await client.register("mcp", entrypoint=entrypoint, timeout_seconds=60)
        asked = {"server": server(**STDIO), "name": "process"}
        first, second = [await client.invoke("mcp", asked) for _ in range(2)]
    assert json.loads(first.result_json)["result"].isdigit(), first
    assert first.result_json == second.result_json


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("text", {"result": "one\ntwo"}),
        ("empty", {"result": ""}),
        ("empty text", {"result": ""}),
        ("resource", {"result": "found:\n# Today\nrain"}),
        ("blob", {"result": "(file:///a.bin: binary, not shown)"}),
        ("typed blob", {"result": "(file:///a.pdf: application/pdf, not shown)"}),
        ("link", {"result": "today.md: file:///notes/today.md"}),
        ("titled link", {"result": "Today: file:///notes/today.md (what happens)"}),
        ("image", {"result": "(image: image/png, not shown)"}),
        ("audio", {"result": "(audio: audio/wav, not shown)"}),
        ("structured", {"result": {"rows": [1, 2]}}),
        ("structured image", {"result": {"width": 3}}),
        ("text and structured", {"result": "two"}),
        ("for the user", {"result": ""}),
        ("for both", {"result": "seen"}),
        ("error", {"error": "tool_failed", "message": "no such page"}),
        ("error resource", {"error": "tool_failed", "message": "# Today\nrain"}),
        ("error structured", {"error": "tool_failed", "message": '{"code": 7}'}),
        ("error for the user", {"error": "tool_failed", "message": "quota spent"}),
        (
            "error without a reason",
            {"error": "tool_failed", "message": "the tool failed without giving a reason"},
        ),
    ],
)
def test_every_kind_of_content_is_shown_to_the_model(name: str, answer: dict[str, Any]) -> None:
    assert call(server(**STDIO), "content", {"name": name}) == answer


def test_a_result_that_is_not_as_the_tool_says_fails_the_call_and_keeps_the_server() -> None:
    one = server(**STDIO)
    process = call(one, "process")
    answer = call(one, "unlike_its_schema")
    assert answer["error"] == "tool_failed"
    assert "number" in answer["message"]
    assert call(one, "process") == process


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        # A server's own error, which has the code of a closed connection in the library.
        ({"error": {"code": -32000, "message": "no such row"}}, "tool_failed", "no such row"),
        ({"error": {"code": -32001, "message": "late"}}, "tool_failed", "late"),
        ({"error": {"code": -32602, "message": "x is no int"}}, "bad_arguments", "x is no int"),
        ({"error": {"code": -32602, "message": ""}}, "bad_arguments", "without giving a reason"),
        ({"error": {"code": 7, "message": "m", "data": {"a": 1}}}, "tool_failed", "m"),
        ({"result": {}}, "tool_failed", "not the result of a tool: content: Field required"),
        ({"result": {"content": [], "structuredContent": [1]}}, "tool_failed", "structuredContent"),
        ({"result": {"content": [{"type": "text"}]}}, "tool_failed", "content.0"),
    ],
)
def test_an_error_of_a_server_is_told_and_the_server_goes_on(
    answer: dict[str, Any], kind: str, said: str
) -> None:
    one = server(command=[sys.executable, RAW])
    process = call(one, "process")
    failed = call(one, "answer", answer)
    assert failed["error"] == kind
    assert said in failed["message"]
    assert "https://" not in failed["message"]
    assert call(one, "process") == process


def test_a_server_that_ends_during_several_calls_fails_them_all_and_is_started_anew() -> None:
    one = server(command=[sys.executable, RAW])
    first = call(one, "process")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: call(one, "third"), range(3), timeout=PATIENCE))
    assert [answer.get("error") for answer in answers] == ["mcp_unavailable"] * 3
    assert call(one, "process") != first


@pytest.mark.parametrize("name", ["self", "server", "name", "arguments"])
def test_an_argument_of_a_tool_may_have_any_name(name: str) -> None:
    answer = {"result": {"content": [{"type": "text", "text": "told"}]}, name: 1}
    assert McpTool(server(command=[sys.executable, RAW]), {"name": "answer"}, "x")(**answer) == (
        "told"
    )


def test_a_workflow_is_tried_with_the_tools_of_a_server(tmp_path: Path, url: str) -> None:
    tools = {"web": {"mcp": {"url": url, "prefix": "web_", "offered": ["add"]}}}
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(make_spec("one_turn", tools=tools)))
    setting = open_setting(str(job))
    assert list(setting.tools) == ["web_add"]
    assert setting.tools["web_add"](a=1, b=2) == "3"
    assert setting.function_seconds == {"tools/web_add": 60}
