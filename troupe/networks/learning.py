"""`NetworkTrainer`: what updates one policy's network on fragments; `make_learner` makes the one
that a specification names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from troupe.networks.fragments import Fragment
from troupe.networks.maddpg import DeterministicLearner
from troupe.networks.ppo import PPOLearner
from troupe.networks.qlearning import QLearner
from troupe.networks.spec import NetworkSpec, PPOSpec, QLearningSpec
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument

Tensors = dict[str, torch.Tensor]


class NetworkTrainer(Protocol):
    """One policy's networks, optimizers and, off-policy, replay buffer.

    All that it will do is a function of `state()` and of the fragments that follow, bit for bit on
    one kind of machine with one number of threads.
    """

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """One step of training on what was committed; on-policy, on all of it together.

        Metrics by name. Raises InvalidArgument for fragments that are not of its agents or spaces;
        then nothing has moved.
        """
        ...

    def state(self) -> Tensors:
        """All of it, flat (`Belongings` has the names); not copies where it can be avoided. Names,
        dtypes and shapes stay, but those of `buffer.*`, which grows."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on exactly from a `state()`. Raises InvalidArgument naming the tensor that is missing
        or does not fit; then nothing has moved."""
        ...

    def published(self) -> Tensors:
        """What actors load (`Actor.load`): copies, names as in `ActingNetwork`."""
        ...


def make_learner(
    spec: NetworkSpec, spaces: Spaces, agents: Sequence[str], seed: int
) -> NetworkTrainer:
    """The learner of one policy that plays `agents`, in the order of the environment; its first
    weights and all its random numbers are drawn by `seed`.

    Raises InvalidArgument for a paradigm that cannot train on these spaces. Weights are those that
    an `Actor` expects of the same arguments.
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
    made.belongings.generator.manual_seed(seed)
    return made
