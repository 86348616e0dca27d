"""Calls of tools in replies: reading them, and whatever else a model may write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.workflow.toolcalls import PARSERS, Parsed, call_ids, canonical

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
}
ONE = '{"name": "add", "arguments": {"a": 1}}'
TWO = '{"name": "add", "arguments": {"a": 2}}'


def read(parser: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = PARSERS[parser](text, [ADD])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("hermes", f"So.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>", "So."),
        (
            "qwen_coder",
            "So.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
            "</tool_call><tool_call><function=add><parameter=a>2</parameter></function></tool_call>",
            "So.",
        ),
        ("llama", f"<|python_tag|>{ONE.replace('arguments', 'parameters')}; {TWO}", ""),
        ("mistral", f"So.[TOOL_CALLS] [{ONE}, {TWO}]", "So."),
    ],
)
def test_each_family_writes_calls_in_its_own_way(parser: str, text: str, content: str) -> None:
    assert read(parser, text) == (content, [("add", {"a": 1}), ("add", {"a": 2})])


def test_values_of_tags_are_text_unless_the_schema_says_otherwise() -> None:
    text = (
        "<tool_call><function=add><parameter=a>7</parameter><parameter=note>7</parameter>"
        "<parameter=other>7</parameter></function></tool_call>"
    )
    assert read("qwen_coder", text) == ("", [("add", {"a": 7, "note": "7", "other": "7"})])


@pytest.mark.parametrize("parser", sorted(PARSERS))
@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call at all",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "argu',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "[" * 100_000,
        f"[TOOL_CALLS]{ONE}",
        f"[TOOL_CALLS][{ONE}, 3]",
        f"{TWO} and more",
    ],
)
def test_what_is_no_call_stays_text(parser: str, text: str) -> None:
    assert PARSERS[parser](text, [ADD]) == Parsed(text)


@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                ONE,
                TWO,
                "<function=add>",
                "[TOOL_CALLS]",
                "{",
                "[",
                "x",
            ]
        ),
        max_size=8,
    ).map("".join),
)
def test_property_a_parser_raises_nothing_and_gives_objects(parser: str, text: str) -> None:
    for name, arguments in PARSERS[parser](text, [ADD]).calls:
        assert name
        assert isinstance(json.loads(arguments), dict)


def test_arguments_mean_the_same_however_they_are_written() -> None:
    assert canonical('{"b": 1,  "a": [2]}') == canonical('{"a":[2],"b":1}')
    assert canonical("") == canonical("{ }")
    assert canonical("not json") == "not json"


def test_ids_of_calls_follow_from_the_turn_and_fit_mistral() -> None:
    ids = call_ids(3, (0, 1, 77))
    assert ids == call_ids(3, (0, 1, 77))
    assert len({*ids, *call_ids(3, (0, 2, 77))}) == 6
    assert all(len(one) == 9 and one.isalnum() for one in ids)
