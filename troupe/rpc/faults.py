"""Injected network faults: clients that send calls twice or late.

Off unless `TROUPE_FAULTS` is set, as tests and `troupe chaos` do:

    TROUPE_FAULTS="duplicate=0.05,delay=0.1:0.2,seed=7"

sends one in twenty mutating calls a second time under its request id, and one in ten of all unary
calls up to 0.2 s late. No result may change because of it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from troupe.rpc.errors import InvalidArgument

VARIABLE: Final = "TROUPE_FAULTS"
_REMEDY: Final = f'Write for example {VARIABLE}="duplicate=0.05,delay=0.1:0.2,seed=7".'


class Twice(Enum):
    """How a call is sent a second time."""

    NO = "no"
    AFTER = "after"
    """After the first has been answered; the caller gets the second answer."""
    TOGETHER = "together"
    """Concurrently; the caller gets the first answer."""


@dataclass(frozen=True)
class FaultSettings:
    """Probabilities of faults per call."""

    duplicate: float = 0.0
    delay: float = 0.0
    # Upper bound of the delay of a late call.
    delay_seconds: float = 0.0
    seed: int = 0

    @staticmethod
    def parse(text: str) -> FaultSettings:
        """Parse `duplicate=P,delay=P:SECONDS,seed=N`, in any order.

        Raises `InvalidArgument` with the wrong part.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            try:
                if name == "duplicate":
                    values["duplicate"] = _bounded(value, 1, "a probability")
                elif name == "delay":
                    chance, _, seconds = value.partition(":")
                    values["delay"] = _bounded(chance, 1, "a probability")
                    values["delay_seconds"] = _bounded(seconds, 60, "a number of seconds")
                elif name == "seed":
                    values["seed"] = int(value)
                else:
                    raise ValueError("is not known")
            except ValueError as error:
                raise InvalidArgument(
                    f"'{part}': {error}.", field=VARIABLE, value=text, remedy=_REMEDY
                ) from None
        return FaultSettings(**values)

    def text(self) -> str:
        """The settings as text for `parse`."""
        return (
            f"duplicate={self.duplicate:g},delay={self.delay:g}:{self.delay_seconds:g},"
            f"seed={self.seed}"
        )


class Faults:
    """Draws the faults of each call of one channel."""

    def __init__(self, settings: FaultSettings, address: str) -> None:
        """Draws depend on the seed, on `address` and on the order of calls."""
        self._settings = settings
        self._random = random.Random(f"{settings.seed}/{address}")

    def pause(self) -> float:
        """Delay of the next call in seconds; 0 for most calls."""
        settings = self._settings
        if self._random.random() >= settings.delay:
            return 0.0
        return self._random.uniform(0.0, settings.delay_seconds)

    def twice(self, request: Any) -> Twice:
        """Whether and how `request`, if it is mutating, is sent a second time."""
        if not getattr(request, "request_id", ""):
            return Twice.NO
        if self._random.random() >= self._settings.duplicate:
            return Twice.NO
        return self._random.choice((Twice.AFTER, Twice.TOGETHER))


def faults_of(address: str) -> Faults | None:
    """The faults of a new channel to `address`; None unless `TROUPE_FAULTS` asks for some."""
    text = os.environ.get(VARIABLE)
    return Faults(FaultSettings.parse(text), address) if text else None


def _bounded(text: str, most: int, what: str) -> float:
    value = float(text)
    if not 0 <= value <= most:
        raise ValueError(f"is not {what} from 0 to {most}")
    return value
