"""A policy that is a small network, and the paradigm that trains it (`policies.P.network`)."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from troupe.job.section import MAX_COEFFICIENT, Coefficient, Norm, Section

Width = Annotated[int, Field(ge=1, le=4096)]
Chance = Annotated[float, Field(ge=0, le=1)]
# What a replay buffer can hold, and what one gradient or update takes of it.
_MOST: Final = 100_000_000
_MOST_AT_ONCE: Final = 1_048_576


class PPOSpec(Section):
    """Proximal policy optimization (Schulman et al. 2017), on-policy."""

    paradigm: Literal["ppo", "mappo"] = "ppo"
    """`ppo`: every agent's value is a function of what the agent sees (independent PPO, de Witt et
    al. 2020); `mappo`: of the environment's global state too (Yu et al. 2022)."""
    lr: float = Field(default=5e-4, gt=0, le=1000)
    """Adam's learning rate, of policy and critic."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount per decision."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """A probability's ratio to the one that it was drawn with counts within 1 +- this."""
    epochs: int = Field(default=10, ge=1, le=10_000)
    """How often an update goes over its fragments."""
    minibatches: int = Field(default=1, ge=1, le=65_536)
    """Optimizer steps per epoch."""
    entropy_coefficient: Coefficient = 0.01
    """Weight of the policy's entropy."""
    value_coefficient: float = Field(default=1.0, gt=0, le=MAX_COEFFICIENT)
    """Weight of the critic's loss."""
    normalize_values: bool = True
    """The critic predicts returns of mean 0 and variance 1 (PopArt's statistics, van Hasselt et al.
    2016, without its rescaling of the head)."""
    max_grad_norm: Norm = 10.0
    """Gradients are scaled down to this global L2 norm."""


class QLearningSpec(Section):
    """Q-learning from a replay buffer, off-policy: discrete actions only."""

    paradigm: Literal["dqn", "vdn", "qmix"] = "dqn"
    """`dqn`: every agent for itself (Mnih et al. 2015); `vdn`: the team's value is the sum of its
    agents' (Sunehag et al. 2018); `qmix`: a monotonic mix of them under the global state (Rashid et
    al. 2018)."""
    lr: float = Field(default=5e-4, gt=0, le=1000)
    """Adam's learning rate."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount per decision."""
    double: bool = True
    """`dqn`: double Q-learning (van Hasselt et al. 2016): the next action is the trained network's
    choice, its value the target network's. A mixed value is the target networks' alone."""
    buffer: int = Field(default=5000, ge=1, le=_MOST)
    """Episodes that the replay buffer holds."""
    batch: int = Field(default=32, ge=1, le=_MOST_AT_ONCE)
    """Episodes per gradient."""
    updates: int = Field(default=8, ge=1, le=_MOST_AT_ONCE)
    """Gradients per update."""
    warmup: int = Field(default=0, ge=0, le=_MOST)
    """Episodes in the buffer before the first gradient."""
    tau: float = Field(default=0.01, gt=0, le=1)
    """How far target networks follow after every gradient."""
    epsilon: tuple[Chance, Chance] = (1.0, 0.05)
    """Actors draw a uniform action with this probability: at first, and in the end."""
    epsilon_episodes: int = Field(default=2000, ge=1, le=1_000_000_000)
    """Episodes in which epsilon falls linearly."""
    mixer_width: Width = 32
    """`qmix`: units of the mixing network."""
    max_grad_norm: Norm = 10.0
    """Gradients are scaled down to this global L2 norm."""

    @model_validator(mode="after")
    def _begins(self) -> Self:
        _check_warmup(self)
        return self


class DeterministicSpec(Section):
    """MADDPG (Lowe et al. 2017), off-policy: deterministic actors, each with a critic that observes
    what all agents of the policy see and do. Discrete actions are relaxed by Gumbel-softmax."""

    paradigm: Literal["maddpg"] = "maddpg"
    """There is one."""
    actor_lr: float = Field(default=5e-4, gt=0, le=1000)
    """Adam's learning rate of the policy."""
    critic_lr: float = Field(default=1e-3, gt=0, le=1000)
    """Adam's learning rate of the critic."""
    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount per decision."""
    buffer: int = Field(default=100_000, ge=1, le=_MOST)
    """Joint transitions that the replay buffer holds."""
    batch: int = Field(default=1024, ge=1, le=_MOST_AT_ONCE)
    """Joint transitions per gradient."""
    updates: int = Field(default=8, ge=1, le=_MOST_AT_ONCE)
    """Gradients per update."""
    warmup: int = Field(default=0, ge=0, le=_MOST)
    """Joint transitions in the buffer before the first gradient."""
    tau: float = Field(default=0.01, gt=0, le=1)
    """How far target networks follow after every gradient."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """Of the Gumbel-softmax."""
    noise: float = Field(default=0.1, ge=0, le=1000)
    """Continuous actions: standard deviation of what actors add, in halves of the range."""
    standardize_rewards: bool = False
    """The critic learns of rewards less their mean, over their standard deviation, of all that came
    so far. Only where all episodes are equally long: elsewhere it is another game."""
    regularization: Coefficient = 1e-3
    """Weight of the squared logits in the policy's loss (the authors' code)."""
    max_grad_norm: Norm = 0.5
    """Gradients are scaled down to this global L2 norm."""

    @model_validator(mode="after")
    def _begins(self) -> Self:
        _check_warmup(self)
        return self


LearningSpec = Annotated[
    PPOSpec | QLearningSpec | DeterministicSpec, Field(discriminator="paradigm")
]


def _check_warmup(learning: QLearningSpec | DeterministicSpec) -> None:
    if learning.warmup > learning.buffer:
        raise ValueError(
            f"warmup: the buffer never holds {learning.warmup}, and nothing would be learned; set "
            f"it to at most buffer = {learning.buffer}"
        )


class NetworkSpec(Section):
    """A small network instead of a language model."""

    kind: Literal["mlp", "rnn"] = "mlp"
    """`mlp`: a decision is a function of the present observation; `rnn`: of all of the episode's,
    through a GRU behind the hidden layers."""
    hidden: tuple[Width, ...] = Field(default=(64, 64), max_length=64)
    """Units of the hidden layers, of policy, critic and Q-network alike."""
    memory: Width = 64
    """`rnn`: units of the GRU."""
    activation: Literal["relu", "tanh", "elu", "gelu"] = "relu"
    """Between layers."""
    parameters: Literal["shared", "per_agent"] = "shared"
    """Whether the agents that the policy plays share weights. They observe who they are if they
    do: one more input per agent, where there are several."""
    learning: LearningSpec = PPOSpec()
    """How it is trained."""

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        if not self.hidden:
            raise ValueError("`hidden` needs at least one layer")
        if self.kind == "rnn" and self.learning.paradigm == "maddpg":
            raise ValueError("`maddpg` trains on single transitions; it needs `kind: mlp`")
        return self
