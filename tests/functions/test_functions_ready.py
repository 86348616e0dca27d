"""Rewards that are ready to use: what they score, and which arguments are refused."""

from __future__ import annotations

import inspect
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster import job_yaml
from troupe.functions import declaration_of
from troupe.functions.library import answers
from troupe.functions.library.mathematics import math
from troupe.job import JobSpecError, parse_job
from troupe.job.functions import READY
from troupe.workflow.loading import load_attribute


def query(**data: Any) -> dict[str, Any]:
    return {"id": "q0", "split": "train", "index": 0, "data": data}


def said(*texts: str, agent: str = "solver") -> list[dict[str, Any]]:
    return [{"agent": agent, "response": one, "tokens": len(one.split())} for one in texts]


@pytest.mark.parametrize(
    ("reference", "reply", "score"),
    [
        ("72", "so she sold 72 clips", 1.0),
        ("72", "The answer is \\boxed{72}.", 1.0),
        ("72", "72 at first, but in the end $\\boxed{73}$", 0.0),
        ("1/2", "It is $0.5$", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\dfrac{2}{4}}", 1.0),
        ("$x^2 + 2x + 1$", "Thus $(x+1)^2$", 1.0),
        ("x^2 + 2x + 1", "Thus $(x+1)^2 + 1$", 0.0),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}", 1.0),
        ("1,234", "$1234$", 1.0),
        ("3", "nothing to say", 0.0),
        ("3", "", 0.0),
        ("3", "<think>it is 3</think>", 0.0),
    ],
)
def test_mathematics_is_compared_as_such(reference: str, reply: str, score: float) -> None:
    assert math(query(answer=reference), said(reply), {}) == score


def test_a_reference_is_cut_out_and_may_be_one_of_several() -> None:
    task = query(solution="2 * 36 = <<2*36=72>>72 in all.\n#### 72", others=["5", "$\\sqrt{4}$"])
    cut = {"answer": "solution", "answer_pattern": r"####\s*(.+)"}
    assert math(task, said("72"), {}, **cut) == 1.0
    assert math(task, said("36"), {}, **cut) == 0.0
    assert math(task, said("2"), {}, answer="others") == 1.0
    with pytest.raises(ValueError, match="is not found in"):
        math(task, said("72"), {}, answer="solution", answer_pattern="@@(.*)")
    with pytest.raises(ValueError, match="has no field 'no'; it has: others, solution"):
        math(task, said("72"), {}, answer="no")


def test_only_a_box_counts_where_it_is_asked_for() -> None:
    assert math(query(answer="7"), said("it is 7"), {}, boxed=True) == 0.0
    assert math(query(answer="7"), said("it is \\boxed{7}"), {}, boxed=True) == 1.0


