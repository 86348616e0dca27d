"""`VectorEnvironment`: copies of one environment that step together, as arrays.

Shapes everywhere in `troupe.networks`: B copies, A agents, T steps, O numbers of an agent's
observation, S of the global state, n discrete actions or D numbers of a continuous one. Floats are
float32, discrete actions int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from troupe.rpc.errors import FailedPrecondition, InvalidArgument
from troupe.workflow.loading import load_attribute

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Actions = NDArray[np.int64] | Floats


@dataclass(frozen=True)
class Spaces:
    """Observation and action spaces, the same for all agents of an environment; where they differ,
    shorter observations are padded with zeros and missing actions are never legal."""

    observation: int
    """O"""
    state: int
    """S"""
    actions: int
    """n, the number of discrete actions; or D, the size of a continuous action."""
    steps: int
    """Maximum length of an episode."""
    continuous: bool = False
    low: float = -1.0
    """`continuous`: the least value of each number of an action."""
    high: float = 1.0
    """`continuous`: the largest."""


class Observed(NamedTuple):
    """Observations before a step. The environment may reuse the arrays in the next step."""

    observations: Floats
    """[B, A, O]"""
    state: Floats
    """[B, S]: global state, for centralized critics and mixers."""
    legal: Bools | None = None
    """[B, A, n]: legal actions, at least one for every agent that acts; None: all are legal."""
    acting: Bools | None = None
    """[B, A]: agents whose actions count in this step, because they have joined the episode and it
    is their turn. None: all."""


class Stepped(NamedTuple):
    """Result of a step; undefined for copies and agents that had ended before.

    `terminated` and `truncated` are [B] where all agents of a copy end together, else [B, A]: an
    agent may leave early, and the copy ends with its last agent."""

    observed: Observed
    """After the step; of copies and agents that have just ended, their last observations."""
    rewards: Floats
    """[B, A]"""
    terminated: Bools
    """The episode is over; no value is bootstrapped."""
    truncated: Bools
    """The episode was cut off, for example at a time limit."""


@runtime_checkable
class VectorEnvironment(Protocol):
    """Copies of an environment that begin together. A copy that has ended ignores actions until the
    next `reset`."""

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents' names, in the order of all arrays."""
        ...

    @property
    def spaces(self) -> Spaces:
        """Shapes of all arrays."""
        ...

    @property
    def copies(self) -> int:
        """B"""
        ...

    def reset(self, seed: int) -> Observed:
        """Begin an episode in every copy. `seed` determines all randomness, of later steps too."""
        ...

    def step(self, actions: Actions) -> Stepped:
        """Move every copy by `actions`, int64 [B, A] or float32 [B, A, D]."""
        ...

    def close(self) -> None:
        """Release resources. Repeatable."""
        ...


def name_of(environment: VectorEnvironment) -> str:
    """Return the name of an environment in errors: its `name` if it has one, else its class."""
    return str(getattr(environment, "name", type(environment).__name__))


class BrokenEnvironment(FailedPrecondition):
    """An environment returned values that cannot be played. `field` names the array: one of
    `Observed` or `Stepped`, or `action_mask`.

    Kinds: `not_finite`, `no_legal_action`, and `broken_environment` for wrong shapes and types."""

    default_kind: ClassVar[str] = "broken_environment"


Factory = Callable[..., VectorEnvironment]

# Entrypoints of built-in environments, by the names that jobs give them.
BUILT_IN: Final[dict[str, str]] = {
    "simple_spread": "troupe.networks.environments.simple_spread:SimpleSpread",
    "two_step": "troupe.networks.environments.matrix:TwoStep",
    "matrix": "troupe.networks.environments.matrix:MatrixGame",
    "pettingzoo": "troupe.networks.environments.gymnasium:PettingZooCopies",
    "gymnasium": "troupe.networks.environments.gymnasium:GymnasiumCopies",
    "openspiel": "troupe.networks.environments.openspiel:GameCopies",
}


def make_environment(name: str, /, copies: int, **settings: Any) -> VectorEnvironment:
    """Return `copies` copies of a built-in environment, or the result of the entrypoint
    `module:attribute`, called with `copies` and the settings, which may have any names.

    Raises InvalidArgument for an unknown name, for settings that it does not take and for a result
    that is not a `VectorEnvironment`; EntrypointError for a failing import.
    """
    if name not in BUILT_IN and ":" not in name:
        raise InvalidArgument(
            "no vectorised environment has this name",
            field="environment",
            value=name,
            remedy=f"Use one of {', '.join(BUILT_IN)}, or give 'module:attribute'.",
        )
    if copies < 1:
        raise InvalidArgument("at least one copy is needed", field="copies", value=copies)
    factory: Factory = load_attribute(BUILT_IN.get(name, name), "environment")
    try:
        made = factory(copies=copies, **settings)
    except TypeError as error:
        raise InvalidArgument(
            f"{name} does not take these settings: {error}",
            field="environment.args",
            value=settings,
            remedy="Its class lists its settings.",
        ) from error
    if not isinstance(made, VectorEnvironment):
        raise InvalidArgument(
            f"returns a {type(made).__name__}, which is not a VectorEnvironment",
            field="environment",
            value=name,
            remedy="troupe.networks.vector has the protocol.",
        )
    steps = made.spaces.steps
    if not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(
            "the longest episode must have a whole number of steps, at least one",
            field="environment.steps",
            value=steps,
        )
    return made
