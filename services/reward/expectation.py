"""How long a call is expected to take with the fewest cores: by its function's declaration, by its
caller, and by the calls before it that it is like.

A declared estimate is a user's elasticity profile (ARL-Tangram, section 3): a figure for every call
(`expected_seconds`), or one that grows with the arguments (`seconds_per`). It need not be exact,
nor of this machine: what calls took for each declared second is learned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sized
from typing import Any, Final

from services.reward.call import Call
from services.reward.function import Function
from troupe.scheduling.elastic import Discipline, SpeedUp
from troupe.v1 import reward_pb2 as pb

# Less is declared of no call: what it took is counted in multiples of that.
_LEAST_SECONDS: Final = 1e-6


def expect(function: Function, call: Call, discipline: Discipline) -> None:
    """Set what `call` is expected to take, unless its caller has said so, and what calls like it
    say of that."""
    if not call.expected_seconds and function.spec.seconds_per:
        call.expected_seconds = declared_seconds(function.spec, call.arguments_json)
    if call.expected_seconds:
        # Whoever said so: it takes no longer than it may.
        most = min(call.expected_seconds, function.spec.timeout_seconds)
        call.expected_seconds = max(_LEAST_SECONDS, most)
    seconds = discipline.expected(
        function.key, call.kin, function.seconds, declared=call.expected_seconds
    )
    # What is as the others are stays so when more is known of them.
    call.estimated_seconds = seconds if seconds != function.seconds else 0.0


def learn(
    function: Function, call: Call, seconds: float, cores: int, discipline: Discipline
) -> SpeedUp:
    """A call took `seconds` with so many `cores`; returns the function's curve with it."""
    lowest = max(1, function.cores)
    alone, given = function.curve.seconds((lowest, cores))
    took = seconds * alone / given
    discipline.took(function.key, call.kin, took, declared=call.expected_seconds)
    return function.curve.observed(cores, seconds)


def declared_seconds(spec: pb.FunctionSpec, arguments_json: str) -> float:
    """What the function declares of a call with these arguments: no more than it may take.

    An argument that is not there, or has no size, adds nothing, nor does one of 0 s for each.
    """
    try:
        arguments = json.loads(arguments_json or "{}")
    except (ValueError, RecursionError):  # its worker says what is wrong with them
        return spec.expected_seconds
    # A size may be infinite, and 0 times that is no number.
    more = sum(each * _size(arguments, path) for path, each in spec.seconds_per.items() if each)
    return min(spec.expected_seconds + more, spec.timeout_seconds)


def _size(arguments: Any, path: str) -> float:
    """A number itself, else how many items or characters there are."""
    value = arguments
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # whole numbers have no bound in JSON
            return math.inf if value > 0 else 0.0
        return 0.0 if math.isnan(number) else max(0.0, number)
    return float(len(value)) if isinstance(value, Sized) else 0.0
