"""The predefined reward `math`: whether a reply's final answer equals the reference, by
math-verify.

It compares expressions, not texts: 0.5, 1/2 and \\frac{1}{2} are equal, and so are sets in any
order. The reward service's hosts need `pip install "troupe-rl[scoring]"`.
"""

from __future__ import annotations

import logging
import math as floats
import re
import signal
import threading
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from itertools import product, starmap
from typing import Any, Final, TypeVar

from troupe.functions.declaration import reward
from troupe.functions.library.answers import (
    THOUSANDS,
    BadReferenceError,
    cut,
    folded,
    plain_characters,
    read_number,
    references,
    rewarded,
    spoken,
    written,
)

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from sympy import Expr, Float, Integer, MatrixBase, Tuple, preorder_traversal
except ImportError as error:
    raise ImportError(
        f'{error}: `pip install "troupe-rl[scoring]"` where the reward service runs'
    ) from error

_T = TypeVar("_T")
# The limit on parsing one text, and on one comparison, in CPU seconds: sympy may take forever, and
# on a busy host a right answer may take as long as a wrong one elsewhere.
_SECONDS: Final = 5.0
# Default number of significant digits of math-verify.
_PRECISION: Final = 15
# Texts with one of these contain LaTeX that math-verify finds itself.
_MARKED: Final = ("$", "\\(", "\\[", "\\boxed")
_BOXED: Final = "\\boxed"
_ANSWER: Final = r"(?s)<answer>(.*?)</answer>"
# Between boxes that are one answer: `\boxed{1}$ and $\boxed{2}`.
_LISTED: Final = re.compile(
    r"(?:[\s$]|\\[()\[\]])*(?:[,;]|[,;]?\s*(?:and|or))(?:[\s$]|\\[()\[\]])*"
)
# Numbers with an exponent, which math-verify reads as multiples of Euler's number, or cuts off at
# the `e`; and the ones that can only be numbers: not `2e-1`, but `2e-01`, `2E-1`, `2e5`, `2.5e-1`
# and `1e-1`.
_EXPONENT, _PROGRAM_EXPONENT = (
    re.compile(rf"(?<![\w.])-?(?:{number})(?![\w^]|\.\d)")
    for number in (
        r"\d+(?:\.\d+)?[eE][-+]?\d{1,3}",
        r"\d+(?:\.\d+)?(?:E[-+]?\d{1,3}|e\d{1,3}|e[-+]\d{2,3})|(?:\d+\.\d+|1)e[-+]\d",
    )
)
# Currencies, raised digits, spaces of LaTeX between digits, mixed numbers, repeating decimals.
_CURRENCY: Final = re.compile("\\\\\\$|[\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd]")
_RAISED: Final = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_SPACED: Final = re.compile(r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))")
_MIXED: Final = re.compile(r"(?<![\d.,/^_])(\d+) +(\d+)/(\d+)(?![\d/]|\.\d)")
# A mixed number in LaTeX.
_SUM: Final = r"\1\\frac{\2}{\3}"
_REPEATING: Final = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}")
# Words and line breaks, which a bare expression lacks; words in commands (`\pi`, `\text{cm}`) do
# not count. Letters of most scripts other than Greek are words.
_FOREIGN: Final = "[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0400-\u1fff\u3040-\ud7ff]+"
_PROSE: Final = re.compile(rf"(?<![\\A-Za-z{{])[A-Za-z]{{2,}}|{_FOREIGN}|\n")
# In prose, a power that is not marked as LaTeX.
_POWER: Final = re.compile(r"[^\s$]*\^[^\s$]*[^\s$.,;:!?]")
# Emphasis in Markdown, and punctuation around an expression.
_AROUND: Final = "*_` :;,?\u2248\u3001\u3002"
# No double other than 0 has more zeros.
_MOST_ZEROS: Final = 330


