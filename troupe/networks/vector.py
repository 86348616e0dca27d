"""`VectorEnvironment`: n copies of one environment that move together, as arrays.

Shapes everywhere in `troupe.networks`: B copies, A agents, T steps, O numbers of an agent's
observation, S of the global state, n discrete actions or D numbers of a continuous one. Floats are
float32, discrete actions int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from troupe.rpc.errors import InvalidArgument
from troupe.workflow.loading import load_attribute

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Actions = NDArray[np.int64] | Floats


@dataclass(frozen=True)
class Spaces:
    """What agents observe and do. All agents of an environment have the same; where they differ,
    shorter observations are padded with zeros and absent actions are never legal."""

    observation: int
    """O"""
    state: int
    """S"""
    actions: int
    """n, the number of discrete actions; or D, the numbers of a continuous one."""
    steps: int
    """No episode is longer."""
    continuous: bool = False
    low: float = -1.0
    """`continuous`: the least value of each number of an action."""
    high: float = 1.0
    """`continuous`: the largest."""


class Observed(NamedTuple):
    """What is to be seen before a step. The environment may reuse the arrays in the next step."""

    observations: Floats
    """[B, A, O]"""
    state: Floats
    """[B, S]: what a centralized critic or a mixer sees."""
    legal: Bools | None = None
    """[B, A, n]; None: all actions are. At least one is in every row."""
    acting: Bools | None = None
    """[B, A]; whose action matters in this step, None: everyone's. For games with turns."""


class Stepped(NamedTuple):
    """What a step gave. Of a copy that had ended before, all is without meaning."""

    observed: Observed
    """After the step; of a copy that has just ended, its last observations."""
    rewards: Floats
    """[B, A]"""
    terminated: Bools
    """[B]: the game is over; no value follows."""
    truncated: Bools
    """[B]: only the time is over."""


@runtime_checkable
class VectorEnvironment(Protocol):
    """n copies that begin together. A copy that has ended waits for the next `reset`: it still
    takes (and ignores) actions, so that a step is the same work for all."""

    @property
    def agents(self) -> tuple[str, ...]:
        """The roles, in the order of every array's agents."""
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
        """A new episode in every copy. All its randomness, that of later steps included, is a
        function of `seed`."""
        ...

    def step(self, actions: Actions) -> Stepped:
        """Move every copy by `actions`, int64 [B, A] or float32 [B, A, D]."""
        ...

    def close(self) -> None:
        """Give up what it holds. More than once does nothing."""
        ...


Factory = Callable[..., VectorEnvironment]

# Built in, by the name that a job may give instead of an entrypoint.
BUILT_IN: Final[dict[str, str]] = {
    "simple_spread": "troupe.networks.environments.simple_spread:SimpleSpread",
    "two_step": "troupe.networks.environments.two_step:TwoStep",
    "matrix": "troupe.networks.environments.matrix:MatrixGame",
    "pettingzoo": "troupe.networks.environments.gymnasium:PettingZooCopies",
    "gymnasium": "troupe.networks.environments.gymnasium:GymnasiumCopies",
    "openspiel": "troupe.networks.environments.openspiel:GameCopies",
}


def make_environment(name: str, copies: int, **settings: Any) -> VectorEnvironment:
    """`copies` copies of a built-in environment, or of what the entrypoint `module:attribute`
    gives when it is called with `copies` and the settings.

    Raises InvalidArgument for an unknown name, for settings that it does not take and for what is
    no `VectorEnvironment`; EntrypointError where nothing can be imported.
    """
    if name not in BUILT_IN and ":" not in name:
        raise InvalidArgument(
            "no vectorised environment of this name",
            field="environment",
            value=name,
            remedy=f"Take one of {', '.join(BUILT_IN)}, or give 'module:attribute'.",
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
            remedy="Its class lists what it takes.",
        ) from error
    if not isinstance(made, VectorEnvironment):
        raise InvalidArgument(
            f"gives a {type(made).__name__}, which is no VectorEnvironment",
            field="environment",
            value=name,
            remedy="troupe.networks.vector has the protocol.",
        )
    return made
