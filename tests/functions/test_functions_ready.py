"""Predefined rewards: their scores, and the arguments that they refuse."""

from __future__ import annotations

import inspect
import json
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster import job_yaml
from tests.support.waiting import PATIENCE
from troupe.functions import declaration_of
from troupe.functions.library import answers, mathematics
from troupe.functions.library.mathematics import math
from troupe.job import JobSpecError, parse_job
from troupe.job.sections.functions import READY
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
        ("0.0000001", "0.0000001", 1.0),
        ("0.0000001", "0.0000002", 0.0),
        ("0.0000001", "-0.0000001", 0.0),
        ("0.0000001", "0", 0.0),
        ("0", "0.0000001", 0.0),
        ("\\frac{1}{3000000}", "0.000000333333", 1.0),
        ("\\frac{1}{3000000}", "0.0", 0.0),
        ("10^{-20}", "$1 \\times 10^{-20}$", 1.0),
        ("10^{-20}", "$3 \\times 10^{-20}$", 0.0),
        ("\\{0.0000001\\}", "$\\{0.0000002\\}$", 0.0),
        ("(0.0000001, 1)", "$(0.0000002, 1)$", 0.0),
        ("0.0000001x", "$0.0000002x$", 0.0),
        (
            "\\begin{pmatrix}0.0000001\\\\1\\end{pmatrix}",
            "$\\begin{pmatrix}0.0000002\\\\1\\end{pmatrix}$",
            0.0,
        ),
        ("1/3", "0.333333", 1.0),
        (1e-7, "1e-7", 1.0),
        (1e-7, "$10^{-7}$", 1.0),
        ("1e-07", "0.0000001", 1.0),
        ("1", "1e-5", 0.0),
        ("2e-1", "$-1 + 2e$", 1.0),
        ("2e-1", "$2e-1$", 1.0),
        (0.2, "\\boxed{2e-1}", 1.0),
        (0.00001, "\\boxed{1e-5}", 1.0),
        ("5", "\\boxed{1e-5}", 0.0),
        (1e16, "10000000000000000", 1.0),
        (1e16, "1", 0.0),
        (1234, "1,234", 1.0),
        (3.0, "3", 1.0),
        (0, "0.0", 1.0),
        (-5, "\N{MINUS SIGN}5", 1.0),
        ("0.5", "\\boxed{\N{FULLWIDTH DIGIT ZERO}.\N{FULLWIDTH DIGIT FIVE}}", 1.0),
        ("3", "\\boxed{}", 0.0),
        # A reply without words is an expression as a whole, not the first number in it.
        ("10", "10^{10}", 0.0),
        (10**10, "10^{10}", 1.0),
        ("10", "The answer is 10^{10}.", 0.0),
        (10**10, "The answer is 10^{10}.", 1.0),
        ("2", "2x", 0.0),
        ("2x", "2x", 1.0),
        ("3", "3\\pi", 0.0),
        ("3\\pi", "3\\pi", 1.0),
        ("5", "5!", 0.0),
        ("120", "5!", 1.0),
        ("6", "2\\cdot 3", 1.0),
        ("4", "n=3, m=4", 0.0),
        ("5", "x = 5", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("[0, 1)", "[0,1)", 1.0),
        ("\\{1, 2\\}", "\\{2, 1\\}", 1.0),
        ("2+3i", "2+3i", 1.0),
        ("A", "(A)", 1.0),
        ("\\infty", "\\infty", 1.0),
        ("\\frac{1}{2}", "\\frac{1}{2}", 1.0),
        ("1000", "1 000", 1.0),
        ("7", "**7**", 1.0),
        ("7", "7.", 1.0),
        ("5", "\N{EURO SIGN}5", 1.0),
        ("0.5", "50\\%", 1.0),
        ("7", "7 apples", 1.0),
        ("5", ".5", 0.0),
        ("0.5", ".5", 1.0),
        # The same holds behind the words of a reply.
        ("(3, 4)", "Answer: (3, 4)", 1.0),
        ("(3, 4)", "Answer: (4, 3)", 0.0),
        ("[0, 1]", "So x is in [0, 1].", 1.0),
        ("3\\pi", "**Answer:** 3\\pi", 1.0),
        ("A", "The answer is A.", 1.0),
        ("B", "The answer is A.", 0.0),
        ("-7", "Answer: -7", 1.0),
        ("0.5", "Answer: .5", 1.0),
        ("8", "It is 7, not 8 apples", 1.0),
        # The last tags of an answer count.
        ("7", "<answer>7</answer>", 1.0),
        ("7", "It is 5, no: <answer> x = 7 </answer>, since 3 + 4 = 7 and not 8", 1.0),
        ("7", "<answer>7</answer> or <answer>8</answer>", 0.0),
        ("7", "<answer>\\boxed{7}</answer>", 1.0),
        # The last box counts, also without `$`, and with the boxes that are listed with it.
        ("11", "So \\boxed{10}. No, wait: \\boxed{11}", 1.0),
        ("10", "So \\boxed{10}. No, wait: \\boxed{11}", 0.0),
        ("10", "\\boxed{10}\\boxed{}", 0.0),
        ("1", "\\boxed{12", 0.0),
        ("2", "\\boxed 121", 0.0),
        ("121", "\\boxed 121", 1.0),
        ("1,2", "$\\boxed{1}$ and $\\boxed{2}$", 1.0),
        ("\\{1,2\\}", "\\boxed{3}, but then \\boxed{\\{1,2\\}}", 1.0),
        # Exponents that can only be decimal in a reference.
        ("1e3", "1000", 1.0),
        ("1e-5", "1e-5", 1.0),
        ("1.5e-3", "0.0015", 1.0),
        ("2E-1", "0.2", 1.0),
        ("6.02e23", "$6.02 \\times 10^{23}$", 1.0),
        ("6.02e23", "$6.03 \\times 10^{23}$", 0.0),
        # Integers and decimals agree to `digits`, too.
        ("5", "5.0000001", 1.0),
        ("5.0000001", "5", 1.0),
        ("5", "5.000001", 0.0),
        ("0", "0.00000000", 1.0),
        (10**400, "1.5", 0.0),
        # Separators of thousands, currencies, mixed numbers, repeating decimals, raised digits.
        ("1234567", "\\boxed{1\\,234\\,567}", 1.0),
        ("5~000", "\\boxed{5 000}", 1.0),
        ("1,234 apples", "1234", 1.0),
        ("\\$5", "\\boxed{5}", 1.0),
        ("\N{EURO SIGN}5", "\\boxed{5\N{EURO SIGN}}", 1.0),
        ("20", "It costs \\$20.", 1.0),
        ("3 1/2", "3.5", 1.0),
        ("7/2", "The answer is 3 1/2.", 1.0),
        ("3 1/2", "15.5", 0.0),
        ("0.1\\overline{6}", "1/6", 1.0),
        ("0.\\overline{3}", "0.34", 0.0),
        ("5", "5\N{SUPERSCRIPT TWO}", 0.0),
        ("25", "5\N{SUPERSCRIPT TWO}", 1.0),
        ("-5", "\N{EN DASH}5", 1.0),
        ("\\varnothing", "\\boxed{\\emptyset}", 1.0),
        # Words of other scripts are words.
        (
            "12",
            "\N{CJK UNIFIED IDEOGRAPH-7B54}: 12\N{IDEOGRAPHIC FULL STOP}",
            1.0,
        ),
        ("12", "\N{CJK UNIFIED IDEOGRAPH-662F}12\N{IDEOGRAPHIC FULL STOP}", 1.0),
        ("12", "\N{CYRILLIC CAPITAL LETTER O}\N{CYRILLIC SMALL LETTER TE} 12.", 1.0),
        # What is written as the reference is right.
        ("yes", "yes", 1.0),
        ("yes", "no", 0.0),
        ("11_2", "\\boxed{11_2}", 1.0),
        ("112", "11_2", 0.0),
    ],
)
def test_mathematics_is_compared_as_such(reference: object, reply: str, score: float) -> None:
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
    monkeypatch.setattr(mathematics, "_SECONDS", 1.0)
    assert math(query(answer="3"), said("$9^{9^{9^{9^{9}}}}$"), {}) == 0.0


