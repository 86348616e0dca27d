"""How rewards become gradients: `algorithm` in a job."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from troupe.job.policy import OptimizerSpec
from troupe.job.section import Coefficient, Section, Tokens, TokensOrNone

TEAM_COLUMN: Final = "critic_context"
"""Column of a sample with what the rest of its team knew: int32 [n], token ids."""


class CriticSpec(Section):
    """A network per trained policy that predicts returns; docs/algorithms.md has the formulas.

    Its trunk begins as a copy of the policy's first weights, its head at zero. It is training
    state: versions, checkpoints for resuming and moves between trainers have it; what engines load
    and what `transformers` loads does not.
    """

    observes: Literal["agent", "team"] = "agent"
    """What a value is a function of. `agent`: what the agent itself sees, its prompt and what it
    has said. `team`: that, and what the other agents had seen and said when the turn was asked for
    (the centralized critic of MAPPO, Yu et al. 2022, section 3); the rollout brings it in the
    column `critic_context`. Needs at least two agents, and one tokenizer for all."""
    context_tokens: Tokens = 1024
    """`observes: team`: the last so many tokens of the other agents' are taken."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation (Schulman et al. 2016, equation 16): 1 trusts
    rewards only, 0 the values only."""
    value_clip: Coefficient = 0.2
    """Values are fitted within this distance of what they were when the step began (Schulman et
    al. 2017, the authors' code); 0: not clipped. Without effect in a step's first update."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Of the critic's weights."""


Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "rae", "gae"]
Loss = Literal["ppo_clip", "gspo", "cispo", "dppo_mask"]
Correction = Literal["none", "truncated", "masked", "sequence_masked"]


