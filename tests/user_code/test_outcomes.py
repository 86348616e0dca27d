"""Texts, numbers and JSON of any result or exception of user code."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hostile import (
    HALF,
    UnsayableError,
    errors,
    leaf_errors,
    nested_group,
    nested_list,
    raising,
    values,
)
from troupe.outcomes import (
    JSON_DEPTH,
    NotFiniteError,
    NotJsonError,
    described,
    finite_number,
    json_text,
    parse_json,
    safe_text,
    shown,
    traceback_text,
    type_name,
    utf8_text,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.messages import as_template_takes, parse_messages, parse_tools


def _check_text(text: str, limit: int) -> None:
    assert type(text) is str
    assert len(text) <= limit
    assert "\0" not in text
    # As protobuf, JSON and Redis carry it.
    assert (
        common_pb.Problem.FromString(common_pb.Problem(message=text).SerializeToString()).message
        == text
    )
    assert json.loads(json.dumps(text, ensure_ascii=False).encode()) == text


@given(values(), st.sampled_from([10, 60, 2000]))
def test_any_value_is_a_bounded_text(value: Any, limit: int) -> None:
    for text in (safe_text(value, limit), shown(value, limit)):
        _check_text(text, limit)
    _check_text(type_name(value), 2000)


@given(errors(), st.sampled_from([20, 2000]))
def test_any_exception_is_described(error: BaseException, limit: int) -> None:
    _check_text(described(error, limit), limit)
    try:
        raise error
    except BaseException as raised:
        text = traceback_text(raised)
    assert len(text) <= 16 * 2**10
    text.encode()


def test_a_group_is_described_by_its_first_members() -> None:
    group = BaseExceptionGroup("both", [ValueError("one"), ExceptionGroup("in", [KeyError("two")])])
    assert described(group) == "ExceptionGroup: both (ValueError: one; KeyError: 'two')"
    deep = nested_group(SystemExit(3), 100_000)
    assert described(deep) == "BaseExceptionGroup: group (SystemExit: 3)"
    wide = BaseExceptionGroup("wide", [ValueError(str(i)) for i in range(1000)])
    assert len(described(wide)) < 200
    while isinstance(deep, BaseExceptionGroup):  # without recursion in its end
        deep = deep.exceptions[0]


def test_texts_of_values_that_cannot_be_shown_are_safe() -> None:
    assert safe_text("as it is") == "as it is"
    assert safe_text(f"a{HALF}b\0") == "a\N{REPLACEMENT CHARACTER}b\N{SYMBOL FOR NULL}"
    assert safe_text(10**5000) == "an integer of 16,610 bits"
    assert safe_text(UnsayableError()) == "a UnsayableError that cannot be shown"
    assert described(UnsayableError()) == ("UnsayableError: a UnsayableError that cannot be shown")
    assert described(ValueError()) == "ValueError"
    assert shown("x" * 100, 20).endswith("...")

    class Named(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise SystemExit

    class Value(metaclass=Named):
        pass

    assert type_name(Value()) == "Value"


def test_halves_of_a_pair_that_belong_together_are_joined() -> None:
    assert utf8_text("\ud83d\ude00") == "\U0001f600"
    assert utf8_text("\ude00\ud83d") == "\N{REPLACEMENT CHARACTER}" * 2


@given(values())
def test_any_value_is_a_finite_number_or_none(value: Any) -> None:
    try:
        number = finite_number(value)
    except NotFiniteError as error:
        _check_text(str(error), 500)
    else:
        assert type(number) is float
        assert math.isfinite(number)


@pytest.mark.parametrize("value", [1, True, 2.5, np.float32(1), np.array(3), np.int64(7)])
def test_numbers_are_numbers(value: Any) -> None:
    assert finite_number(value) == float(value)


@pytest.mark.parametrize("value", ["1", b"1", 10**400, float("nan"), -math.inf, None, [1.0], 1j])
def test_values_that_are_not_finite_numbers_are_refused(value: Any) -> None:
    with pytest.raises(NotFiniteError, match="is not a finite number"):
        finite_number(value)


@given(values())
def test_any_value_is_json_or_is_refused(value: Any) -> None:
    try:
        text = json_text(value)
    except NotJsonError as error:
        _check_text(str(error), 600)
        return
    except MemoryError:  # raised by the value
        return
    text.encode()
    read = parse_json(text)
    json.dumps(read, allow_nan=False, ensure_ascii=False).encode()


@given(
    st.text(alphabet='[]{}",:\\ud8 0123456789.eE-+NaInfityl', max_size=60)
    | st.binary(max_size=30)
    | st.text(st.characters(exclude_categories=[]))
)
def test_any_text_is_parsed_or_refused(text: str | bytes) -> None:
    try:
        value = parse_json(text)
    except NotJsonError as error:
        _check_text(str(error), 600)
    else:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    ["NaN", "[1, Infinity]", "-Infinity", "1e400", "[-1e999]", "1" * 5000, "", "{", b"\xff"],
)
def test_texts_that_are_not_json_are_refused(text: str | bytes) -> None:
    with pytest.raises(NotJsonError):
        parse_json(text)


@pytest.mark.parametrize("depth", [JSON_DEPTH + 1, 900, 100_000])
def test_depth_is_bounded_on_both_sides(depth: int) -> None:
    with pytest.raises(NotJsonError, match=f"nested deeper than {JSON_DEPTH} levels"):
        parse_json("[" * depth + "]" * depth)
    if depth < 10_000:  # the interpreter itself cannot free deeper ones on some stacks
        with pytest.raises(NotJsonError, match=f"nested deeper than {JSON_DEPTH} levels"):
            json_text(nested_list(depth))


def test_depth_is_not_breadth_and_not_text() -> None:
    wide = [[i] for i in range(1000)]
    assert parse_json(json_text(wide)) == wide
    texts = ['"[[[', "\\[{", "[" * 1000]
    assert parse_json(json_text(texts)) == texts
    deepest: Any = nested_list(JSON_DEPTH - 1)
    assert parse_json(json_text(deepest)) == deepest


def test_json_without_halves_of_pairs() -> None:
    assert parse_json(json_text({HALF: [HALF]})) == {"\ufffd": ["\ufffd"]}
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert parse_json(f'["{HALF}"]') == ["\ufffd"]
    assert json_text(["a\\ud800"]) == '["a\\\\ud800"]'


def test_numbers_of_numpy_are_json() -> None:
    assert json_text({"a": np.arange(3), "b": np.float64(0.5)}) == '{"a": [0, 1, 2], "b": 0.5}'


@pytest.mark.parametrize("error", leaf_errors(), ids=type_name)
def test_objects_that_raise(error: BaseException) -> None:
    value = raising(error)
    assert safe_text(value) == "a Hostile that cannot be shown"
    with pytest.raises(
        NotFiniteError, match="a Hostile that cannot be shown is not a finite number"
    ):
        finite_number(value)
    with pytest.raises(MemoryError if type(error) is MemoryError else NotJsonError):
        json_text(value)


def test_time_grows_with_the_length_of_a_text() -> None:
    def seconds(text: str) -> float:
        best = math.inf
        for _ in range(3):
            began = time.thread_time()
            with contextlib.suppress(NotJsonError):
                parse_json(text)
            best = min(best, time.thread_time() - began)
        return best

    for part in ('"\\"', "[", '["', "[[]],", "\\"):
        small, large = seconds(part * 4_000), seconds(part * 64_000)
        assert large < max(0.05, 16 * small * 8), part


def test_tools_and_messages_come_to_templates_as_utf8() -> None:
    tool = {"type": "function", "function": {"name": f"a{HALF}", "description": HALF}}
    (given,) = parse_tools([tool]).given
    assert given["function"] == {"name": "a\ufffd", "description": "\ufffd"}
    call = {"id": HALF, "function": {"name": HALF, "arguments": '{"x": "\\ud800"}'}}
    messages = [{"role": "assistant", "content": HALF, "tool_calls": [call]}]
    (message,) = map(as_template_takes, parse_messages(messages, None))
    assert json.dumps(message, ensure_ascii=False).encode()
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": "\ufffd"}
