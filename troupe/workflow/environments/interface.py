"""The interface of environments: seats that move in turn or simultaneously until the episode is
over.

Terms: an *agent* is a role of the job, a *seat* is a player of the game; `Seating` maps seats to
agents. `Reset.agents` has PettingZoo's name (Terry et al. 2021, section 3) and holds seats.
`current` holds the seats that move next: one in a turn-based game, several in a simultaneous one,
none when the episode is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Action: TypeAlias = Any
"""A move of a seat: a JSON value, most often a number or a string."""

IllegalRule = Literal["lose", "resample", "random_legal", "game"]
"""Rule for illegal moves. `lose`: the episode ends, the seat gets `illegal_reward`. `resample`: the
seat is asked again up to `PlayRules.resamples` times, then it loses. `random_legal`: a random legal
move replaces it. `game`: the game accepts every move and applies its own rules."""


@dataclass(frozen=True, slots=True)
class Properties:
    """Declared properties of an environment; `conformance` tests them."""

    name: str
    seats: tuple[str, ...]
    """All seats that an episode may have, in a fixed order."""
    rules: str = ""
    """Text that every seat gets before its first move."""
    simultaneous: bool = False
    """Several seats may move simultaneously."""
    zero_sum: bool = False
    """The rewards of every step add up to zero over the seats."""
    cooperative: bool = False
    """All seats get the same rewards."""
    symmetric: bool = False
    """Seats that swap their moves swap their rewards (simultaneous games only)."""
    deterministic: bool = True
    """The same seed and the same moves give the same episode."""
    illegal: IllegalRule = "resample"
    """Rule for illegal moves, unless the workflow sets another."""
    illegal_reward: float = -1.0
    """Reward of a seat that loses by an illegal move, and of every illegal turn."""
    max_steps: int = 1000
    """Upper bound of steps per episode."""
    max_observation_chars: int = 100_000
    """Upper bound of characters of an observation's text."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The observation of one seat."""

    text: str
    """Text for language models."""
    legal: Mapping[str, Action] | None = None
    """Legal moves: label that a player writes -> action. None: any text is a move, or only `step`
    decides which are legal."""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """Observation as numpy arrays by name, for small networks."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The beginning of an episode."""

    agents: tuple[str, ...]
    """The seats of this episode; they stay the same until it is over."""
    current: tuple[str, ...]
    """The seats that move now."""
    obs: Mapping[str, Observation]
    """Observations by seat; at least of `current`."""
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further JSON values, by seat."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a move, or of a joint move. A seat missing in a mapping has 0 or False."""

    obs: Mapping[str, Observation]
    """Observations by seat; at least of `current`."""
    rewards: Mapping[str, float]
    """Reward of this step, by seat."""
    terminations: Mapping[str, bool]
    """Seats for which the game is over."""
    truncations: Mapping[str, bool]
    """Seats for which the game was cut off, for example by a step limit."""
    current: tuple[str, ...]
    """The seats that move now; none: the episode is over."""
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further JSON values, by seat."""


class Environment(ABC):
    """A game or another environment. One object plays one episode at a time.

    Objects are independent: two with the same seed and moves behave alike.
    """

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """Declared properties; constant."""

    @abstractmethod
    def reset(self, seed: int) -> Reset:
        """Begin an episode; all randomness derives from `seed`."""

    @abstractmethod
    def step(self, actions: Mapping[str, Action]) -> Step:
        """Play the moves of all seats of `current`.

        Raises `IllegalMoveError` for an illegal one, and leaves the state unchanged.
        """

    def close(self) -> None:  # noqa: B027 - most have no resources
        """Release all resources. Repeatable; no other method is called afterwards."""


EnvironmentFactory = Callable[[], Environment]
"""A function that makes a new environment at every call."""
