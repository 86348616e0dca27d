"""The ready reward `math`: whether a reply's final answer equals the reference, by math-verify.

It compares expressions, not texts: 0.5, 1/2 and \\frac{1}{2} are equal, and so are sets in any
order. Needs `pip install "troupe[scoring]"` where the reward service runs.
"""

from __future__ import annotations

import math as floats
import re
import threading
from collections.abc import Iterable
from typing import Any, Final

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Expr, MatrixBase, Tuple, preorder_traversal

from troupe.functions.declaration import reward
from troupe.functions.library.answers import (
    BadReferenceError,
    plain_characters,
    read_number,
    references,
    rewarded,
    spoken,
    written,
)

# Seconds for parsing one text, and for one comparison: sympy may take for ever.
_SECONDS: Final = 5
# Significant digits to which math-verify computes, by default.
_PRECISION: Final = 15
# Texts with one of these are LaTeX that math-verify finds by itself.
_MARKED: Final = ("$", "\\(", "\\[", "\\boxed")
_BOXED: Final = "\\boxed"
# Numbers with an exponent, which math-verify takes for a multiple of Euler's number, or cuts off at
# the `e`. In LaTeX `2e-1` is one, and only `2e-01`, as programs write it, has an exponent.
_EXPONENT: Final = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?![\w^]|\.\d)")
_PROGRAM_EXPONENT: Final = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?[eE][-+]\d{2,3}(?![\w^]|\.\d)")
# Decimals beyond which a double is 0.
_MOST_DECIMALS: Final = 330


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
    """1 where the final answer of the reply equals the query's.

    `answer_pattern` cuts the reference out of the field. `boxed`: only an answer in a box counts.
    What takes too long to parse or to compare is wrong. Raises ValueError for a reference that is
    no mathematics.
    """
    seconds = _seconds()
    said = _with_decimals(spoken(turns, agent) or "")
    if boxed and _BOXED not in said:
        return rewarded(0.0, agent, weight)
    # A box that is there comes before anything else that looks like an answer.
    latex = LatexExtractionConfig(boxed_match_priority=0)
    reply = parse(
        said,
        extraction_config=[latex] if boxed else [latex, ExprExtractionConfig()],
        parsing_timeout=seconds,
    )
    right = False
    for reference in references(query, answer, answer_pattern):
        one = _with_decimals(written(reference), _PROGRAM_EXPONENT)
        text = one if any(mark in one for mark in _MARKED) else f"${one}$"
        gold = parse(text, parsing_timeout=seconds) or parse(one, parsing_timeout=seconds)
        if not gold or isinstance(reference, bool):
            remedy = "Give the query a number, an expression or LaTeX, or use `exact`."
            raise BadReferenceError(answer, one, "it is no mathematics", remedy)
        zeros = _leading_zeros([*gold, *reply], seconds)
        right = right or verify(
            gold,
            reply,
            float_rounding=digits + zeros,
            numeric_precision=_PRECISION + zeros,
            timeout_seconds=seconds,
        )
    return rewarded(float(right), agent, weight)


def _with_decimals(text: str, pattern: re.Pattern[str] | None = None) -> str:
    """`text` in ASCII digits, with decimals in place of numbers with an exponent."""
    text = plain_characters(text)
    if pattern is None:
        latex = any(mark in text for mark in _MARKED)
        pattern = _PROGRAM_EXPONENT if latex else _EXPONENT
    return pattern.sub(lambda found: f"{read_number(found[0]):f}", text)


def _leading_zeros(expressions: Iterable[Any], seconds: int | None) -> int:
    """How many zeros follow the decimal point of the smallest number in `expressions`; rounding
    that ignores them would make small numbers equal."""

    def count() -> int:
        most = 0
        for expression in expressions:
            if isinstance(expression, str):
                continue
            matrix = isinstance(expression, MatrixBase)
            parts = preorder_traversal(Tuple(*expression.flat()) if matrix else expression)
            for part in parts:
                if isinstance(part, Expr) and part.is_number:
                    parts.skip()
                    size = abs(part.doit().evalf(2))
                    if size.is_Float and 0 < size < 1:
                        most = max(most, -floats.floor(floats.log10(size)) - 1)
        return min(most, _MOST_DECIMALS)

    try:
        return int(timeout(seconds)(count)())
    except (Exception, TimeoutException):  # sympy raises errors of many kinds
        return 0


def _seconds() -> int | None:
    """The limit of one operation; None in other threads than the main one, where there is no alarm
    and the call's own time limit ends it."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
