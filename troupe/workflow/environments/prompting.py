"""What a seat is told: the conversation of one player with the game."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from troupe.workflow.environments.errors import IllegalMoveError
from troupe.workflow.environments.interface import Observation, Properties
from troupe.workflow.environments.moves import legal_help
from troupe.workflow.reply import Reply

Line: TypeAlias = dict[str, str] | Reply

History = Literal["all", "latest"]
"""What a seat remembers: `all`: every observation and reply so far (token ids are reused).
`latest`: the newest observation alone, for games that show all that matters, and small contexts."""

Prompt = Callable[[Properties, str, Observation, bool], str]
"""(properties, seat, observation, first) -> text; `first`: nothing was told to this seat yet."""


def prompt(properties: Properties, seat: str, seen: Observation, first: bool) -> str:
    """The rules if nothing was told yet, what the seat sees, its legal moves."""
    parts = (properties.rules if first else "", seen.text, legal_help(seen))
    return "\n\n".join(part.strip() for part in parts if part.strip())


def correction(error: IllegalMoveError, seen: Observation) -> str:
    """What is said after an illegal move."""
    return f"That is no legal move. {legal_help(seen) or error.remedy or 'Try another.'}".strip()


class SeatTalk:
    """One seat's conversation in one episode."""

    def __init__(
        self, properties: Properties, seat: str, make_prompt: Prompt, history: History
    ) -> None:
        self._properties = properties
        self._seat = seat
        self._make_prompt = make_prompt
        self._history = history
        self._lines: list[Line] = []

    def observe(self, seen: Observation) -> None:
        """The seat's turn has come."""
        if self._history == "latest":
            self._lines = []
        text = self._make_prompt(self._properties, self._seat, seen, not self._lines)
        self._lines.append({"role": "user", "content": text})

    def answer(self, reply: Reply) -> None:
        """What the seat said, which stays in its conversation as it was generated."""
        self._lines.append(reply)

    def correct(self, error: IllegalMoveError, seen: Observation) -> None:
        """The seat's answer was no legal move."""
        self._lines.append({"role": "user", "content": correction(error, seen)})

    @property
    def lines(self) -> list[Line]:
        """The messages to continue from."""
        return list(self._lines)
