"""What a workflow is given besides its agents."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from troupe.workflow import Query, ToolError, Tools, WorkflowError


class Adder:
    """A tool backend."""

    async def invoke(self, name: str, arguments_json: str) -> str:
        arguments = json.loads(arguments_json)
        if "a" not in arguments:
            raise ToolError("KeyError: 'a'", kind="raised", traceback="...")
        return json.dumps({"sum": arguments["a"] + arguments["b"]})


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


async def test_tools_return_json_values() -> None:
    assert await Tools(["add"], Adder()).call("add", a=1, b=2) == {"sum": 3}


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
