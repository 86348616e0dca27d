"""A model that judges, against a real HTTP server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from troupe.functions.library.judge import JudgeError, judge, read_score

TURNS = [
    {"agent": "solver", "response": "4"},
    {"agent": "checker", "response": "yes, {$4}"},
]
QUERY = {"id": "q", "data": {"question": "2 + 2?"}}


class Endpoint:
    """Answers requests from a script: (status, headers, body), the last one for ever."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                endpoint.requests.append(json.loads(self.rfile.read(size)))
                endpoint.keys.append(self.headers["authorization"])
                endpoint.times.append(time.monotonic())
                more = len(endpoint.script) > 1
                answer = endpoint.script.pop(0) if more else endpoint.script[0]
                status, headers, body = said(answer) if isinstance(answer, str) else answer
                if self.path != "/v1/chat/completions":
                    status, headers, body = 404, {}, b"no such path"
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def said(text: str) -> tuple[int, dict[str, str], bytes]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return 200, {}, json.dumps({"choices": [choice]}).encode()


def score(value: Any) -> str:
    return json.dumps({"reason": "so", "score": value})


LATER = (429, {"retry-after": "0.3"}, b"slow down")
BROKEN = (503, {}, b"overloaded")


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr("troupe.functions.library.judge._FIRST_PAUSE", 0.01)
    made = Endpoint(*getattr(request, "param", (score(0.5),)))
    yield made
    made.server.shutdown()
    made.server.server_close()


def ask(endpoint: Endpoint, **settings: Any) -> Any:
    given = {"base_url": endpoint.url, "model": "m", **settings}
    return judge(QUERY, TURNS, {}, **given)


def test_the_last_reply_is_judged_with_the_task_and_the_rubric(endpoint: Endpoint) -> None:
    assert ask(endpoint, rubric="Be kind.") == 0.5
    assert ask(endpoint, rubric="Be kind.", agent="solver", task="question") == {"solver": 0.5}
    first, second = (one["messages"][0]["content"] for one in endpoint.requests)
    assert "yes, {$4}" in first
    assert '"question": "2 + 2?"' in first
    assert "Be kind." in first
    assert "\n4\n" in second
    assert "\n2 + 2?\n" in second
    assert endpoint.requests[0]["model"] == "m"
    tags = [line for text in (first, second) for line in text.splitlines() if "-answer>" in line]
    assert len(set(tags)) == 4


def test_a_task_that_the_query_lacks_is_an_error_and_nothing_is_asked(endpoint: Endpoint) -> None:
    given: dict[str, Any] = {"base_url": endpoint.url, "model": "m", "task": "question"}
    for data in ({"question": None}, {"questions": "2 + 2?"}):
        with pytest.raises(ValueError, match="question"):
            judge({**QUERY, "data": data}, TURNS, {}, **given)
    assert not endpoint.requests


@pytest.mark.parametrize("endpoint", [(score(7),)], indirect=True)
def test_a_score_is_brought_to_zero_and_one(endpoint: Endpoint) -> None:
    assert ask(endpoint, lowest=1, highest=10) == pytest.approx(6 / 9)
    assert ask(endpoint, lowest=1, highest=10, weight=-0.3) == pytest.approx(-0.2)


@pytest.mark.parametrize("endpoint", [(LATER, BROKEN, score(1.0))], indirect=True)
def test_refusals_for_now_are_waited_out_as_they_say(endpoint: Endpoint) -> None:
    assert ask(endpoint) == 1.0
    assert endpoint.times[1] - endpoint.times[0] >= 0.3


@pytest.mark.parametrize(
    "endpoint", [("no idea", score(2), score(True), score(1.0))], indirect=True
)
def test_a_reply_without_a_score_is_asked_for_again(endpoint: Endpoint) -> None:
    assert ask(endpoint) == 1.0
    assert len(endpoint.requests) == 4


@pytest.mark.parametrize(
    ("endpoint", "kind", "text", "asked"),
    [
        (("no idea",), "bad_score", "not one JSON object", 3),
        ((score(3),), "bad_score", "outside 0 .. 1", 3),
        (((401, {}, b"who are you"),), "refused", "answered 401: who are you", 1),
        ((BROKEN,), "unavailable", "answered 503", 3),
        (((200, {}, b"<html>"),), "bad_reply", "not a completion", 3),
        (((200, {}, b'{"choices": []}'),), "bad_reply", "not a completion", 3),
    ],
    indirect=["endpoint"],
)
def test_an_answer_without_a_score_ends_with_a_typed_error(
    endpoint: Endpoint, kind: str, text: str, asked: int
) -> None:
    with pytest.raises(JudgeError, match=text) as failed:
        ask(endpoint, attempts=3)
    assert failed.value.kind == kind
    assert len(endpoint.requests) == asked


@pytest.mark.parametrize("endpoint", [((429, {"retry-after": "60"}, b""),)], indirect=True)
def test_a_wait_beyond_the_deadline_is_left_to_the_runtime(endpoint: Endpoint) -> None:
    with pytest.raises(JudgeError) as failed:
        ask(endpoint, seconds=50.0)
    assert (failed.value.kind, failed.value.retry_after) == ("rate_limited", 60.0)
    assert len(endpoint.requests) == 1


def test_the_key_comes_from_the_environment_by_name(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE_KEY", "s3cret")
    ask(endpoint, api_key_env="MY_JUDGE_KEY")
    assert endpoint.keys == ["Bearer s3cret"]
    with pytest.raises(JudgeError, match="environment variable NO_SUCH_KEY is missing") as failed:
        ask(endpoint, api_key_env="NO_SUCH_KEY")
    assert failed.value.kind == "no_key"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prompt": "$what"}, "known: .task"),
        ({"agent": "nobody"}, "agent 'nobody' has no reply"),
        ({"lowest": 1.0, "highest": 1.0}, "is not a range of scores"),
        ({"base_url": "nowhere"}, "bad_url"),
        ({"base_url": "http://127.0.0.1:9/v1", "attempts": 1}, "unavailable"),
    ],
)
def test_settings_that_cannot_work_are_said(
    endpoint: Endpoint, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(JudgeError, match=text):
        ask(endpoint, **settings)


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 0.5}',
        '```json\n{"score": 0.5}\n```',
        '<think>{"score": 1}</think>\n {"reason": "x", "score": 0.5}',
    ],
)
def test_scores_that_are_read(reply: str) -> None:
    assert read_score(reply, 0.0, 1.0) == 0.5


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 0.5} {"score": 1}',
        "score: 0.5",
        '{"score": "0.5"}',
        '{"score": NaN}',
        "[0.5]",
        "",
    ],
)
def test_scores_that_are_not_read(reply: str) -> None:
    with pytest.raises(ValueError, match=r"score|JSON"):
        read_score(reply, 0.0, 1.0)
