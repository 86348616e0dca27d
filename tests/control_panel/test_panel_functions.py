"""Functions over REST, in front of a real orchestrator and a real reward service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.control_panel.app import create_app
from tests.client.test_client_functions import Town, town
from tests.support.waiting import PATIENCE
from troupe.rpc import ClientSettings, RetryPolicy

__all__ = ["town"]
pytestmark = pytest.mark.asyncio(loop_scope="module")
SCORES = "def exact(answer):\n    print('asked', answer)\n    return float(answer == '4')\n"
EXACT: dict[str, Any] = {
    "name": "exact_rest",
    "entrypoint": "scores:exact",
    "kind": "reward",
    "files": {"scores.py": SCORES},
    "costs": {"cores": 0, "timeout_seconds": 9},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(town: Town) -> AsyncIterator[httpx.AsyncClient]:
    settings = ClientSettings(deadline_seconds=PATIENCE, retry=RetryPolicy(initial_backoff=0.01))
    app = create_app(town.address, None, settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=PATIENCE
        ) as http,
    ):
        yield http


async def test_a_function_is_deployed_called_and_deleted(http: httpx.AsyncClient) -> None:
    made = await http.post("/api/functions", json=EXACT)
    assert made.status_code == 201, made.text
    assert made.json()["cores"] == 0
    assert made.json()["timeout_seconds"] == 9
    called = await http.post("/api/functions/exact_rest/invoke", json={"answer": "4"})
    assert (called.status_code, called.json()["value"]) == (200, 1.0)
    failed = (await http.post("/api/functions/exact_rest/invoke", json={"reply": 1})).json()
    assert failed["value"] is None
    assert failed["error"]["kind"] == "raised"
    listed = (await http.get("/api/functions")).json()
    (one,) = [f for f in listed["functions"] if f["function"]["name"] == "exact_rest"]
    assert (one["invocations"], one["errors"], one["cores_held"]) == (2, 1, 0)
    assert listed["pool"]["max_workers"] >= 1
    lines = (await http.get("/api/functions/exact_rest/logs")).json()
    assert "asked 4" in "".join(line["text"] for line in lines)
    gone = await http.delete("/api/functions/exact_rest/1")
    assert gone.json() == {"deleted": True}
    assert (await http.post("/api/functions/exact_rest/invoke", json={})).status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"costs": {"corse": 1}}, "corse"),
        ({"costs": {"cores": -1}}, "cores"),
        ({"costs": {"cores": 1 << 70}}, "cores"),
        ({"costs": {"entrypoint": "os:system"}}, "entrypoint"),
        ({"entrypoint": "nothing"}, "function.entrypoint"),
        ({"name": "a/b"}, "function.name"),
        ({"files": {"../x.py": ""}}, "files"),
        ({"kind": "game"}, "body.kind"),
    ],
)
async def test_a_function_that_cannot_be_deployed_is_answered_with_a_problem(
    http: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    refused = await http.post("/api/functions", json=EXACT | change)
    assert refused.status_code == 422, refused.text
    assert refused.json()["field"] == field


async def test_text_that_utf8_cannot_encode_is_answered_with_a_problem(
    http: httpx.AsyncClient,
) -> None:
    body = json.dumps(EXACT | {"files": {"x.py": "\ud800"}})
    headers = {"content-type": "application/json"}
    refused = await http.post("/api/functions", content=body, headers=headers)
    assert refused.status_code == 422, refused.text
    assert refused.json()["detail"].startswith("\\ud800 alone is not a character")


ODD = """
class Hostile:
    def tolist(self):
        raise SystemExit(3)

def odd(name):
    if name == "hostile":
        return Hostile()
    if name == "half":
        return ["\\ud800"]
    value = []
    for _ in range({"deep": 300, "deeper": 900, "deepest": 100_000, "fits": 190}[name]):
        value = [value]
    return value
"""


async def test_answers_and_arguments_that_are_not_json_are_typed_errors(
    http: httpx.AsyncClient,
) -> None:
    function = {
        "name": "odd-answers",
        "entrypoint": "odd:odd",
        "files": {"odd.py": ODD},
        "kind": "tool",
    }
    made = await http.post("/api/functions", json=EXACT | function)
    assert made.status_code == 201, made.text
    for name in ("hostile", "deep", "deeper", "deepest"):
        told = await http.post("/api/functions/odd-answers/invoke", json={"name": name})
        assert told.status_code == 200, told.text
        assert told.json()["error"]["kind"] == "bad_result", told.text
    for name in ("half", "fits"):
        told = await http.post("/api/functions/odd-answers/invoke", json={"name": name})
        assert told.json()["error"] is None, told.text
    headers = {"content-type": "application/json"}
    for body in ('{"name": NaN}', '{"name": 1e400}', '{"name": ' + "[" * 300 + "]" * 300 + "}"):
        told = await http.post("/api/functions/odd-answers/invoke", content=body, headers=headers)
        assert told.status_code == 422, told.text
        assert told.headers["content-type"] == "application/problem+json"
        assert told.json()["field"] == "body"
