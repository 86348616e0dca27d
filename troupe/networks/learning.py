"""`make_learner`: the learner of one policy's network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from troupe.job.network import NetworkSpec, PPOSpec, QLearningSpec
from troupe.networks.learner_state import NetworkTrainer as NetworkTrainer
from troupe.networks.maddpg import DeterministicLearner
from troupe.networks.ppo import PPOLearner
from troupe.networks.qlearning import QLearner
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument


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
    made: NetworkTrainer
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
