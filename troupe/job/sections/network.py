"""Small networks: the policy and the paradigm that trains it (`policies.P.network`), and the
section `environment` that networks play."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from troupe.job.section import MAX_COEFFICIENT, Coefficient, Norm, Section, check_json

Width = Annotated[int, Field(ge=1, le=4096)]
Chance = Annotated[float, Field(ge=0, le=1)]
# Bounds of replay buffers, and of batches and updates.
_MOST: Final = 100_000_000
_MOST_AT_ONCE: Final = 1_048_576


class PPOSpec(Section):
    """Proximal policy optimization (Schulman et al. 2017), on-policy."""

    paradigm: Literal["ppo", "mappo"] = "ppo"
    """`ppo`: values depend on the agent's own observation (independent PPO, de Witt et al. 2020);
    `mappo`: also on the environment's global state (Yu et al. 2022)."""
    lr: float = Field(default=5e-4, gt=0, le=1000)
    """Adam's learning rate, of policy and critic."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount per decision."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """Clip range of the probability ratio: 1 +- this."""
    epochs: int = Field(default=10, ge=1, le=10_000)
    """Passes of an update over its fragments."""
    minibatches: int = Field(default=1, ge=1, le=65_536)
    """Optimizer steps per epoch."""
    entropy_coefficient: Coefficient = 0.01
    """Weight of the policy's entropy."""
    value_coefficient: float = Field(default=1.0, gt=0, le=MAX_COEFFICIENT)
    """Weight of the critic's loss."""
    normalize_values: bool = True
    """The critic predicts returns normalised to mean 0 and variance 1 (PopArt's statistics, van
    Hasselt et al. 2016, without the rescaling of the head)."""
    max_grad_norm: Norm = 10.0
    """Maximum global L2 norm of the gradients."""


class QLearningSpec(Section):
    """Q-learning from a replay buffer, off-policy: discrete actions only."""

    paradigm: Literal["dqn", "vdn", "qmix"] = "dqn"
    """`dqn`: independent agents (Mnih et al. 2015); `vdn`: the team's value is the sum of the
    agents' values (Sunehag et al. 2018); `qmix`: a monotonic mix of them that depends on the global
    state (Rashid et al. 2018)."""
    lr: float = Field(default=5e-4, gt=0, le=1000)
    """Adam's learning rate."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount per decision."""
    double: bool = True
    """`dqn`: double Q-learning (van Hasselt et al. 2016): the trained network selects the next
    action, the target network evaluates it. `vdn` and `qmix` use target networks for both."""
    buffer: int = Field(default=5000, ge=1, le=_MOST)
    """Episodes that the replay buffer holds."""
    batch: int = Field(default=32, ge=1, le=_MOST_AT_ONCE)
    """Episodes per gradient."""
    updates: int = Field(default=8, ge=1, le=_MOST_AT_ONCE)
    """Gradients per update."""
    warmup: int = Field(default=0, ge=0, le=_MOST)
    """Episodes in the buffer before the first gradient."""
    tau: float = Field(default=0.01, gt=0, le=1)
    """Update rate of the target networks after every gradient."""
    epsilon: tuple[Chance, Chance] = (1.0, 0.05)
    """Probability of a uniformly random action: at the beginning, and at the end."""
    epsilon_episodes: int = Field(default=2000, ge=1, le=1_000_000_000)
    """Episodes over which epsilon falls linearly."""
    mixer_width: Width = 32
    """`qmix`: units of the mixing network."""
    max_grad_norm: Norm = 10.0
    """Maximum global L2 norm of the gradients."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        _check_warmup(self)
        return self


class DeterministicSpec(Section):
    """MADDPG (Lowe et al. 2017), off-policy: deterministic actors, each with a critic of all
    agents' observations and actions. Discrete actions are relaxed by Gumbel-softmax."""

    paradigm: Literal["maddpg"] = "maddpg"
    """`maddpg`."""
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
    """Update rate of the target networks after every gradient."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """Temperature of the Gumbel-softmax."""
    noise: float = Field(default=0.1, ge=0, le=1000)
    """Continuous actions: standard deviation of the exploration noise, in halves of the range."""
    standardize_rewards: bool = False
    """Train the critic on rewards that are standardised by the mean and standard deviation of all
    earlier ones. Only for episodes of equal length: otherwise it changes the objective."""
    regularization: Coefficient = 1e-3
    """Weight of the squared logits in the policy's loss (the authors' code)."""
    max_grad_norm: Norm = 0.5
    """Maximum global L2 norm of the gradients."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        _check_warmup(self)
        return self


LearningSpec = Annotated[
    PPOSpec | QLearningSpec | DeterministicSpec, Field(discriminator="paradigm")
]


def _check_warmup(learning: QLearningSpec | DeterministicSpec) -> None:
    if learning.warmup > learning.buffer:
        raise ValueError(
            f"warmup: the buffer never holds {learning.warmup}, so there would be no learning; set "
            f"it to at most buffer = {learning.buffer}"
        )


class NetworkSpec(Section):
    """A small network instead of a language model."""

    kind: Literal["mlp", "rnn"] = "mlp"
    """`mlp`: actions depend on the current observation; `rnn`: on all observations of the episode,
    through a GRU behind the hidden layers."""
    hidden: tuple[Width, ...] = Field(default=(64, 64), max_length=64)
    """Units of the hidden layers of policy, critic and Q-network."""
    memory: Width = 64
    """`rnn`: units of the GRU."""
    activation: Literal["relu", "tanh", "elu", "gelu"] = "relu"
    """Activation function between layers."""
    parameters: Literal["shared", "per_agent"] = "shared"
    """Whether the agents of the policy share weights. If they do and there are several, each gets a
    one-hot agent id as further input."""
    learning: LearningSpec = PPOSpec()
    """How it is trained."""

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        if not self.hidden:
            raise ValueError("`hidden` needs at least one layer")
        if self.kind == "rnn" and self.learning.paradigm == "maddpg":
            raise ValueError("`maddpg` trains on single transitions; it needs `kind: mlp`")
        return self


class EnvironmentSpec(Section):
    """A vectorised environment (docs/networks.md), instead of `workflow` and `tasks`."""

    source: str = Field(min_length=1)
    """Name of a built-in environment, or `package.module:attribute` that returns a
    `VectorEnvironment` when called with `copies` and `args`. Rollout workers and trainers import
    it."""
    args: dict[str, Any] = {}
    """Keyword arguments of `source`."""
    copies: int = Field(default=32, ge=1, le=65_536)
    """Episodes per trajectory. They are played together, with one forward pass per step and policy,
    and form one sample of each trained policy."""

    _json = field_validator("args")(check_json)

    @field_validator("args")
    @classmethod
    def _copies_has_a_field(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "copies" in args:
            raise ValueError("copies: set `environment.copies`; `source` is called with it")
        return args