class AlgorithmSpec(Section):
    """How rewards become gradients; docs/algorithms.md has the formulas."""

    name: Literal["grpo"] = "grpo"
    """Policy optimization by clipped policy gradients; `advantage` and `loss` choose among GRPO
    (Shao et al. 2024, section 4.1) and its kin, PPO and MAPPO among them."""
    advantage: Advantage = "grpo"
    """What a sample's reward is measured against. `grpo`: its group's mean, in standard deviations;
    `dr_grpo`: its group's mean (Liu et al. 2025, section 3.2); `rloo`: the mean of its group's
    other samples (Ahmadian et al. 2024); `reinforce_plus_plus`: the mean of the step's samples, in
    their standard deviations (Hu et al. 2025), not in mode `micro_batch`; `rae`: a moving average
    of its agent's rewards in earlier steps (SPIRAL, Liu et al. 2025, section 3.3); `gae`: the
    values of a critic, token by token (PPO; Schulman et al. 2016, equation 16)."""
    critic: CriticSpec | None = None
    """`gae`: the value function; left out, one with all its defaults."""
    scale_by_std: bool = True
    """`grpo`: divide by the group's standard deviation; false is `dr_grpo`."""
    normalize_per_agent: bool = True
    """`reinforce_plus_plus`: mean and deviation of each agent's samples apart from those of other
    agents of its policy (Dr. MAS, Feng et al. 2026). Groups and `rae` are of one agent anyway."""
    rae_decay: float = Field(default=0.95, ge=0, lt=1)
    """`rae`: share of an agent's baseline that a sample leaves as it is."""
    group_by: Literal["agent", "turn", "branch"] = "agent"
    """Samples of one query that share a baseline. `agent`: those of one agent. `turn`: those of one
    turn of an agent, the replies of a `chat(n=k)` being one turn. `branch`: the replies of a
    `chat(n=k)` alone, with those of other trajectories only where they had the same prompt
    (AT-GRPO, Zhao et al. 2025, section 4.1); turns that were drawn alone are grouped as by
    `turn`."""
    loss: Loss = "ppo_clip"
    """What keeps a step near the policy that drew the samples. `ppo_clip`: the ratio pi/mu of each
    token, clipped (Schulman et al. 2017, equation 7); `gspo`: that of its sequence, per token
    (Zheng et al. 2025); `cispo`: each token's gradient weighted by min(pi/mu, 1 + `clip_high`)
    (MiniMax 2025, equation 4); `dppo_mask`: tokens whose probability moved by more than `clip_low`
    down or `clip_high` up carry no loss (Qi et al. 2026)."""
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """What the loss's ratio is against. `behaviour`: the log-probs that engines reported;
    `recomputed`: those of the weights that the step began with, while a correction weighs each
    token's loss by what it makes of their ratio to the engines'. With `ppo_clip` and `truncated`
    that is decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025, section 5.2)."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over the samples of a step, which makes one version whatever it is. Above 1 all rows
    are held until the step is complete: not in mode `micro_batch`."""
    minibatches: int = Field(default=1, ge=1, le=4096)
    """Optimizer updates per epoch, each with whole groups of about as many samples, in an order
    drawn from the job's seed. Above 1 as `epochs`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range of the importance ratio; `gspo` wants about 3e-4."""
    clip_high: float = Field(default=0.2, gt=0, le=1e9)
    """Upper clip range of the importance ratio (DAPO's clip-higher when larger); `gspo` wants about
    4e-4, `cispo` several times more than the others."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """Average the loss over all tokens of the global batch, over sequences, or divide the sum by a
    constant length per sequence, which favours no length (Dr. GRPO)."""
    constant_tokens: TokensOrNone = 0
    """`normalize: constant`: the length; 0: the largest `max_new_tokens` of the policy's agents."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the k3 estimate of KL(policy || first version) in the loss."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus."""
    correction: Correction | None = None
    """Importance correction for samples of older versions. `truncated`: every token's gradient is
    weighted by min(cap, pi/mu) (Espeholt et al. 2018, section 4.1; with one update per global batch
    the decoupled objective of AReaL, section 5.2, is the same); `masked`: tokens whose pi/mu is
    outside [1/cap, cap] carry no loss, the others are weighted by it; `sequence_masked`: the same
    with the product of pi/mu over a sample for all its tokens; `none`: only the loss's own clip.
    Losses other than `ppo_clip` weigh tokens by pi/mu themselves: with them a mask only takes
    tokens out, and `truncated` is refused, both only with `old_logprobs: behaviour`. Default:
    `none`; in mode `async`, which needs one, `truncated` with `ppo_clip`, else `masked`."""
    correction_cap: float = Field(default=2.0, ge=1, le=1e9)
    """The correction's cap on pi/mu."""

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.minibatches

    @property
    def value_function(self) -> CriticSpec | None:
        """The critic in force; None: advantages need no values."""
        return (self.critic or CriticSpec()) if self.advantage == "gae" else None

    @property
    def team_tokens(self) -> int:
        """Tokens of the other agents' that the critic in force observes; 0: none."""
        critic = self.value_function
        return critic.context_tokens if critic and critic.observes == "team" else 0

    @model_validator(mode="after")
    def _agree(self) -> Self:
        behaviour = self.old_logprobs == "behaviour"
        if self.correction == "truncated" and self.loss != "ppo_clip" and behaviour:
            raise ValueError(
                f"correction: loss `{self.loss}` weighs tokens by pi/mu itself, and `truncated` "
                "would do it again; choose `masked` or `sequence_masked`, loss `ppo_clip`, or "
                "old_logprobs `recomputed`"
            )
        if self.critic is not None and self.advantage != "gae":
            raise ValueError(
                f"critic: without effect with advantage `{self.advantage}`; remove it, or choose "
                "`gae`"
            )
        if self.advantage == "gae" and self.group_by != "agent":
            raise ValueError(
                f"group_by: with advantage `gae` nothing is measured against a group, and "
                f"`{self.group_by}` would cut an agent's turns apart; remove it"
            )
        if self.advantage != "reinforce_plus_plus" and not self.normalize_per_agent:
            raise ValueError(
                f"normalize_per_agent: with advantage `{self.advantage}` a baseline is of one "
                "agent anyway; remove it, or choose `reinforce_plus_plus`"
            )
        if self.constant_tokens and self.normalize != "constant":
            raise ValueError(
                f"constant_tokens: without effect with normalize `{self.normalize}`; remove it, or "
                "choose `constant`"
            )
        return self
