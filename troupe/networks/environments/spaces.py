"""Gymnasium's spaces as vectors and numbered actions: the inputs and outputs of an agent's
network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from troupe.networks.vector import Bools, BrokenEnvironment, Floats
from troupe.outcomes import described
from troupe.rpc.errors import InvalidArgument

# The part of a dictionary of observations, and the key of an `info`, that holds the legal actions.
MASK: Final = "action_mask"


class ObservedSpace:
    """An observation space whose elements become vectors (`gymnasium.spaces.utils.flatten`).

    The entry `action_mask` of a `Dict` is not part of the vector: it is the action mask."""

    def __init__(self, space: Any, owner: str) -> None:
        """Raises InvalidArgument, naming `owner` and the space, for other spaces."""
        from gymnasium import spaces
        from gymnasium.spaces import utils

        self._masked = isinstance(space, spaces.Dict) and MASK in space.spaces
        if self._masked:
            space = spaces.Dict({k: v for k, v in space.spaces.items() if k != MASK})
        if not _is_vector(space):
            wanted = "Box, Discrete, MultiBinary or MultiDiscrete, or Dict and Tuple of these"
            raise _unsupported(owner, space, f"observations that are {wanted}")
        self._space, self._flatten, self._owner = space, utils.flatten, owner
        self.width = int(utils.flatdim(space))
        if not self.width:
            raise _unsupported(owner, space, "observations of at least one number")
        self._numbered = list(_numbered_parts(space))

    def vector(self, seen: Any, when: str) -> Floats:
        """Return an observation as a vector [width]. Raises BrokenEnvironment for one outside the
        space; `when`: the point in the episode, for errors."""
        try:
            if self._masked:
                seen = {key: seen[key] for key in self._space.spaces}
            for (
                path,
                part,
            ) in self._numbered:  # NumPy would count from the end, or set another entry
                value = seen
                for key in path:
                    value = value[key]
                if not part.contains(value):
                    raise ValueError(f"{value!r} is not in {part}")
            found = np.asarray(self._flatten(self._space, seen), np.float32)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise self._broken(when, described(error)) from error
        if found.shape != (self.width,):
            raise self._broken(when, f"it has the shape {list(np.shape(seen))}")
        return found

    def mask(self, seen: Any) -> Any:
        """Return the action mask in an observation; None without one."""
        return seen.get(MASK) if self._masked and isinstance(seen, Mapping) else None

    def _broken(self, when: str, reason: str) -> BrokenEnvironment:
        return BrokenEnvironment(
            f"the observation of {self._owner} {when} is not in its space {self._space}: {reason}",
            field="observations",
            remedy="Return elements of the observation space.",
        )


class ActionSpace:
    """An action space of numbered actions (`Discrete`) or bounded numbers (a `Box` of floats)."""

    def __init__(self, space: Any, owner: str) -> None:
        """Raises InvalidArgument, naming `owner` and the space, for other spaces."""
        from gymnasium import spaces

        self.continuous = isinstance(space, spaces.Box)
        self._space, self._owner = space, owner
        if isinstance(space, spaces.Box):
            if space.dtype.kind != "f" or not space.is_bounded() or not np.prod(space.shape):
                raise _unsupported(owner, space, "bounded numbers of a floating-point type")
            self.size = int(np.prod(space.shape))
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            self._middle, self._half = low / 2 + high / 2, high / 2 - low / 2
        elif isinstance(space, spaces.Discrete):
            self.size = int(space.n)
        else:
            raise _unsupported(owner, space, "a Discrete space, or a Box that is bounded")

    def action(self, drawn: Any) -> Any:
        """Return the element of the space for an action's index, or for numbers between -1 and 1;
        numbers beyond `size` are ignored."""
        space = self._space
        if not self.continuous:
            return space.dtype.type(space.start + drawn)
        numbers = np.asarray(drawn[: self.size], np.float64).reshape(space.shape)
        found = np.asarray(self._middle + self._half * numbers, space.dtype)
        return np.asarray(found.clip(space.low, space.high))

    def legal(self, mask: Any, when: str) -> Bools:
        """Return an action mask as bools [size]. Raises BrokenEnvironment for other shapes and
        values."""
        try:
            found = np.asarray(mask)
            right = found.shape == (self.size,) and bool(((found == 0) | (found == 1)).all())
        except (TypeError, ValueError):
            right = False
        if not right:
            raise BrokenEnvironment(
                f"the action mask of {self._owner} {when} is not a vector of {self.size} "
                f"zeros and ones, one for each action of {self._space}: {mask!r}"[:500],
                field=MASK,
                remedy="Return one number for each action: 1 if it is legal, else 0.",
            )
        return found.astype(np.bool_)


def _is_vector(space: Any) -> bool:
    """Return whether elements flatten to a fixed number of values that a network can read. `Text`
    flattens to indices of characters, and the values of `OneOf` change their meaning: neither is a
    vector."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return all(map(_is_vector, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_vector, space.spaces))
    return isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete
    )


def _numbered_parts(space: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a space that count from a first number, each with its keys, outermost
    first."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces
        for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            yield from _numbered_parts(part, (*path, key))
    elif isinstance(space, spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        yield path, space


def _unsupported(owner: str, space: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(
        f"{owner} has {space}; networks need {wanted}",
        kind="unsupported_space",
        field="environment.source",
        remedy="Wrap the environment: Gymnasium and SuperSuit have wrappers that convert spaces.",
    )