def test_mathematics_that_never_ends_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer whose evaluation takes for ever costs seconds, not the trajectory."""
    monkeypatch.setattr("troupe.functions.library.mathematics._SECONDS", 1)
    assert math(query(answer="3"), said("$9^{9^{9^{9^{9}}}}$"), {}) == 0.0


def test_mathematics_is_compared_in_other_threads_too() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(math(query(answer="3"), said("3"), {})))
    thread.start()
    thread.join(60)
    assert found == [1.0]


def test_texts_are_compared_without_regard_to_white_space() -> None:
    task = query(answer=["New  York", "NYC"])
    assert answers.exact(task, said(" New York\n"), {}) == 1.0
    assert answers.exact(task, said("nyc"), {}) == 0.0
    assert answers.exact(task, said("nyc"), {}, ignore_case=True) == 1.0
    assert answers.exact(task, said("It is: NYC!"), {}, reply_pattern=r"is: (\w+)") == 1.0
    assert answers.exact(task, said("NYC"), {}, reply_pattern=r"is: (\w+)") == 0.0


@settings(max_examples=40)
@given(st.text(max_size=20), st.text(max_size=20))
def test_exact_is_equality_up_to_white_space(one: str, other: str) -> None:
    if "think>" in one:
        return
    same = " ".join(one.split()) == " ".join(other.split())
    assert answers.exact(query(answer=other), said(one), {}) == float(same)


def test_patterns_are_found_or_are_the_whole() -> None:
    assert answers.regex(query(), said("a 17 b"), {}, pattern=r"\d+") == 1.0
    assert answers.regex(query(), said("a 17 b"), {}, pattern=r"\d+", whole=True) == 0.0
    assert answers.regex(query(), said("<think>17</think>no"), {}, pattern=r"\d") == 0.0


def test_json_follows_a_schema_of_the_job_or_of_the_query() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for reply, score in (
        ('{"n": 3}', 1.0),
        ('```json\n{"n": 3}\n```', 1.0),
        ('{"n": "3"}', 0.0),
        ("{}", 0.0),
        ("n = 3", 0.0),
        ("null", 0.0),
    ):
        assert answers.json_schema(query(), said(reply), {}, json_schema=schema) == score, reply
        assert answers.json_schema(query(shape=schema), said(reply), {}, field="shape") == score


def test_a_schema_that_refers_to_the_network_fetches_nothing() -> None:
    remote = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(Exception, match="schema"):
        answers.json_schema(query(), said("{}"), {}, json_schema=remote)


def test_a_format_is_blocks_in_order() -> None:
    wanted = {"tags": ["think", "answer"]}
    for reply, score in (
        ("<think>a</think> <answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("a</think><answer>b</answer>", 0.0),
    ):
        assert answers.tags(query(), said(reply), {}, **wanted) == score, reply
    reply = "a</think><answer>b</answer>"
    assert answers.tags(query(), said(reply), {}, **wanted, opened=True) == 1.0


@pytest.mark.parametrize(
    ("words", "score"), [(0, 0.0), (1, 0.5), (2, 1.0), (4, 1.0), (5, 0.5), (6, 0.0), (9, 0.0)]
)
def test_a_length_falls_off_linearly(words: int, score: float) -> None:
    turns = said(" ".join(["word"] * words))
    for unit in ("words", "tokens"):
        assert answers.length(query(), turns, {}, least=2, most=4, margin=2, unit=unit) == score


def test_code_is_scored_by_the_tests_of_the_query() -> None:
    tests = "from solution import f\ndef test_a(): assert f(2) == 4\ndef test_b(): assert f(0) == 1"
    right = "Here:\n```python\ndef f(n):\n    return n * n if n else 1\n```"
    half = "```python\ndef f(n):\n    return n * n\n```"
    assert answers.passes_tests(query(tests=tests), said(right), {}) == 1.0
    assert answers.passes_tests(query(tests=tests), said(half), {}) == 0.0
    assert answers.passes_tests(query(tests=tests), said(half), {}, partial=True) == 0.5
    assert answers.passes_tests(query(tests=tests), said("no code"), {}, partial=True) == 0.0


def test_the_agent_that_is_named_is_scored_and_rewarded_alone() -> None:
    turns = [*said("4"), *said("wrong", agent="checker")]
    task = query(answer="4")
    assert answers.exact(task, turns, {}) == 0.0
    assert answers.exact(task, turns, {}, agent="solver", weight=0.5) == {"solver": 0.5}


@pytest.mark.parametrize("name", READY)
def test_what_the_job_may_say_is_what_the_function_takes(name: str) -> None:
    entrypoint, arguments = READY[name]
    function = load_attribute(entrypoint, "rewards")
    taken = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert taken.keys() == arguments.model_fields.keys()
    for field, info in arguments.model_fields.items():
        if info.is_required():
            assert taken[field] is inspect.Parameter.empty, field
        elif info.default is not None:
            assert taken[field] == info.default, field
    declared = declaration_of(function)
    assert declared is not None
    assert declared.kind == "reward"


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"ready": "maths"}, "math"),
        ({"ready": "math", "entrypoint": "a:b"}, "exactly one of"),
        ({"ready": "math", "arguments": {"anser": "x"}}, "`arguments.anser` there is no such"),
        ({"ready": "math", "arguments": {"answer_pattern": "("}}, "no regular expression"),
        ({"ready": "math", "arguments": {"digits": 99}}, "`arguments.digits`"),
        ({"ready": "math", "arguments": {"agent": "nobody"}}, "'nobody' is not an agent"),
        ({"ready": "regex"}, "`arguments.pattern` is missing"),
        ({"ready": "regex", "arguments": {"pattern": "[a"}}, "no regular expression"),
        ({"ready": "json_schema"}, "exactly one of `json_schema` and `field`"),
        (
            {"ready": "json_schema", "arguments": {"json_schema": {"type": "whole"}}},
            "json_schema.type: 'whole'",
        ),
        ({"ready": "format", "arguments": {"tags": []}}, "`arguments.tags`"),
        ({"ready": "format", "arguments": {"tags": ["<think>"]}}, "no name of a tag"),
        ({"ready": "length", "arguments": {"most": 3, "least": 4}}, "more than `most`"),
        ({"ready": "tests", "arguments": {"seconds": 0}}, "`arguments.seconds`"),
        ({"ready": "judge", "arguments": {"model": "m"}}, "`arguments.base_url` is missing"),
    ],
)
def test_bad_arguments_are_refused_at_submit(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(JobSpecError, match=said) as refused:
        parse_job(job_yaml(rewards={"right": reward}))
    assert refused.value.problems[0].field.startswith("rewards.right")


def test_a_field_that_no_row_has_is_refused_at_submit() -> None:
    tasks = {"dataset": "rows.jsonl", "columns": {"question": "q"}}
    text = job_yaml(tasks=tasks, rewards={"right": {"ready": "math"}})
    with pytest.raises(JobSpecError, match="no field 'answer'") as refused:
        parse_job(text)
    assert refused.value.problems[0].field == "rewards.right.arguments.answer"


def test_a_tool_is_not_ready_to_use() -> None:
    with pytest.raises(JobSpecError, match="is a reward") as refused:
        parse_job(job_yaml(tools={"right": {"ready": "math"}}))
    assert refused.value.problems[0].field == "tools.right.ready"


def test_a_ready_reward_survives_the_way_to_the_services() -> None:
    job = parse_job(job_yaml(rewards={"right": {"ready": "math", "timeout_seconds": 9}}))
    again = parse_job(json.dumps(job.model_dump(mode="json")))
    assert again.rewards["right"].code == "troupe.functions.library.mathematics:math"
    assert again.rewards["right"].costs == {"timeout_seconds": 9.0}
