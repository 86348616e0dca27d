"""From what a player wrote to the move that it means, and the help that tells what it may write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from troupe.workflow.environments.errors import IllegalMoveError
from troupe.workflow.environments.interface import Action, Observation

ReadMove = Callable[[str, Observation, str], Action]
"""(text, observation, seat) -> action. Raises `IllegalMoveError`."""

# More moves than this fill the context and help nobody.
_SHOWN_MOVES = 64


def read_move(text: str, seen: Observation, seat: str = "") -> Action:
    """The legal move that `text` names; where the game lists none, the trimmed text itself.

    The whole text, else the last [bracketed] part, else the move that is named last: players who
    think aloud name several before they decide. Upper and lower case are the same. Raises
    `IllegalMoveError` when no legal move is found.
    """
    if seen.legal is None:
        return text.strip()
    moves = {_folded(label): action for label, action in seen.legal.items()}
    # Labels that differ in case only can still be written as they are.
    exact = {label.strip(): action for label, action in seen.legal.items()}
    bracketed = re.findall(r"\[([^\[\]]+)\]", text)
    for candidate in [text, *reversed(bracketed[-1:])]:
        if candidate.strip() in exact:
            return exact[candidate.strip()]
        if _folded(candidate) in moves:
            return moves[_folded(candidate)]
    named = _named_last(_folded(text), moves)
    if named is not None:
        return moves[named]
    raise IllegalMoveError(
        f"no legal move of '{seat}' is named in {text[:80]!r}",
        seat=seat,
        value=text,
        remedy=legal_help(seen),
    )


def legal_help(seen: Observation) -> str:
    """The legal moves in a line, or nothing when any text is one."""
    if seen.legal is None:
        return ""
    labels = list(seen.legal)
    more = len(labels) - _SHOWN_MOVES
    return f"Legal moves: {', '.join(labels[:_SHOWN_MOVES])}" + (
        f" and {more} more." if more > 0 else "."
    )


def _named_last(text: str, moves: Mapping[str, Action]) -> str | None:
    """The label that ends last in `text`, as whole words; of two that end together the longer."""
    best: tuple[int, int, str] | None = None
    for label in moves:
        if not label:
            continue
        start = text.rfind(label)
        while start >= 0:
            end = start + len(label)
            before, after = text[start - 1 : start], text[end : end + 1]
            if not (_joins(before, label[0]) or _joins(after, label[-1])):
                if best is None or (end, len(label)) > best[:2]:
                    best = (end, len(label), label)
                break
            start = text.rfind(label, 0, end - 1)
    return None if best is None else best[2]


def _joins(neighbour: str, edge: str) -> bool:
    """Whether a label that has `edge` at its end goes on in `neighbour`."""
    return bool(neighbour) and neighbour.isalnum() and edge.isalnum()


def _folded(label: str) -> str:
    return " ".join(label.casefold().split())
