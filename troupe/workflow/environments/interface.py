"""What an environment is: seats that move in turn or at once, until the episode is over.

Our words: an *agent* is a role of the job, a *seat* is a player of the game; `Seating` maps one to
the other. `Reset.agents` bears the name that PettingZoo gave it (Terry et al. 2021, section 3) and
holds seats. Who moves next is said by `current`: one seat in a game of turns, several in a
simultaneous one, none when the episode is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Action: TypeAlias = Any
"""What a seat does: a JSON value, most often a number or a string."""

IllegalRule = Literal["lose", "resample", "random_legal", "game"]
"""What an illegal move leads to. `lose`: the episode ends, its seat gets `illegal_reward`.
`resample`: the seat is asked again, a few times, then it loses. `random_legal`: a legal move is
drawn for it. `game`: the game takes every move and decides by its own rules."""


@dataclass(frozen=True, slots=True)
class Properties:
    """What an environment declares about itself; `conformance` tests it."""

    name: str
    seats: tuple[str, ...]
    """All seats that an episode may have, in a fixed order."""
    rules: str = ""
    """Told to every seat before its first move."""
    simultaneous: bool = False
    """Several seats may move at once."""
    zero_sum: bool = False
    """The rewards of every step add up to zero over the seats."""
    cooperative: bool = False
    """All seats get the same rewards."""
    symmetric: bool = False
    """Seats that exchange their moves exchange their rewards (simultaneous games only)."""
    deterministic: bool = True
    """The same seed and the same moves give the same episode."""
    illegal: IllegalRule = "resample"
    """What follows an illegal move, unless the workflow says otherwise."""
    illegal_reward: float = -1.0
    """Reward of a seat that loses by an illegal move, and of every illegal turn."""
    max_steps: int = 1000
    """Every episode is over after so many calls of `step`."""
    max_observation_chars: int = 100_000
    """Longest text of an observation."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one seat sees."""

    text: str
    """For language models."""
    legal: Mapping[str, Action] | None = None
    """The legal moves: what a player writes -> the action that it stands for. None: any text is a
    move, or the environment says so only when it is tried."""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """The same as numpy arrays by name, for small networks; shapes are the environment's."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The beginning of an episode."""

    agents: tuple[str, ...]
    """The seats of this episode; they stay the same until it is over."""
    current: tuple[str, ...]
    """The seats that move now."""
    obs: Mapping[str, Observation]
    """What seats see; at least those of `current`."""
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Anything else, by seat: JSON values."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a move, or a joint move, led to. A seat that a mapping leaves out has 0 or False."""

    obs: Mapping[str, Observation]
    """What seats see; at least those of `current`."""
    rewards: Mapping[str, float]
    """Reward of this step alone, by seat."""
    terminations: Mapping[str, bool]
    """Seats for which the game is over."""
    truncations: Mapping[str, bool]
    """Seats for which it was broken off, by a limit of steps for example."""
    current: tuple[str, ...]
    """The seats that move now; none: the episode is over."""
    infos: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Anything else, by seat: JSON values."""


class Environment(ABC):
    """A game or a world. One object plays one episode at a time; `reset` begins the next one.

    Objects share nothing: two of them with the same seed do the same, whatever is done with others.
    """

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """What it declares; constant."""

    @abstractmethod
    def reset(self, seed: int) -> Reset:
        """Begin an episode; all its chance derives from `seed` and the moves."""

    @abstractmethod
    def step(self, actions: Mapping[str, Action]) -> Step:
        """Play the moves of all seats of `current`.

        Raises `IllegalMoveError` for one that the game does not allow, and is then as before.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to let go
        """Let go of everything. Repeatable; nothing is called afterwards."""


EnvironmentFactory = Callable[[], Environment]
"""Makes a new environment; every call another one."""
