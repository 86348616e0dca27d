"""`NetworkTrainer`, the interface of learners of one policy's network, and `make_learner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from troupe.job.network import NetworkSpec, PPOSpec, QLearningSpec
from troupe.networks.fragments import Fragment
from troupe.networks.maddpg import DeterministicLearner
from troupe.networks.ppo import PPOLearner
from troupe.networks.qlearning import QLearner
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument

Tensors = dict[str, torch.Tensor]


class NetworkTrainer(Protocol):
    """One policy's networks, optimizers and, off-policy, replay buffer.

    Its updates are a function of `state()` and the following fragments, bit for bit on one kind of
    machine with one number of threads.
    """

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """One training step on the fragments; on-policy learners use all of them together.

        Returns metrics by name. Raises InvalidArgument for fragments of other agents or spaces;
        nothing has changed then.
        """
        ...

    def state(self) -> Tensors:
        """The whole state as flat tensors (names: `LearnerState`), copied only where unavoidable.
        Names, dtypes and shapes are constant but for `buffer.*`, which grows."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state()` exactly. Raises InvalidArgument naming a tensor that is missing or
        does not fit; nothing has changed then."""
        ...

    def published(self) -> Tensors:
        """Weights for `Actor.load`: copies, by the names of `ActingNetwork`."""
        ...


def make_learner(
    spec: NetworkSpec, spaces: Spaces, agents: Sequence[str], seed: int
) -> NetworkTrainer:
    """The learner of one policy that plays `agents`, in the environment's order.

    `seed` determines its initial weights and all its random numbers. Raises InvalidArgument for a
    paradigm that cannot train on these spaces.
    """
    if not agents:
        raise InvalidArgument("a policy plays at least one agent", field="agents")
    played, learning = tuple(agents), spec.learning
    made: PPOLearner | QLearner | DeterministicLearner
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(learning, PPOSpec):
            made = PPOLearner(spec, learning, spaces, played)
        elif isinstance(learning, QLearningSpec):
            made = QLearner(spec, learning, spaces, played)
        else:
            made = DeterministicLearner(spec, learning, spaces, played)
    made.seed(seed)
    return made
