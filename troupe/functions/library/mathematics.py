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
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, TypeVar

from troupe.functions.declaration import reward
from troupe.functions.library.answers import (
    BadReferenceError,
    cut,
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
    from sympy import Expr, MatrixBase, Tuple, preorder_traversal
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
# Numbers with an exponent, which math-verify reads as multiples of Euler's number, or cuts off at
# the `e`; and the ones that can only be numbers, in the notation of programs: `2e-01`.
_EXPONENT, _PROGRAM_EXPONENT = (
    re.compile(rf"(?<![\w.])-?\d+(?:\.\d+)?[eE]{exponent}(?![\w^]|\.\d)")
    for exponent in (r"[-+]?\d{1,3}", r"[-+]\d{2,3}")
)
# Words and line breaks, which a bare expression lacks; words in commands (`\pi`, `\text{cm}`) do
# not count.
_PROSE: Final = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}|\n")
# In prose, a power that is not marked as LaTeX.
_POWER: Final = re.compile(r"[^\s$]*\^[^\s$]*[^\s$.,;:!?]")
# Emphasis in Markdown, currencies, and punctuation around an expression.
_AROUND: Final = "*_` \u20ac\u00a3\u00a5:;,?"
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
    only the last of these counts. `boxed`: only an answer in a box counts. An answer that takes too
    long to parse or to compare is wrong. Raises `BadReferenceError`.
    """
    said = spoken(turns, agent) or ""
    said = cut(said, _ANSWER) or said
    if boxed and _BOXED not in said:
        return rewarded(0.0, agent, weight)
    # A box takes precedence over anything else that looks like an answer.
    latex = LatexExtractionConfig(boxed_match_priority=0)
    targets = [latex] if boxed else [latex, ExprExtractionConfig()]
    reply = [
        found for text in _readings(said) for found in _parsed(text, extraction_config=targets)
    ]
    right = False
    for reference in references(query, answer, answer_pattern):
        one = _in_decimals(plain_characters(written(reference)), _PROGRAM_EXPONENT)
        text = one if _is_latex(one) else f"${one}$"
        gold = _parsed(text) or _parsed(one)
        if not gold or isinstance(reference, bool):
            remedy = "Give the query a number, an expression or LaTeX, or use `exact`."
            raise BadReferenceError(
                answer, reference, "it is not a mathematical expression", remedy
            )
        right = right or _equal(gold, reply, digits)
    return rewarded(float(right), agent, weight)


def _is_latex(text: str) -> bool:
    return any(mark in text for mark in _MARKED)


def _readings(text: str) -> list[str]:
    """Return the possible readings of a reply: in LaTeX, `2e-1` is a number or a multiple of
    Euler's."""
    plain = plain_characters(text).strip()
    decimal = _in_decimals(plain, _EXPONENT)
    if _is_latex(plain):
        return list(dict.fromkeys([decimal, plain]))
    # In an expression that is not marked as LaTeX, math-verify would read only the first number.
    end = _PROSE.split(decimal)[-1].strip(_AROUND).rstrip(_AROUND + ".")
    number = read_number(end)
    expression = f"${end if number is None else format(number, 'f')}$"
    if not _PROSE.search(plain):
        return [expression]
    powers = _POWER.sub(lambda found: f"${found[0]}$", decimal)
    return [powers, expression] if end and number is None else [powers]


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

    def compared() -> bool:
        return bool(
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
