"""Actions and observations of Gymnasium's spaces, for Gymnasium and PettingZoo alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from troupe.workflow.environments.errors import IllegalMoveError
from troupe.workflow.environments.interface import Action

_COLOUR: Final = re.compile(r"\x1b\[([\d;]{0,32})m")


def legal_of(
    space: Any, mask: Any = None, names: Sequence[str] | None = None
) -> dict[str, Action] | None:
    """The moves of a discrete space, by name or number; None for any other space.

    `mask` (n,) keeps those that are not 0. `names` (n,) call them something else than numbers.
    """
    if type(space).__name__ != "Discrete":
        return None
    start, n = int(space.start), int(space.n)
    return {
        names[i] if names is not None else str(start + i): start + i
        for i in range(n)
        if mask is None or mask[i]
    }


def native(space: Any, action: Action, seat: str) -> Any:
    """A JSON action as the space's own. Raises `IllegalMoveError` when it is not in the space."""
    value: Any = action
    if type(space).__name__ in ("Box", "MultiDiscrete", "MultiBinary"):
        try:
            value = np.asarray(action, dtype=space.dtype)
        except (TypeError, ValueError) as error:
            raise _illegal(space, action, seat) from error
    if not space.contains(value):
        raise _illegal(space, action, seat)
    return value


def _illegal(space: Any, action: Action, seat: str) -> IllegalMoveError:
    return IllegalMoveError(
        f"{action!r} is not in {space}",
        seat=seat,
        value=action,
        remedy=f"Give a value of {space}.",
    )


def numbers(text: str) -> list[float]:
    """The numbers in a text, in order: the move of a space of vectors."""
    found = []
    for word in text.replace(",", " ").replace("[", " ").replace("]", " ").split():
        try:
            found.append(float(word))
        except ValueError:
            continue
    return found


def split_mask(observation: Any) -> tuple[Any, Any]:
    """PettingZoo's {"observation", "action_mask"} apart; (observation, None) if it is not that."""
    if isinstance(observation, Mapping) and "action_mask" in observation:
        return observation.get("observation", {}), observation["action_mask"]
    return observation, None


def arrays_of(observation: Any) -> dict[str, Any]:
    """An observation as arrays by name."""
    if isinstance(observation, Mapping):
        parts = {str(k): arrays_of(v) for k, v in observation.items()}
        return {
            f"{k}.{name}" if name != "observation" else k: array
            for k, inner in parts.items()
            for name, array in inner.items()
        }
    if isinstance(observation, tuple):
        return arrays_of({str(i): part for i, part in enumerate(observation)})
    array = np.asarray(observation)
    return {} if array.dtype.kind in "OUS" else {"observation": array}


def rendered(text: str) -> str:
    """An `ansi` rendering without its colours: what they mark stands in [brackets]."""
    parts: list[str] = []
    done, marked = 0, None  # what is in parts, and the colour that has begun
    for escape in _COLOUR.finditer(text):
        if marked is None and escape[1]:
            marked = escape
        elif marked is not None and escape[1] in ("", "0"):
            parts += [text[done : marked.start()], "[", text[marked.end() : escape.start()], "]"]
            done, marked = escape.end(), None
    return "".join([*parts, text[done:]]).strip()


def text_of(observation: Any) -> str:
    """An observation in words, where an environment has none of its own: numbers, rounded."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {text_of(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return "\n".join(text_of(part) for part in observation)
    array = np.asarray(observation)
    if array.dtype.kind == "f":
        array = np.round(array, 4)
    return np.array2string(array, separator=" ", threshold=10_000, max_line_width=10_000)
