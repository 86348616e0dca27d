"""Tool calls in replies: parsing, and other text that a model may write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.replies.formats import PARSERS
from troupe.replies.reading import Parsed
from troupe.workflow.messages import call_ids, canonical

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
    said = PARSERS[parser](text, [ADD])
    return said.content, [(name, json.loads(arguments)) for name, arguments in said.calls]


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
        '<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": -1e400}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": -Infinity}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1e400}"}</tool_call>',
        f'<tool_call>{{"name": "add", "arguments": {{"a": 1{"0" * 400}}}}}</tool_call>',
        f'<tool_call>{{"name": "add", "arguments": {{"a": 1{"0" * 5000}}}}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "add", "name": "sub", "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 200 + "]" * 200}}}}}</tool_call>',
        '{"name": "add", "parameters": {"a": 1e400}}',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1e400}}]',
        "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>"
        "</tool_call>",
    ],
)
def test_text_that_is_not_a_call_stays_text(parser: str, text: str) -> None:
    assert PARSERS[parser](text, [ADD]) == Parsed(text)


# A call of `add` in the form of each family, with the argument a (JSON text) and the remaining
# text.
WRITTEN = {
    "hermes": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
    "llama": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": %s}]',
    "qwen_coder": "<tool_call><function=add><parameter=note>%s</parameter></function></tool_call>",
}


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_a_call_inside_a_thought_is_ignored(parser: str) -> None:
    call = WRITTEN[parser] % "{}"
    one = [("add", "{}" if parser != "qwen_coder" else '{"note": "{}"}')]
    parse = PARSERS[parser]
    thought = f"perhaps {call} or\n{call}"
    assert parse(f"<think>{thought}</think>\n\n7", [ADD]) == ("7", (), thought)
    assert parse(f"<think>{thought}</think>{call}", [ADD]) == ("", tuple(one), thought)
    # The template has opened it, so that only its end is visible, without a mark.
    assert parse(f"{thought}</think>7", [ADD], thinking=True) == ("7", (), thought)
    assert parse(f"{thought}</think>{call}", [ADD]) == ("", tuple(one), thought)
    # It was cut, or never ends.
    assert parse(f"<think>{thought}", [ADD]) == ("", (), thought)
    assert parse(call, [ADD], thinking=True) == ("", (), call)
    # A further thought; what templates show begins behind the last one's end.
    assert parse(f"<think>a</think> b <think>{call}</think>{call}", [ADD]).calls == tuple(one)
    assert parse(f"{call} a</think>{call}</think>b", [ADD])[:2] == ("b", ())
    assert parse("<think>\n\n</think>\n\nyes", [ADD]) == ("yes", (), "")


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_tags_in_the_arguments_of_a_call_are_part_of_them(parser: str) -> None:
    said = "</think> of <think>x</think> [TOOL_CALLS] <tool_call>"
    inside = said if parser == "qwen_coder" else json.dumps({"note": said})
    call = WRITTEN[parser] % inside
    for text in (call, f"<think>so</think>{call}"):
        [(name, arguments)] = PARSERS[parser](text, [ADD]).calls
        assert (name, json.loads(arguments)) == ("add", {"note": said})


def test_a_call_behind_a_tag_that_is_only_mentioned_is_read() -> None:
    assert read("hermes", f"I use <tool_call>: <tool_call>{ONE}</tool_call>") == (
        "I use <tool_call>:",
        [("add", {"a": 1})],
    )


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
                "<think>",
                "</think>",
            ]
        ),
        max_size=8,
    ).map("".join),
)
def test_property_a_parser_raises_nothing_and_gives_objects(parser: str, text: str) -> None:
    said = PARSERS[parser](text, [ADD])
    for name, arguments in said.calls:
        assert name
        assert isinstance(json.loads(arguments), dict)
    assert not PARSERS[parser](f"<think>{text}".replace("</think>", ""), [ADD]).calls
    assert PARSERS[parser](text).calls == ()
    if "think>" not in text and not said.calls:
        assert said == Parsed(text)


def test_arguments_mean_the_same_however_they_are_written() -> None:
    assert canonical('{"b": 1,  "a": [2]}') == canonical('{"a":[2],"b":1}')
    assert canonical("") == canonical("{ }")
    assert canonical("not json") == "not json"


def test_ids_of_calls_follow_from_the_turn_and_fit_mistral() -> None:
    ids = call_ids(3, (0, 1, 77))
    assert ids == call_ids(3, (0, 1, 77))
    assert len({*ids, *call_ids(3, (0, 2, 77))}) == 6
    assert all(len(one) == 9 and one.isalnum() for one in ids)
