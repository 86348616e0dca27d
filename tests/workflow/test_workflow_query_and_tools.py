"""The arguments of a workflow other than its agents."""

from __future__ import annotations

import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.functions.declared import look_up
from troupe.functions.declaration import definition_of
from troupe.workflow import Query, ToolError, Tools, WorkflowError
from troupe.workflow.messages import ToolCall, parse_tools
from troupe.workflow.scoring import answer_of


class Adder:
    """A tool backend."""

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        arguments = json.loads(arguments_json)
        if "a" not in arguments:
            raise ToolError("KeyError: 'a'", kind="raised", traceback="...")
        return json.dumps({"sum": arguments["a"] + arguments["b"]})


@pytest.mark.parametrize(
    ("reply", "pattern", "vote"),
    [
        ("it is #72", r"#(.*)", "72"),
        ("#7 or #72 ", r"#(\S*)", "72"),
        ("#  7\n 2 ", r"(?s)#(.*)", "7 2"),
        ("it is #0", r"#(.*)", "0"),
        ("it is # ", r"#(.*)", None),
        ("#72, no: #", r"#(\d*)", None),
        ("#\N{NO-BREAK SPACE}", r"#(.*)", None),
        (r"\boxed{}", r"\\boxed\{(.*)\}", None),
        ("it is 72", r"#(.*)", None),
        ("it is #", r"#(\d+)?", None),
        ("", r".*", None),
        ("72", None, None),
    ],
)
def test_a_reply_without_an_answer_has_no_vote(reply: str, pattern: str, vote: str) -> None:
    turns: Any = [SimpleNamespace(reply=SimpleNamespace(text=reply))]
    assert answer_of(Query("q", "held_out", 0, {}), turns, pattern) == vote


@pytest.mark.parametrize(
    ("answer", "vote"),
    [("72", "72"), (72, "72"), (0, "0"), (False, "False"), ("", None), (" ", None)],
)
def test_the_answer_of_a_workflow_comes_first_and_an_empty_one_does_not_vote(
    answer: Any, vote: str | None
) -> None:
    query, turns = (
        Query("q", "held_out", 0, {}),
        [SimpleNamespace(reply=SimpleNamespace(text="#7"))],
    )
    query.answer = answer
    assert answer_of(query, turns, r"#(.*)") == vote  # type: ignore[arg-type]


def test_a_query_is_a_mapping_with_identity() -> None:
    query = Query("q3", "train", 19, {"question": "3+4", "answer": "7"})
    assert (query["question"], query.get("none"), len(query), "answer" in query) == (
        "3+4",
        None,
        2,
        True,
    )
    assert (query.id, query.split, query.index) == ("q3", "train", 19)
    with pytest.raises(KeyError, match="it has: answer, question"):
        query["qestion"]


def test_a_query_logs_finite_numbers() -> None:
    query = Query("q0", "train", 0, {})
    query.log(success=True, length=3)
    assert query.metrics == {"success": 1.0, "length": 3.0}
    for bad in (math.nan, "x", None):
        with pytest.raises(WorkflowError, match="finite"):
            query.log(bad=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("metrics", [{"a": "x"}, {"a": math.nan}, {"a": 10**400}, None, [1]])
def test_what_a_workflow_wrote_into_the_metrics_itself_is_checked(metrics: Any) -> None:
    query = Query("q0", "train", 0, {})
    query.metrics["\ud800"] = True
    query.metrics[5] = 2  # type: ignore[index]
    assert query.logged() == {"\ufffd": 1.0, "5": 2.0}
    query.metrics = metrics
    with pytest.raises(WorkflowError, match=r"finite|not a dict"):
        query.logged()


async def test_tools_return_json_values() -> None:
    assert await Tools(["add"], Adder()).call("add", a=1, b=2) == {"sum": 3}


class Clock:
    """Tells how long its calls were expected to take."""

    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        return json.dumps(expected_seconds)


async def test_a_workflow_may_say_how_long_a_call_takes() -> None:
    tools = Tools(["clock"], Clock())
    assert await tools.expecting(90).call("clock") == 90.0
    told = await tools.expecting(2.5).run(ToolCall("a", "clock", "{}"))
    assert told["content"] == "2.5"
    assert await tools.call("clock") == 0.0


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, "9", True, None])
def test_an_invalid_estimate_is_refused(seconds: Any) -> None:
    with pytest.raises(ToolError, match="is not a valid estimate") as caught:
        Tools(["clock"], Clock()).expecting(seconds)
    assert (caught.value.kind, caught.value.field) == ("bad_estimate", "seconds")


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("subtract", {}, "unknown_tool"),
        ("add", {"a": object()}, "bad_arguments"),
        ("add", {"a": math.nan}, "bad_arguments"),
        ("add", {"b": 1}, "raised"),
    ],
)
async def test_a_failed_call_tells_its_kind(
    name: str, arguments: dict[str, Any], kind: str
) -> None:
    with pytest.raises(ToolError) as caught:
        await Tools(["add"], Adder()).call(name, **arguments)
    assert caught.value.kind == kind


class Doubler:
    async def invoke(self, name: str, arguments_json: str, *, expected_seconds: float = 0.0) -> str:
        arguments = json.loads(arguments_json)
        if "times" not in arguments:
            raise ToolError("tools/double: it raised", kind="raised")
        if arguments["times"] > 9:
            raise ToolError("tools/double: the service is away", kind="deadline")
        return json.dumps({"double": 2 * arguments["times"]})


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (ToolCall("a", "double", '{"times": 2}'), '{"double": 4}'),
        (ToolCall("a", "double", "{}"), "error: tools/double: it raised"),
        (ToolCall("a", "triple", "{}"), "error: the job has no tool 'triple'; known: double"),
        (
            ToolCall("a", "double", "[2]"),
            "error: the arguments are not a JSON object: a JSON object",
        ),
        (ToolCall("a", "double", "{"), "error: the arguments are not a JSON object: Expecting"),
    ],
)
async def test_a_reply_s_call_is_answered_with_a_message(call: ToolCall, content: str) -> None:
    message = await Tools(["double"], Doubler()).run(call)
    assert message["content"].startswith(content)
    assert (message["role"], message["tool_call_id"]) == ("tool", "a")


async def test_faults_of_tools_are_not_reported_to_the_model() -> None:
    with pytest.raises(ToolError, match="away"):
        await Tools(["double"], Doubler()).run(ToolCall("a", "double", '{"times": 10}'))


def test_a_declared_tool_is_offered_as_openai_describes_tools() -> None:
    (offered,) = [definition_of("find", partial(look_up, order="old"))]
    assert offered["function"]["name"] == "find"
    assert offered["function"]["description"] == "Finds pages."
    assert set(offered["function"]["parameters"]["properties"]) == {"words", "limit"}
    assert parse_tools([offered]).given[0]["function"]["name"] == "find"
    assert definition_of("plain", len)["function"]["parameters"]["properties"] == {}