def test_mathematics_on_a_busy_host_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are on CPU time: what waits for a core is not what never ends."""

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.4)
        return parse(*arguments, **options)

    parse = mathematics.parse
    monkeypatch.setattr(mathematics, "parse", slowly)
    math(query(answer="7"), said("7"), {})  # imports
    monkeypatch.setattr(mathematics, "_SECONDS", 0.3)
    assert math(query(answer="7"), said("7"), {}) == 1.0


def test_mathematics_is_compared_in_other_threads_too() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(math(query(answer="3"), said("3"), {})))
    thread.start()
    thread.join(PATIENCE)
    assert found == [1.0]


def test_texts_are_compared_without_regard_to_white_space() -> None:
    task = query(answer=["New  York", "NYC"])
    assert answers.exact(task, said(" New York\n"), {}) == 1.0
    assert answers.exact(task, said("nyc"), {}) == 0.0
    assert answers.exact(task, said("nyc"), {}, ignore_case=True) == 1.0
    assert answers.exact(task, said("It is: NYC!"), {}, reply_pattern=r"is: (\w+)") == 1.0
    assert answers.exact(task, said("NYC"), {}, reply_pattern=r"is: (\w+)") == 0.0


@pytest.mark.parametrize(
    ("reference", "reply", "score"),
    [
        # Texts are compared as texts,
        ("1.50", "1.5", 0.0),
        ("007", "7", 0.0),
        ("None", "None", 1.0),
        ("true", "True", 0.0),
        ("a\r\n b", "a b", 1.0),
        ("a\N{NO-BREAK SPACE}b", "a b", 1.0),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}", 1.0),
        ("x\N{SUPERSCRIPT TWO}", "x2", 0.0),
        ("-5", "\N{MINUS SIGN}5", 1.0),
        ("7", "\N{FULLWIDTH DIGIT SEVEN}", 1.0),
        ("A", "\N{FULLWIDTH LATIN CAPITAL LETTER A}", 1.0),
        ("A", "\N{ZERO WIDTH NO-BREAK SPACE}A\N{ZERO WIDTH SPACE}", 1.0),
        # numbers of the data by their decimal value,
        (7, "7", 1.0),
        (7, "7.0", 1.0),
        (7, "007", 1.0),
        (7, "+7", 1.0),
        (7, "8", 0.0),
        (7, "seven", 0.0),
        (7, "", 0.0),
        (7, "nan", 0.0),
        (7, "\N{FULLWIDTH DIGIT SEVEN}", 1.0),
        (7, "\N{ARABIC-INDIC DIGIT SEVEN}", 1.0),
        (-7, "\N{MINUS SIGN}7", 1.0),
        (7, "\N{MINUS SIGN}7", 0.0),
        (0, "-0", 1.0),
        (1.5, "1.50", 1.0),
        (0.1, "0.1", 1.0),
        (0.1, "0.10000000000000001", 0.0),
        (0.00001, "0.00001", 1.0),
        (0.00001, "1e-5", 1.0),
        (0.00001, "0.00002", 0.0),
        (1e16, "10000000000000000", 1.0),
        (1e16, "1e16", 1.0),
        (1e16, "10,000,000,000,000,000", 1.0),
        (1e300, "1" + "0" * 300, 1.0),
        (123456789012345678901234567890, "123456789012345678901234567890", 1.0),
        (123456789012345678901234567890, "123456789012345678901234567891", 0.0),
        (10**400, "1" + "0" * 400, 1.0),
        (1234567.5, "1,234,567.5", 1.0),
        (1234567, "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567", 1.0),
        (1234, "1,23,4", 0.0),
        (12, "1,2", 0.0),
        (12, "1_2", 0.0),
        ("a-b", "a\N{EN DASH}b", 1.0),
        (-7, "\N{NON-BREAKING HYPHEN}7", 1.0),
        # and truth values as words.
        (True, "true", 1.0),
        (True, "True", 1.0),
        (True, "1", 0.0),
        (1, "True", 0.0),
        (False, "FALSE", 1.0),
        (False, "0", 0.0),
        (False, "", 0.0),
        # One element of a list is enough.
        (["7", 8, True], "8.0", 1.0),
        (["7", 8, True], "true", 1.0),
        (["7", 8, True], "9", 0.0),
    ],
)
def test_references_are_compared_by_their_type(reference: object, reply: str, score: float) -> None:
    assert answers.exact(query(answer=reference), said(reply), {}) == score


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_property_a_number_equals_itself_in_any_notation(number: float) -> None:
    exact = Decimal(repr(number))
    for reply in (repr(number), f"{exact:f}", f"{exact:e}", f"{exact:,f}", f" {exact:f}0"):
        same = Decimal(reply.replace(",", "")) == exact
        assert answers.exact(query(answer=number), said(reply), {}) == float(same), reply


@pytest.mark.parametrize(
    "reference", [None, float("nan"), float("inf"), -float("inf"), [], [None], ["7", None], {}]
)
@pytest.mark.parametrize("reward", [answers.exact, math])
def test_a_reference_that_nothing_can_equal_is_an_error(reward: Any, reference: object) -> None:
    for reply in ("7", "None", "nan", "null", "[]", ""):
        with pytest.raises(answers.BadReferenceError, match="'answer' of the query is"):
            reward(query(answer=reference), said(reply), {})


@pytest.mark.parametrize("reference", [{"text": "7"}, [["7"]], [{"text": "7"}]])
def test_a_reference_with_parts_is_an_error_that_says_how_to_name_one(reference: object) -> None:
    with pytest.raises(answers.BadReferenceError, match=r"not a single value.*answers\.text"):
        answers.exact(query(answer=reference), said("7"), {})


@pytest.mark.parametrize("reference", [True, "", " ", ["3", ""], ["3", True]])
def test_a_reference_that_is_not_mathematics_is_an_error(reference: object) -> None:
    with pytest.raises(answers.BadReferenceError, match="not a mathematical expression"):
        math(query(answer=reference), said("1"), {})


@pytest.mark.parametrize("reference", [["7", ""], "", ["", "7"]])
def test_a_reply_without_the_pattern_is_wrong_whatever_the_reference(reference: object) -> None:
    pattern = r"answer: (.*)"
    for reply in ("I do not know", ""):
        assert answers.exact(query(answer=reference), said(reply), {}, reply_pattern=pattern) == 0.0


@settings(max_examples=40)
@given(st.text(max_size=20), st.text(max_size=20))
def test_exact_is_equality_up_to_white_space(one: str, other: str) -> None:
    if "think>" in one:
        return
    plain = (normalize("NFC", " ".join(answers.plain_characters(t).split())) for t in (one, other))
    same = len(set(plain)) == 1
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


BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "whole"}, "type: 'whole'"),
    ({"properties": {"a": {"type": "whole"}}}, "properties.a.type: 'whole'"),
    # Nothing is fetched from the network.
    ({"$ref": "http://127.0.0.1:9/schema.json"}, "does not refer to a part"),
    ({"$ref": "#/$defs/none"}, "does not refer to a part"),
    ({"$ref": "#anchor"}, "does not refer to a part"),
    ({"items": {"anyOf": [{"$ref": "#/definitions/none"}]}}, "does not refer to a part"),
    ({"$schema": "https://json-schema.org/draft-07/schema"}, "is not a draft of JSON Schema"),
]


@pytest.mark.parametrize(("schema", "why"), BAD_SCHEMAS)
def test_a_schema_that_cannot_be_followed_is_an_error(schema: dict[str, Any], why: str) -> None:
    for shape in (schema, json.dumps(schema)):
        with pytest.raises(answers.BadReferenceError, match=why):
            answers.json_schema(query(shape=shape), said("{}"), {}, field="shape")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "3", '"3"'),
        (
            {
                "$id": "http://example.com/a",
                "$defs": {"n": {"$anchor": "n"}},
                "items": {"$ref": "#n"},
            },
            "[3]",
            "no",
        ),
        ({"items": {"$ref": "#"}, "type": "array"}, "[[], [[]]]", "[3]"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "const": 3}, "3.0", "4"),
        ({"format": "date"}, '"2024-01-05"', '"2024-13-05"'),
        ({"format": "email"}, '"a@example.com"', '"a"'),
        # It refers to itself without end.
        ({"items": {"$ref": "#/items"}}, "[]", "[3]"),
    ],
)
def test_references_within_a_schema_and_formats_are_followed(
    schema: dict[str, Any], right: str, wrong: str
) -> None:
    for reply, score in ((right, 1.0), (wrong, 0.0)):
        assert answers.json_schema(query(), said(reply), {}, json_schema=schema) == score


def test_a_schema_of_the_query_may_be_text_and_must_be_a_schema() -> None:
    task = query(shape='{"type": "integer"}')
    assert answers.json_schema(task, said("3"), {}, field="shape") == 1.0
    assert answers.json_schema(task, said("3.5"), {}, field="shape") == 0.0
    for shape in (None, [], "", "integer", 3, True, {"type": "whole"}, '{"type": "whole"}'):
        with pytest.raises(answers.BadReferenceError, match="'shape' of the query is"):
            answers.json_schema(query(shape=shape), said("3"), {}, field="shape")


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


def test_helper_files_of_tests_exist_and_are_not_run() -> None:
    """Data, helpers, a package, fixtures; a file of the solution's name is the reply's."""
    files = {
        "test_all.py": "from solution import f\nfrom helpers import two\n"
        "def test_a(four): assert f(two()) == four\n",
        "helpers.py": "import json\ndef two(): return json.load(open('data.json'))['two']\n"
        "def test_helper(): assert False\n",
        "data.json": '{"two": 2}',
        "README.md": "# Tests\n",
        "conftest.py": "import pytest\n@pytest.fixture\ndef four(): return 4\n",
        "package/__init__.py": "",
        "solution.py": "def f(n): ...\ndef test_stub(): assert False\n",
        "broken.py": "not Python (",
        "of_another_row.py": None,
    }
    right = said("```python\ndef f(n): return n * n\n```")
    wrong = said("```python\ndef f(n): return n\n\ndef test_own(): ...\n```")
    assert answers.passes_tests(query(tests=files), right, {}) == 1.0
    assert answers.passes_tests(query(tests=files), wrong, {}, partial=True) == 0.0


def test_tests_of_one_name_in_several_folders_are_all_run() -> None:
    test = (
        "from solution import f\nfrom {0}_helpers import N\ndef test_{0}(): assert f(N) == N * N\n"
    )
    files = {f"{one}/test_f.py": test.format(one) for one in "abc"}
    files |= {f"{one}/{one}_helpers.py": f"N = {n}\n" for n, one in enumerate("abc")}
    files |= {"c/__init__.py": "", "c/test_f.py": test.format("c").replace("from c_", "from .c_")}
    right = said("```python\ndef f(n): return n * n\n```")
    some = said("```python\ndef f(n): return n * n if n < 2 else 0\n```")
    assert answers.passes_tests(query(tests=files), right, {}) == 1.0
    assert answers.passes_tests(query(tests=files), some, {}) == 0.0
    assert answers.passes_tests(query(tests=files), some, {}, partial=True) == pytest.approx(2 / 3)


def test_tests_under_other_names_are_run_where_no_file_has_a_name_of_pytest() -> None:
    files = {"checks.py": "from solution import f\ndef test_a(): assert f(2) == 4\n", "a.txt": ""}
    assert answers.passes_tests(query(tests=files), said("def f(n): return n * n"), {}) == 1.0
    assert answers.passes_tests(query(tests=files), said("def f(n): return n"), {}) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        None,
        float("nan"),
        7,
        True,
        "",
        " \n",
        ["assert f(2) == 4"],
        {},
        {"test_a.py": None},
        {"test_a.py": ["def test_a(): ..."]},
        {"data.json": "{}"},
        {"conftest.py": "", "solution.py": "def test_a(): ..."},
        {"./solution.py": "def test_a(): ..."},
        "def test_a(:",
        "from solution import f\nassert f(2) == 4",
        "def check(f): assert f(2) == 4",
        {"test_a.py": "assert f(2) == "},
        {"../test_a.py": "def test_a(): ..."},
        {"test_a.py": "def test_a(): ...", "": "x"},
        {"test_a.py": "def test_a(): ...", "a": "x", "a/b": "x"},
        {"/tmp/test_a.py": "def test_a(): ..."},
        "async def test_a(): ...",
        "class TestA:\n    async def test_a(self): ...",
    ],
)
def test_tests_that_cannot_be_run_are_an_error(tests: object) -> None:
    with pytest.raises(answers.BadReferenceError, match="'tests' of the query is"):
        answers.passes_tests(query(tests=tests), said("def f(n): return n * n"), {})


@pytest.mark.parametrize(
    "tests",
    [
        "\ufefffrom solution import f\ndef test_a(): assert f(2) == 4",
        "import unittest\nfrom solution import f\nclass A(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_a(self): self.assertEqual(f(2), 4)",
    ],
)
def test_tests_may_begin_with_a_byte_order_mark_or_be_of_unittest(tests: str) -> None:
    assert answers.passes_tests(query(tests=tests), said("def f(n): return n * n"), {}) == 1.0
    assert answers.passes_tests(query(tests=tests), said("def f(n): return n"), {}) == 0.0


def test_a_file_that_cannot_be_imported_is_one_error_among_the_tests_of_others() -> None:
    files = {
        "test_a.py": "from solution import f\ndef test_a(): assert f(2) == 4",
        "test_b.py": "from solution import g\ndef test_b(): assert g(2) == 4",
    }
    for partial, score in ((True, 0.5), (False, 0.0)):
        reply = said("def f(n): return n * n")
        assert answers.passes_tests(query(tests=files), reply, {}, partial=partial) == score


def test_an_agent_that_said_nothing_gets_nothing() -> None:
    turns, task = said("4"), query(answer="", tests="def test_a(): assert False")
    other: dict[str, Any] = {"agent": "checker"}
    assert answers.exact(task, turns, {}, **other) == {"checker": 0.0}
    assert answers.regex(task, turns, {}, **other, pattern=".*") == {"checker": 0.0}
    assert answers.length(task, turns, {}, **other, most=9, unit="words") == {"checker": 0.0}
    assert answers.length(task, turns, {}, **other, most=9) == {"checker": 0.0}
    assert answers.json_schema(task, turns, {}, **other, json_schema={}) == {"checker": 0.0}
    assert answers.tags(task, turns, {}, **other, tags=["a"]) == {"checker": 0.0}
    assert math(query(answer="4"), turns, {}, **other) == {"checker": 0.0}


def test_the_agent_that_is_named_is_scored_and_rewarded_alone() -> None:
    turns = [*said("4"), *said("wrong", agent="checker")]
    task = query(answer="4")
    assert answers.exact(task, turns, {}) == 0.0
    assert answers.exact(task, turns, {}, agent="solver", weight=0.5) == {"solver": 0.5}


@pytest.mark.parametrize("name", READY)
def test_arguments_of_a_ready_reward_match_its_function(name: str) -> None:
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


JUDGED = {"base_url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"ready": "maths"}, "math"),
        ({"ready": "math", "entrypoint": "a:b"}, "exactly one of"),
        ({"ready": "math", "arguments": {"anser": "x"}}, "`anser` there is no such"),
        ({"ready": "math", "arguments": {"answer_pattern": "("}}, "not a regular expression"),
        ({"ready": "math", "arguments": {"digits": 99}}, "`digits`"),
        ({"ready": "math", "arguments": {"agent": "nobody"}}, "'nobody' is not an agent"),
        ({"ready": "regex"}, "`pattern` is missing"),
        ({"ready": "regex", "arguments": {"pattern": "[a"}}, "not a regular expression"),
        ({"ready": "json_schema"}, "exactly one of `json_schema` and `field`"),
        (
            {"ready": "json_schema", "arguments": {"json_schema": {"type": "whole"}}},
            "json_schema: type: 'whole'",
        ),
        ({"ready": "format", "arguments": {"tags": []}}, "`tags`"),
        ({"ready": "format", "arguments": {"tags": ["<think>"]}}, "not a tag name"),
        ({"ready": "length", "arguments": {"most": 3, "least": 4}}, "more than `most`"),
        ({"ready": "tests", "arguments": {"seconds": 0}}, "`seconds`"),
        ({"ready": "judge", "arguments": {"model": "m"}}, "`base_url` is missing"),
        *(
            ({"ready": "judge", "arguments": {"model": "m", **own}}, said)
            for own, said in (
                ({"base_url": "api.example.com/v1"}, "`base_url`"),
                ({"base_url": "ftp://a/v1"}, "`base_url`"),
                (JUDGED | {"prompt": "Judge $reply"}, "not a template of .task"),
                (JUDGED | {"prompt": "It costs $5: $answer"}, "not a template of .task"),
                (JUDGED | {"prompt": "Judge $task"}, "neither .answer nor"),
            )
        ),
        *(
            ({"ready": "tests", "arguments": {"file": file}}, "`file`")
            for file in (
                *("/tmp/a.py", "../a.py", "a/../../b.py", "solution", "a.txt"),
                *("test_solution.py", "a/b_test.py", "conftest.py"),
            )
        ),
        *(
            ({"ready": "json_schema", "arguments": {"json_schema": schema}}, said)
            for schema, said in BAD_SCHEMAS
        ),
    ],
)
def test_bad_arguments_are_refused_at_submit(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(JobSpecError, match=said) as refused:
        parse_job(job_yaml(rewards={"right": reward}))
    assert refused.value.problems[0].field.startswith("rewards.right")


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("math", {"boxed": "false", "weight": "1e-3"}, {"boxed": False, "weight": 0.001}),
        ("math", {"digits": 6.0}, {"digits": 6}),
        ("tests", {"partial": "no"}, {"partial": False}),
        ("exact", {"ignore_case": 1}, {"ignore_case": True}),
        ("reward_model", {"model": "~/m"}, {"model": str(Path("~/m").expanduser())}),
    ],
)
def test_a_ready_reward_gets_arguments_of_the_types_that_it_takes(
    name: str, given: dict[str, Any], taken: dict[str, Any]
) -> None:
    job = parse_job(job_yaml(rewards={"right": {"ready": name, "arguments": given}}))
    found = job.rewards["right"].arguments
    assert json.dumps(found, sort_keys=True) == json.dumps(taken, sort_keys=True)


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
