"""Conversion of actions and observations of Gymnasium's spaces, also used by PettingZoo."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from troupe.workflow.environments.interface import Action, Environment, Observation, Properties
from troupe.workflow.errors import IllegalMoveError

_COLOUR: Final = re.compile(r"\x1b\[([\d;]{0,32})m")


def legal_of(
    space: Any, mask: Any = None, names: Sequence[str] | None = None
) -> dict[str, Action] | None:
    """The moves of a discrete space, by name or number; None for other spaces.

    `mask` [n]: 0 for illegal actions. `names` [n]: labels; default: numbers.
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
    """A JSON action as a value of the space. Raises `IllegalMoveError` if it is not in the
    space."""
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
        f"{action!r} is not in {space}", seat=seat, value=action, remedy=f"Give a value of {space}."
    )


def numbers(text: str) -> list[float]:
    """The numbers in a text, in order: an action of a vector space."""
    found = []
    for word in text.replace(",", " ").replace("[", " ").replace("]", " ").split():
        try:
            found.append(float(word))
        except ValueError:
            continue
    return found


def split_mask(observation: Any) -> tuple[Any, Any]:
    """Split PettingZoo's {"observation", "action_mask"}; (observation, None) for other values."""
    if isinstance(observation, Mapping) and "action_mask" in observation:
        return observation.get("observation", {}), observation["action_mask"]
    return observation, None


def arrays_of(observation: Any) -> dict[str, Any]:
    """The arrays of an observation, by name."""
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
    """An `ansi` rendering with coloured text in [brackets] instead of escape codes."""
    parts: list[str] = []
    done, marked = 0, None  # end of the copied text, and the open colour code
    for escape in _COLOUR.finditer(text):
        if marked is None and escape[1]:
            marked = escape
        elif marked is not None and escape[1] in ("", "0"):
            parts += [text[done : marked.start()], "[", text[marked.end() : escape.start()], "]"]
            done, marked = escape.end(), None
    return "".join([*parts, text[done:]]).strip()


def text_of(observation: Any) -> str:
    """An observation as text: rounded numbers."""
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


class SpacesEnvironment(Environment):
    """Base class of adapters whose environments have Gymnasium's spaces."""

    _env: Any
    _properties: Properties
    _moves: Sequence[str] | None
    """Names of discrete actions, in order."""

    @property
    def properties(self) -> Properties:
        """As declared, or as the registry has them."""
        return self._properties

    def close(self) -> None:
        """Close the environment. Repeatable."""
        self._env.close()

    def _observation(
        self, space: Any, seen: Any, info: Mapping[str, Any], describe: Callable[[Any], str] | None
    ) -> Observation:
        """What `seen` is for a seat with this action space; text: that of `describe`, else the
        `ansi` rendering if there is one, else numbers."""
        inner, mask = split_mask(seen)
        legal = legal_of(space, info.get("action_mask", mask), self._moves)
        if describe is not None:
            text = describe(inner)
        elif getattr(self._env, "render_mode", None) == "ansi":
            text = rendered(str(self._env.render()))
        else:
            text = text_of(inner)
        return Observation(text, legal, arrays_of(inner))
