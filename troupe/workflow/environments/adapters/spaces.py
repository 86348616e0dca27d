"""Conversion of actions and observations in Gymnasium's spaces, which PettingZoo also uses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from troupe.workflow.environments.interface import Action, Environment, Observation, Properties
from troupe.workflow.errors import (
    EntrypointError,
    EnvironmentContractError,
    IllegalMoveError,
)

_COLOUR: Final = re.compile(r"\x1b\[([\d;]{0,32})m")


def legal_of(
    space: Any, mask: Any = None, names: Sequence[str] | None = None
) -> dict[str, Action] | None:
    """Return the moves of a discrete space, by name or number; None for other spaces.

    `mask` [n]: 1 for legal actions, else 0. `names` [n]: labels; default: numbers. Raises
    `EnvironmentContractError` for names of a wrong length, or a mask of a wrong form.
    """
    if not isinstance(space, _spaces().Discrete):
        return None
    start, n = int(space.start), int(space.n)
    for field, given in (("action_mask", mask), ("moves", names)):
        if given is not None and np.shape(given) != (n,):
            raise EnvironmentContractError(
                f"{field} has the shape {list(np.shape(given))}; {space} has {n} actions",
                field=field,
                value=given,
                remedy="Give one entry for each action.",
            )
    if mask is not None and not np.isin(np.asarray(mask), (0, 1)).all():
        raise EnvironmentContractError(
            f"action_mask has other values than 0 and 1, one for each action of {space}",
            field="action_mask",
            value=mask,
            remedy="Give 1 for a legal action, else 0.",
        )
    return {
        names[i] if names is not None else str(start + i): start + i
        for i in range(n)
        if mask is None or mask[i]
    }


def native(space: Any, action: Action, seat: str) -> Any:
    """Convert a JSON action to a value of the space: lists for arrays, tuples and sequences,
    objects for `Dict`, [number of the space, value] for `OneOf`. Raises `IllegalMoveError` if it is
    not in the space."""
    try:
        value = _value(space, action)
        inside = space.contains(value)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise _illegal(space, action, seat) from error
    if not inside:
        raise _illegal(space, action, seat)
    return value


def _value(space: Any, action: Action) -> Any:
    spaces = _spaces()
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        given = np.asarray(action)
        with np.errstate(over="ignore"):
            value = np.asarray(action, dtype=space.dtype)
        if value.dtype.kind in "iu" and not np.array_equal(given, value):
            raise ValueError("not whole numbers of this type")
        if not np.isfinite(value).all():  # a space without bounds contains infinity
            raise ValueError("not finite numbers of this type")
        return value
    if isinstance(space, spaces.Tuple):
        return tuple(_value(part, one) for part, one in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.Dict):
        parts = {name: _value(part, action[name]) for name, part in space.spaces.items()}
        if len(parts) != len(action):
            raise ValueError("unknown entries")
        return parts
    if isinstance(space, spaces.OneOf):
        number, one = action
        return np.int64(number), _value(space.spaces[number], one)
    if isinstance(space, spaces.Sequence) and not space.stack:
        return tuple(_value(space.feature_space, one) for one in action)
    return action


def check_playable(space: Any, seat: str) -> None:
    """Raise `EntrypointError` for an action space whose actions cannot be expressed in JSON."""
    spaces = _spaces()
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.values())
    elif isinstance(space, spaces.Tuple | spaces.OneOf):
        parts = list(space.spaces)
    elif isinstance(space, spaces.Sequence) and not space.stack:
        parts = [space.feature_space]
    elif isinstance(space, known):
        parts = []
    else:
        raise EntrypointError(
            f"'{seat}' has the action space {space}, whose actions cannot be expressed in JSON",
            field="action_space",
            value=str(space),
            remedy="Wrap the environment so that actions are numbers, texts or lists of them.",
        )
    for part in parts:
        check_playable(part, seat)


def _spaces() -> Any:
    from gymnasium import spaces

    return spaces


def _illegal(space: Any, action: Action, seat: str) -> IllegalMoveError:
    return IllegalMoveError(
        f"{action!r} is not in {space}", seat=seat, value=action, remedy=f"Give a value of {space}."
    )


def numbers(text: str) -> list[float]:
    """Return the numbers in a text, in order, as an action of a vector space; the words "nan" and
    "infinity" are none."""
    found = []
    for word in text.replace(",", " ").replace("[", " ").replace("]", " ").split():
        try:
            number = float(word)
        except ValueError:
            continue
        if math.isfinite(number):
            found.append(number)
    return found


def split_mask(observation: Any) -> tuple[Any, Any]:
    """Split a dictionary of observations into the rest and its `action_mask`; (observation, None)
    for other values. PettingZoo's {"observation", "action_mask"} leaves the observation alone."""
    if not isinstance(observation, Mapping) or "action_mask" not in observation:
        return observation, None
    rest = {name: part for name, part in observation.items() if name != "action_mask"}
    only = rest["observation"] if rest.keys() == {"observation"} else rest
    return only, observation["action_mask"]


def arrays_of(observation: Any) -> dict[str, Any]:
    """Return the arrays of an observation, by name."""
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
    """Return an `ansi` rendering with coloured text in [brackets] instead of escape codes."""
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
    """Return an observation as text: rounded numbers."""
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
    """Base class of adapters for environments with Gymnasium's spaces."""

    _env: Any
    _properties: Properties
    _moves: Sequence[str] | None
    """Names of discrete actions, in order."""

    @property
    def properties(self) -> Properties:
        """The properties, as declared or from the registry."""
        return self._properties

    def close(self) -> None:
        """Close the environment. Repeatable."""
        self._env.close()

    def _observation(
        self,
        space: Any,
        seen: Any,
        info: Mapping[str, Any] | None,
        describe: Callable[[Any], str] | None,
    ) -> Observation:
        """Convert `seen` to the observation of a seat with this action space. Its text is the
        result of `describe`, else the `ansi` rendering if there is one, else numbers."""
        inner, mask = split_mask(seen)
        told = (info or {}).get("action_mask")
        legal = legal_of(space, mask if told is None else told, self._moves)
        if describe is not None:
            text = describe(inner)
        elif getattr(self._env, "render_mode", None) == "ansi":
            text = rendered(str(self._env.render()))
        else:
            text = text_of(inner)
        return Observation(text, legal, arrays_of(inner))