# It warns of its own limits, which are left out.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@reward(timeout_seconds=60, memory_mib=1024)
def math(
    query: dict[str, Any],
    turns: list[dict[str, Any]],
    rewards: dict[str, float],
    *,
    answer: str = "answer",
    answer_pattern: str = "",
    boxed: bool = False,
    digits: int = 6,
    agent: str = "",
    weight: float = 1.0,
) -> float | dict[str, float]:
    """Return 1 if the final answer of the reply equals the query's, else 0.

    `answer_pattern` extracts the reference from the field. In a reply with `<answer>...</answer>`,
    only the last of these counts, and of several boxes only the last, or the last ones that are
    joined by commas, semicolons, `and` or `or`. `boxed`: only an answer in a box counts. An answer
    that takes too long to parse or to compare is wrong. Raises `BadReferenceError`.
    """
    said = spoken(turns, agent) or ""
    said = cut(said, _ANSWER) or said
    if boxed and _BOXED not in said:
        return rewarded(0.0, agent, weight)
    boxes = _last_boxes(said)
    said = ", ".join(boxes) or said
    # A box takes precedence over anything else that looks like an answer.
    latex = LatexExtractionConfig(boxed_match_priority=0)
    targets = [latex] if boxed else [latex, ExprExtractionConfig()]
    reply = [
        found for text in _readings(said) for found in _parsed(text, extraction_config=targets)
    ]
    words = _inside(boxes[0]) if len(boxes) == 1 else said
    right = False
    for reference in references(query, answer, answer_pattern):
        wanted = written(reference)
        one = _reference(wanted)
        text = one if _is_latex(one) else f"${one}$"
        gold = _parsed(text) or _parsed(one)
        if not gold or isinstance(reference, bool):
            remedy = "Give the query a number, an expression or LaTeX, or use `exact`."
            raise BadReferenceError(
                answer, reference, "it is not a mathematical expression", remedy
            )
        right = right or folded(words) == folded(wanted) or _equal(gold, reply, digits)
    return rewarded(float(right), agent, weight)


def _last_boxes(text: str) -> list[str]:
    """Return the last box of a reply, after the boxes that are listed with it."""
    boxes: list[tuple[int, int]] = []
    end = 0
    while (begin := text.find(_BOXED, end)) >= 0:
        end = _end_of_box(text, begin + len(_BOXED))
        boxes.append((begin, end))
    found = boxes[-1:]
    for begin, end in reversed(boxes[:-1]):
        if not _LISTED.fullmatch(text[end : found[0][0]]):
            break
        found.insert(0, (begin, end))
    return [_box_with_number(text[begin:end]) for begin, end in found]


def _box_with_number(box: str) -> str:
    """Return the box with its number, if it has one, without separators of thousands."""
    number = read_number(_inside(box))
    return box if number is None else f"{_BOXED}{{{number:f}}}"


def _inside(box: str) -> str:
    """Return the content of a box with braces; "" for any other."""
    content = box[len(_BOXED) :].strip()
    return content[1:-1] if content.startswith("{") and content.endswith("}") else ""


def _end_of_box(text: str, begin: int) -> int:
    """Return the offset behind the braces that open at `begin`; the end of the text if they do not
    open or close."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[begin:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth <= 0 and brace[0] == "}":
            return begin + brace.end()
    return len(text)


def _reference(text: str) -> str:
    """Return a reference in a form that math-verify reads."""
    text = _in_decimals(_plain(text), _PROGRAM_EXPONENT)
    if not any(bracket in text for bracket in "([{\\"):  # not a pair
        text = THOUSANDS.sub(lambda found: re.sub(r"[,\s]", "", found[0]), text)
    return _MIXED.sub(_SUM, text)


def _plain(text: str) -> str:
    """Return a text without currencies and other ways of writing that math-verify does not read."""
    text = _CURRENCY.sub("", plain_characters(text)).replace("\\varnothing", "\\emptyset")
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    return _REPEATING.sub(_as_fraction, _SPACED.sub("", text))


def _as_fraction(repeating: re.Match[str]) -> str:
    whole, first, period = repeating.groups()
    number = int(whole + first + period) - int(whole + first or "0")
    return rf"\frac{{{number}}}{{{'9' * len(period)}{'0' * len(first)}}}"


def _is_latex(text: str) -> bool:
    return any(mark in text for mark in _MARKED)


def _readings(text: str) -> list[str]:
    """Return the possible readings of a reply: in LaTeX, `2e-1` is a number or a multiple of
    Euler's."""
    plain = _plain(text).strip()
    decimal = _in_decimals(plain, _EXPONENT)
    if _is_latex(plain):
        return list(dict.fromkeys(_MIXED.sub(_SUM, one) for one in (decimal, plain)))
    # In an expression that is not marked as LaTeX, math-verify would read only the first number.
    end = _PROSE.split(decimal)[-1].strip(_AROUND).rstrip(_AROUND + ".")
    number = read_number(end)
    end = _MIXED.sub(_SUM, end)
    expression = f"${end if number is None else format(number, 'f')}$"
    if not _PROSE.search(plain):
        return [expression]
    words = re.sub(_FOREIGN, " ", decimal)
    powers = _POWER.sub(lambda found: f"${found[0]}$", words)
    powers = _MIXED.sub(f"${_SUM}$", powers)
    # math-verify does not find a number directly behind other scripts.
    also = end and (number is None or words != decimal)
    return [powers, expression] if also else [powers]


