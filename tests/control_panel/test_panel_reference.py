"""docs/rest-api.md matches the interface: every call, its parameters, every status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from services.control_panel.app import create_app
from services.control_panel.calls import HTTP_STATUS

PAGE = (Path(__file__).parents[2] / "docs/rest-api.md").read_text()
CALLS = {
    (method, path): takes
    for method, path, takes in re.findall(
        r"^\| `(GET|POST|PUT|PATCH|DELETE) (\S+)` \| (.*?) ?\|", PAGE, re.M
    )
}
OPENAPI: dict[str, Any] = create_app("127.0.0.1:1").openapi()
SERVED = {
    (method.upper(), path): operation
    for path, operations in OPENAPI["paths"].items()
    for method, operation in operations.items()
}


def test_every_call_is_documented_and_every_documented_call_is_there() -> None:
    assert set(CALLS) == set(SERVED)


@pytest.mark.parametrize("call", SERVED, ids=" ".join)
def test_all_parameters_of_a_call_are_documented(call: tuple[str, str]) -> None:
    operation, said = SERVED[call], set(re.findall(r"`([^`]+)`", CALLS[call]))
    parameters = operation.get("parameters", [])
    own = {one["name"] for one in parameters if one["in"] == "query"}
    # Headers are written in capitals, and found in any.
    headers = {one["name"] for one in parameters if one["in"] == "header"}
    assert own <= said
    assert headers <= {one.lower() for one in said}
    body = operation.get("requestBody")
    assert (body is not None) == ("body:" in CALLS[call])
    schema = body and body["content"].get("application/json", {}).get("schema", {})
    if schema and "$ref" in schema:
        model = OPENAPI["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert set(model["properties"]) <= said


def test_every_status_of_a_problem_is_documented() -> None:
    documented = {int(status) for status in re.findall(r"^\| (\d{3}) \|", PAGE, re.M)}
    assert documented == {*HTTP_STATUS.values(), 405, 415, 421, 500}
