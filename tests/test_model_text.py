"""Model output is parsed in linear time, strictly, and separately from the model's thoughts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.functions.library.judge import read_score
from troupe.replies.formats import PARSERS
from troupe.replies.reading import (
    DEEPEST,
    Parsed,
    read_blocks,
    read_fenced_json,
    read_json,
    read_reply,
)
from troupe.workflow.environments.adapters.spaces import numbers, rendered
from troupe.workflow.environments.episode import read_move
from troupe.workflow.environments.interface import Observation
from troupe.workflow.errors import IllegalMoveError
from troupe.workflow.messages import canonical, parse_messages
from troupe.workflow.trying.tokenizer import ByteTokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
MOVES = Observation("", legal={label: label for label in ("e2e4", "1", "aa a", "[a]", "x y")})
CALL = '{"name": "add", "arguments": {"a": 1}}'


def scored(text: str) -> object:
    try:
        return read_score(text, 0.0, 1.0)
    except ValueError:
        return None


def moved(text: str) -> object:
    try:
        return read_move(text, MOVES)
    except IllegalMoveError:
        return None


def told(text: str) -> object:
    return parse_messages([{"role": "assistant", "content": text}], None)


READERS: dict[str, Callable[[str], object]] = {
    **{name: lambda text, parse=parse: parse(text, TOOLS) for name, parse in PARSERS.items()},
    **{
        f"{name}, thinking": lambda text, parse=parse: parse(text, TOOLS, thinking=True)
        for name, parse in PARSERS.items()
    },
    "no tools": read_reply,
    "json": read_json,
    "canonical": canonical,
    "judge": scored,
    "blocks": read_blocks,
    "fenced json": read_fenced_json,
    "move": moved,
    "numbers": numbers,
    "rendering": rendered,
    "messages": told,
    "bytes": lambda text: ByteTokenizer().decode(ByteTokenizer().encode(text)),
}
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>{",
    '<tool_call>{"name": "',
    f"<tool_call>{CALL}",
    f"<tool_call>{CALL}</tool_call>",
    "<tool_call><function=add>",
    "<function=add>",
    "<function=",
    "</function>",
    "<parameter=",
    "<parameter=a>",
    "<parameter=a>1</parameter>",
    "<parameter=a\n",
    "</parameter>",
    "[TOOL_CALLS]",
    f"[TOOL_CALLS][{CALL}]",
    f"{CALL};",
    f"{CALL}\n",
    "[TOOL_CALLS]</think>",
    "<think></think>",
    "{",
    "[",
    '"',
    '\\"',
    '{"a":',
    '"a": 1, ',
    "1",
    "9.",
    "1e400 ",
    "```",
    "```json\n",
    "```\n",
    "    ```\n",
    "x```\n",
    "```a\nx```\n",
    "~~~\n",
    "````md\n",
    "> ",
    "1. ",
    "`",
    " ",
    "\n",
    "\n ",
    "[a",
    "[a]",
    "aa",
    "aa a",
    "e2e4",
    "\x1b[31m",
    "\x1b[",
    "\x1b[3",
    "\x1b[0m",
    "<|end|>",
    "<|",
]
# Whatever a piece is repeated behind: what opens something that never ends, or almost does.
FRAMES = (
    "",
    "<think>",
    "<tool_call>",
    "<tool_call><function=add>",
    "```",
    "[TOOL_CALLS][",
    "{",
    '"',
)
SHORT, LONG = 1 << 11, 1 << 14


def seconds(read: Callable[[str], object], text: str) -> float:
    """CPU seconds of this thread: what other processes take of the machine does not count."""
    began = time.thread_time()
    read(text)
    return time.thread_time() - began


@pytest.mark.parametrize("reader", READERS)
def test_property_a_text_is_read_in_time_that_grows_with_its_length(reader: str) -> None:
    read = READERS[reader]
    for frame in FRAMES:
        for piece in PIECES:
            short, long = (frame + piece * (n // len(piece)) for n in (SHORT, LONG))
            if seconds(read, long) < 0.02:
                continue  # quadratic code takes longer
            # Eight times as long: 64 times as much where it is quadratic.
            allowed = 30 * min(seconds(read, short) for _ in range(3)) + 0.02
            taken = min(seconds(read, long) for _ in range(3))
            assert taken < allowed, (frame, piece)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{} {}",
        "NaN",
        "-Infinity",
        "1e309",
        "[-1e400]",
        '{"a": [1e999]}',
        "1" + "0" * 309,
        "9" * 309,
        "-" + "9" * 5000,
        '{"a": 1, "a": 1}',
        '[{"b": {"a": 1, "a": 1}}]',
        "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
        '{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1),
        "[" * 100_000,
        "\ufeff{}",
    ],
)
def test_text_that_json_readers_disagree_on_is_refused(text: str) -> None:
    assert read_json(text, "none") == "none"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**300), 10**300)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_property_other_json_is_read_as_it_is(value: Any) -> None:
    assert read_json(json.dumps(value), "none") == value


@given(st.lists(st.sampled_from([*PIECES, "x"]), max_size=12).map("".join))
def test_property_reading_again_what_was_said_finds_no_further_thoughts(text: str) -> None:
    said = read_reply(text)
    assert not said.calls
    assert "<think>" not in said.content
    assert "</think>" not in said.content
    if "think>" not in text:
        assert said == Parsed(text)


def test_a_judge_may_think_first_and_fence_its_score() -> None:
    for text in ('{"score": 1}', '```json\n{"score": 1}\n```', '```{"score": 1}```'):
        for thought in ("", "<think>0?</think>\n", '{"score": 0}</think>'):
            assert read_score(thought + text, 0.0, 1.0) == 1.0
    for text in ("[" * 100_000, '{"score": 1e400}', '{"score": 1, "score": 0}', "```", "`````"):
        with pytest.raises(ValueError, match=r"JSON|score|number"):
            read_score(text, 0.0, 1.0)


def test_colours_of_a_rendering_become_brackets() -> None:
    said = "\x1b[0;34ma\x1b[1mb\x1b[0m c\x1b[m \x1b[31md"
    assert rendered(said) == "[a\x1b[1mb] c\x1b[m \x1b[31md"
