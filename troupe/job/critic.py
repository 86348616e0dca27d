"""The value function of `advantage: gae`: `algorithm.critic` in a job."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from troupe.job.policy import OptimizerSpec
from troupe.job.section import Coefficient, Section, Tokens

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
