"""The ready reward `math`: whether a reply's final answer equals the reference, by math-verify.

It compares expressions, not texts: 0.5, 1/2 and \\frac{1}{2} are equal, and so are sets in any
order. Needs `pip install "troupe[scoring]"` where the reward service runs.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from troupe.functions.declaration import reward
from troupe.functions.library.answers import references, rewarded, spoken

# Seconds for parsing one text, and for one comparison: sympy may take for ever.
_SECONDS: Final = 5
# Texts with one of these are LaTeX that math-verify finds by itself.
_MARKED: Final = ("$", "\\(", "\\[", "\\boxed")
_BOXED: Final = "\\boxed"


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
    said = spoken(turns, agent)
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
    for one in references(query, answer, answer_pattern):
        text = one if any(mark in one for mark in _MARKED) else f"${one}$"
        gold = parse(text, parsing_timeout=seconds) or parse(one, parsing_timeout=seconds)
        if not gold:
            raise ValueError(f"the reference {one[:200]!r} of {answer!r} is no mathematics")
        right = right or verify(gold, reply, float_rounding=digits, timeout_seconds=seconds)
    return rewarded(float(right), agent, weight)


def _seconds() -> int | None:
    """The limit of one operation; None in other threads than the main one, where there is no alarm
    and the call's own time limit ends it."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None