def _in_decimals(text: str, numbers: re.Pattern[str]) -> str:
    """Return `text` with its `numbers`, which have exponents, written without exponents."""
    return numbers.sub(lambda found: f"{Decimal(found[0]):f}", text)


def _parsed(text: str, **options: Any) -> list[Any]:
    """Return the expressions in a text; none if that takes too long."""
    found: list[Any] = _limited(lambda: parse(text, parsing_timeout=None, **options), [])
    return found


def _equal(gold: list[Any], reply: list[Any], digits: int) -> bool:
    """Return whether math-verify considers one of `gold` and one of `reply` equal.

    It rounds to a number of decimals, and would round small numbers to 0, so the decimals are
    increased by the number of zeros after the decimal point of the smallest number.
    """

    def count_zeros() -> int:
        most = 0
        for expression in (one for one in (*gold, *reply) if not isinstance(one, str)):
            matrix = isinstance(expression, MatrixBase)
            parts = preorder_traversal(Tuple(*expression.flat()) if matrix else expression)
            for part in parts:
                if isinstance(part, Expr) and part.is_number:
                    parts.skip()
                    size = abs(part.doit().evalf(2))
                    if size.is_Float and 0 < size < 1:
                        most = max(most, -floats.floor(floats.log10(size)) - 1)
        return min(most, _MOST_ZEROS)

    try:
        zeros = _limited(count_zeros, 0)
    except Exception:  # sympy raises errors of many kinds
        zeros = 0

    def close(one: Any, other: Any) -> bool:
        """Return whether an integer and a decimal agree, which sympy considers unequal."""
        try:
            pair = [
                part.doit() for part in (one, other) if isinstance(part, Expr) and part.is_number
            ]
            kinds = sorted(isinstance(n, Float) + 2 * isinstance(n, Integer) for n in pair)
            if kinds != [1, 2]:
                return False
            most = max(0.5 * 10.0 ** -(digits + zeros), abs(pair[0]) * 10.0 ** (1 - _PRECISION))
            return bool(abs(pair[0] - pair[1]) < most)
        except TimeoutException:
            raise
        except Exception:  # sympy raises errors of many kinds
            return False

    def compared() -> bool:
        return any(starmap(close, product(gold, reply))) or bool(
            verify(
                gold,
                reply,
                float_rounding=digits + zeros,
                numeric_precision=_PRECISION + zeros,
                timeout_seconds=None,
            )
        )

    return _limited(compared, False)


def _limited(function: Callable[[], _T], otherwise: _T) -> _T:
    """Return the result of `function`, in which each operation of math-verify is ended after
    `_SECONDS` of CPU time; `otherwise` if it ends by that.

    Outside the main thread there is no such signal, and the call's own time limit applies.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()

    def end(number: int, frame: object) -> None:
        raise TimeoutException

    former = signal.signal(signal.SIGVTALRM, end)
    try:
        # Again and again: math-verify goes on with the next comparison.
        signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, _SECONDS)
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeoutException:
        return otherwise
    finally:
        signal.signal(signal.SIGVTALRM, former)
