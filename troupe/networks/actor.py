"""`Actor`: plays whole episodes of all copies, one forward per policy and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from troupe.networks.fragments import Fragment
from troupe.networks.spec import NetworkSpec
from troupe.networks.vector import VectorEnvironment


@dataclass(frozen=True)
class Seat:
    """A policy at the table."""

    network: NetworkSpec
    agents: tuple[str, ...]
    """Whom it plays, in the order of the environment."""


@dataclass(frozen=True)
class Played:
    """What a run of all copies gave."""

    fragments: dict[str, Fragment]
    """By policy."""
    returns: NDArray[np.float64]
    """[B, A]: undiscounted, of all agents of the environment in its order."""
    lengths: NDArray[np.int32]
    """[B]"""


class Actor:
    """Plays an environment's copies with the policies that sit at the table.

    Seeded: what `sample` gives is a function of the weights and its seed.
    """

    def __init__(self, environment: VectorEnvironment, seats: Mapping[str, Seat]) -> None:
        """`seats` by policy. Raises InvalidArgument unless every agent is played by one policy."""
        raise NotImplementedError

    def load(self, policy: str, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Play with these weights (`Learner.published`) from the next episode on.

        Raises InvalidArgument naming a tensor that is missing or does not fit.
        """
        raise NotImplementedError

    def sample(self, seed: int, *, explore: bool = True) -> Played:
        """One whole episode of every copy.

        `explore=False`: the likeliest or best action always, for evaluation. Raises NotFound for a
        policy that has no weights yet.
        """
        raise NotImplementedError

    def evaluate(self, seeds: Sequence[int]) -> NDArray[np.float64]:
        """Returns [len(seeds) * B, A] without exploration."""
        raise NotImplementedError
