"""The values of sampling parameters, which jobs, workflows and clients of an endpoint share.

A job checks them by its schema (`troupe.job.sections.agents.SamplingSpec`), a workflow's turn and a
request by `READERS`. Both use the bounds below, and both convert other servers' spellings to the
spelling of engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import index as as_int
from typing import Any, Final

MAX_TEMPERATURE: Final = 1000
MAX_INT: Final = 2**31 - 1
"""Largest integer of the contracts."""
ALL_TOKENS: Final = -1
"""`top_k` that keeps all tokens."""
_GREEDY_BELOW: Final = 1e-5


def engine_temperature(temperature: float) -> float:
    """Return 0 (greedy) if engines cannot divide logits by the temperature, else the temperature.

    vLLM samples greedily below 1e-5, SGLang below 1e-6. Log-probs of a greedy response are reported
    at temperature 1; divided by 1e-30 they would be infinite.
    """
    return 0.0 if temperature < _GREEDY_BELOW else temperature


def engine_top_k(top_k: int) -> int:
    """Return -1 for 0, which means all tokens in vLLM and transformers, else `top_k`."""
    return top_k or ALL_TOKENS


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if isinstance(value, bool | str) or not math.isfinite(value) or not least <= value <= most:
            raise ValueError
        return float(value)

    return read


def _whole(least: int, most: int = MAX_INT) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = as_int(value)
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError
        return number

    return read


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    # An empty stop string would occur in every response.
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError
    return strings


_temperature = _number(0, MAX_TEMPERATURE)
_top_k = _whole(ALL_TOKENS)
# The range of seeds and token ids that every engine accepts.
_natural = _whole(0)

READERS: Final[Mapping[str, tuple[Callable[[Any], Any], str]]] = {
    "temperature": (
        lambda v: engine_temperature(_temperature(v)),
        f"a number from 0 to {MAX_TEMPERATURE}",
    ),
    "top_p": (_number(math.ulp(0.0), 1), "0 < top_p <= 1"),  # 0 would keep no token.
    "top_k": (lambda v: engine_top_k(_top_k(v)), "a whole number >= 1, or -1 or 0 for all"),
    "max_new_tokens": (_whole(1), "a whole number >= 1"),
    "stop_token_ids": (lambda v: tuple(map(_natural, v)), "a list of token ids"),
    "stop_strings": (_strings, "a text, or a list of texts that are not empty"),
    "seed": (lambda v: v if v is None else _natural(v), "0 <= seed < 2**31"),
}
"""For each parameter: reads a value (raises `TypeError`, `ValueError` or `OverflowError`), and what
a value must be."""
