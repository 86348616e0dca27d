"""`Fragment`: whole episodes of one policy's agents as arrays, from an actor to a learner; one
sample of the experience store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from troupe.rpc.errors import InvalidArgument

Array = NDArray[Any]

# Every array that a fragment may have, by its shape. T is the longest episode's length.
SHAPES: Final[dict[str, str]] = {
    "observations": "T+1 B A O",
    "state": "T+1 B S",
    "legal": "T+1 B A n",  # absent: all actions are legal
    "acting": "T B A",  # absent: all agents act in every step
    "actions": "T B A",  # continuous: T B A D
    "log_probs": "T B A",  # of the actions, as they were drawn
    "rewards": "T B A",
    "lengths": "B A",  # steps until the agent's episode ended
    "terminated": "B A",  # otherwise truncated
}
# A further column of a stored sample if its policy played only some of its network's agents: the
# indices of the agents that it played [A].
SEATS: Final = "seats"
REQUIRED: Final = frozenset(SHAPES) - {"legal", "acting"}


@dataclass(frozen=True)
class Fragment:
    """B whole episodes. Values beyond the length of an agent's episode are undefined.

    `observations`, `state` and `legal` have one step more than `actions`: after the last one.
    """

    policy: str
    version: int
    """Version of the weights that sampled all actions."""
    agents: tuple[str, ...]
    """The agents that the policy played: A."""
    arrays: Mapping[str, Array] = field(repr=False)

    def __post_init__(self) -> None:
        if missing := sorted(REQUIRED - self.arrays.keys()):
            raise InvalidArgument("an array is missing", field="fragment", value=missing[0])
        sizes: dict[str, int] = {"A": len(self.agents)}
        for name, array in self.arrays.items():
            shape = SHAPES.get(name)
            if shape is None:
                raise InvalidArgument("a fragment has no such array", field="fragment", value=name)
            letters = shape.split()
            if name == "actions" and array.ndim == 4:
                letters.append("D")
            if array.ndim != len(letters):
                raise InvalidArgument(
                    f"has shape {list(array.shape)}, not [{', '.join(letters)}]",
                    field=f"fragment.{name}",
                )
            for letter, found in zip(letters, array.shape, strict=True):
                size = found - 1 if letter == "T+1" else found
                if sizes.setdefault(letter.removesuffix("+1"), size) != size:
                    raise InvalidArgument(
                        f"{letter} is {found} here, but differs in other arrays",
                        field=f"fragment.{name}",
                        value=list(array.shape),
                    )

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    @property
    def episodes(self) -> int:
        """B"""
        return len(self.arrays["lengths"])

    @property
    def steps(self) -> int:
        """Steps of the environment, summed over the episodes."""
        return int(self.arrays["lengths"].max(axis=1).sum())

    def valid(self) -> NDArray[np.bool_]:
        """[T, B, A]: which steps are within the agent's episode."""
        steps = len(self.arrays["rewards"])
        found: NDArray[np.bool_] = np.arange(steps)[:, None, None] < self.arrays["lengths"]
        return found

    def returns(self) -> NDArray[np.float64]:
        """Undiscounted returns [B, A]."""
        rewards = self.arrays["rewards"].astype(np.float64)
        found: NDArray[np.float64] = (rewards * self.valid()).sum(axis=0)
        return found
