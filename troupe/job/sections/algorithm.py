"""How rewards become gradients: `algorithm` in a job."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from troupe.algorithms.traits import (
    AdvantageTraits,
    LossTraits,
    advantage_traits,
    advantages_that,
    loss_traits,
    losses_that,
)
from troupe.job.section import (
    MAX_AGENTS,
    Coefficient,
    ColumnName,
    Section,
    Tokens,
    TokensOrNone,
    check_entrypoint,
)
from troupe.job.sections.policy import OptimizerSpec

TEAM_COLUMN: Final = "critic_context"
"""Column of a sample with the other agents' tokens for the critic: int32 [n], token ids."""
REFERENCE_COLUMN: Final = "reference_logprobs"
"""Column of log-probs under the first version, which saves the trainer a forward pass."""
TEACHER_COLUMN: Final = "teacher_logprobs"
"""Column of log-probs under the agent's teacher (`distillation`): float32 [response_len]."""
ROUTES_COLUMN: Final = "routed_experts"
"""Column of the experts to which the engine sent each token (`router_replay`): uint8, or int16 for
more than 256 experts, [prompt_len + response_len - 1, layers, k]; zeros in layers without any."""


class CriticSpec(Section):
    """A network per trained policy that predicts returns; docs/algorithms.md has the formulas.

    Its trunk is initialised with the policy's first weights, its head with zeros. It is part of the
    training state (checkpoints for resuming, moves between trainers), not of the weights that
    engines and `transformers` load.
    """

    observes: Literal["agent", "team"] = "agent"
    """Input of the value function. `agent`: the agent's own prompt and response. `team`: these, and
    the other agents' prompts and responses at the time of the turn (the centralized critic of
    MAPPO, Yu et al. 2022, section 3), which rollout stores in the column `critic_context`. Needs at
    least two agents with one tokenizer."""
    context_tokens: Tokens = 1024
    """`observes: team`: number of tokens of the other agents that are used, the last ones."""
    episodes: Literal["agent", "team"] = "agent"
    """Whose turns follow one another. `agent`: each agent's turns of a trajectory are an episode.
    `team`: the turns of all agents that share the policy are one episode, in the order in which
    they began, which one value function predicts; its last turn earns the mean of the agents'
    rewards."""
    values: Literal["token", "turn"] = "token"
    """`token`: a value before each token. `turn`: one value before each turn, of its prompt alone;
    all tokens of a turn have its advantage, `gamma` and `gae_lambda` are per turn, and the critic
    reads no responses."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, or per turn with `values: turn`."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation (Schulman et al. 2016, equation 16): 1 uses
    rewards only, 0 the one-step value estimate."""
    value_clip: Coefficient = 0.2
    """Clip range of values around those at the beginning of the step (Schulman et al. 2017, the
    authors' code); 0: not clipped. Without effect in the first update of a step."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer of the critic's weights."""


class StepGroupsSpec(Section):
    """`gigpo` and `hgpo`: groups of turns of a query that began with the same observation."""

    observation: ColumnName | None = None
    """Column in which the workflow sets the observation of each turn (`reply.columns["state"] =
    ...`). Default: the turn's prompt; a prompt that contains the conversation is seldom met
    twice."""
    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount per turn of the returns that are compared."""
    weight: Coefficient = 1.0
    """`gigpo`: weight of the turn's advantage, relative to the episode's."""
    history: int = Field(default=2, ge=0, le=64)
    """`hgpo`: number of earlier observations that the smallest groups have in common."""
    alpha: float = Field(default=1.0, ge=0, le=16)
    """`hgpo`: a group with k earlier observations in common has the weight (k + 1)^alpha."""


Advantage = Literal[
    "grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "rae", "gigpo", "hgpo", "gae"
]
Loss = Literal["ppo_clip", "gspo", "cispo", "dppo_mask"]
Correction = Literal["none", "truncated", "masked", "sequence_masked"]


def _or_own(choices: Any) -> AfterValidator:
    """Return a validator of one of `choices` (a Literal), or of the path of a user's own
    function."""

    def check(value: str) -> str:
        if ":" in value:
            return check_entrypoint(value)
        if value not in (built_in := get_args(choices)):
            raise ValueError(
                f"is not one of {', '.join(built_in)}; choose one, or write "
                "`package.module:function` for your own"
            )
        return value

    return AfterValidator(check)


AdvantageOrOwn = Annotated[Advantage | str, _or_own(Advantage)]
LossOrOwn = Annotated[Loss | str, _or_own(Loss)]
CorrectionOrOwn = Annotated[Correction | str, _or_own(Correction)]


class DistillationSpec(Section):
    """On-policy distillation: agents learn from frozen policies, by the reverse KL divergence per
    token on their own samples (Agarwal et al. 2024, GKD; Gu et al. 2024, MiniLLM)."""

    teachers: dict[str, str] = Field(min_length=1, max_length=MAX_AGENTS)
    """The teacher of each agent: a policy with `trainable: false` and the agent's tokenizer. Agents
    that are not named learn from rewards."""
    divergence: Literal["full", "sampled"] = "full"
    """`full`: the loss of a token has the term `coefficient` KL(pi || teacher) over the whole
    vocabulary; trainers hold the teachers. `sampled`: the teacher's engines give the log-probs of
    the sampled tokens, and log teacher(a_t) - log mu(a_t), times `coefficient`, is added to A_t."""
    coefficient: Coefficient = 1.0
    """Weight of the divergence."""
    rewards: bool = False
    """Whether agents with a teacher learn from their rewards, too."""


class AlgorithmSpec(Section):
    """How rewards become gradients; docs/algorithms.md has the formulas. `advantage`, `loss` and
    `correction` also take `package.module:function`, a function of the user's own that trainer
    workers import."""

    name: Literal["grpo"] = "grpo"
    """Policy optimization by clipped policy gradients; `advantage` and `loss` select the
    variant: GRPO (Shao et al. 2024, section 4.1), its relatives, PPO and MAPPO."""
    advantage: AdvantageOrOwn = "grpo"
    """Baseline and scale of a sample's reward. `grpo`: its group's mean, in standard deviations;
    `dr_grpo`: its group's mean (Liu et al. 2025, section 3.2); `rloo`: the mean of its group's
    other samples (Ahmadian et al. 2024); `maxrl`: its group's mean, in means (Tajwar et al. 2026),
    for rewards of 0 or 1; `reinforce_plus_plus`: the mean of the step's samples, in
    their standard deviations (Hu et al. 2025), not in mode `micro_batch`; `rae`: a moving average
    of its agent's rewards in earlier steps (SPIRAL, Liu et al. 2025, section 3.3); `gigpo`: the
    mean return of the group, plus the mean return of turns with the same observation (Feng et al.
    2025, equation 8); `hgpo`: the mean returns of turns with the same latest observations, 1 to
    `history` + 1 of them (He et al. 2026); `gae`: the values of a critic, token by token (PPO;
    Schulman et al. 2016, equation 16)."""
    critic: CriticSpec | None = None
    """`gae`: the value function. Default: one with all defaults."""
    step_groups: StepGroupsSpec | None = None
    """`gigpo`, `hgpo`: how turns are compared. Default: all defaults."""
    scale_by_std: bool = True
    """`grpo`, `gigpo`, `hgpo`: divide by the group's standard deviation; false is `dr_grpo`."""
    normalize_per_agent: bool = True
    """`reinforce_plus_plus`: mean and deviation per agent, not over all agents of the policy (Dr.
    MAS, Feng et al. 2026). With groups and `rae` baselines are always per agent."""
    rae_decay: float = Field(default=0.95, ge=0, lt=1)
    """`rae`: decay of the moving average per sample."""
    group_by: Literal["agent", "turn", "branch", "query"] = "agent"
    """Which samples of a query form a group. `agent`: all of one agent. `turn`: all of one turn of
    an agent; the replies of a `chat(n=k)` are one turn. `branch`: the replies of one `chat(n=k)`,
    and replies of other trajectories to the same prompt (AT-GRPO, Zhao et al. 2025, section 4.1);
    turns without `n` are grouped as by `turn`. `query`: all of the policy, of whichever agent (the
    global baseline with which Dr. MAS is compared). A workflow overrides it for a reply by
    `reply.group = "key"`: equal keys of a query form a group."""
    baseline_weight: Literal["sample", "trajectory"] = "sample"
    """What counts once in a baseline's mean and deviation. `sample`: every sample, so that long
    trajectories weigh more. `trajectory`: the mean reward of a trajectory's samples in the group
    (`reinforce_plus_plus` and `rae`: in the step, of the agent)."""
    columns: tuple[ColumnName, ...] = Field(default=(), max_length=16)
    """Columns of samples (`reply.columns`) that the user's own advantage reads as
    `SampleBatch.columns`."""
    loss: LossOrOwn = "ppo_clip"
    """Policy-gradient loss, with pi the trained and mu the sampling policy. `ppo_clip`: the ratio
    pi/mu of each token, clipped (Schulman et al. 2017, equation 7); `gspo`: the sequence's ratio
    (geometric mean), clipped (Zheng et al. 2025); `cispo`: each token's gradient weighted by
    min(pi/mu, 1 + `clip_high`) (MiniMax 2025, equation 4); `dppo_mask`: tokens whose probability
    moved by more than `clip_low` down or `clip_high` up carry no loss (Qi et al. 2026)."""
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """Denominator of the loss's ratio. `behaviour`: the log-probs that engines reported;
    `recomputed`: log-probs under the weights at the beginning of the step; `correction` then weighs
    each token by their ratio to the engines' log-probs. With `ppo_clip` and `truncated` this is
    decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025, section 5.2)."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over the samples of a step; a step still makes one version. Above 1 the samples are
    kept until the step is complete: not in mode `micro_batch`."""
    minibatches: int = Field(default=1, ge=1, le=4096)
    """Optimizer updates per epoch, each on whole groups and about equally many samples, in random
    order (from the job's seed). Above 1: not in mode `micro_batch`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range of the importance ratio; `gspo` needs about 3e-4."""
    clip_high: float = Field(default=0.2, gt=0, le=1e9)
    """Upper clip range of the importance ratio (DAPO's clip-higher when larger); `gspo` needs about
    4e-4, `cispo` a multiple of the others' range."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e9)
    """`ppo_clip`, `gspo`: bound on the ratio of tokens with a negative advantage, beyond which they
    have no gradient (dual-clip PPO, Ye et al. 2020; 3 is usual). Default: none."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """Average the loss over all tokens of the global batch, over sequences, or divide the sum by a
    constant length per sequence, which has no length bias (Dr. GRPO)."""
    constant_tokens: TokensOrNone = 0
    """`normalize: constant`: the length; 0: the largest `max_new_tokens` of the policy's agents."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the divergence from the first version (`kl_in`)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: the k3 estimate of KL(policy || first version) is added to the loss of each token.
    `reward`: log mu(a_t) - log ref(a_t), mu the sampling policy and ref the first version, is
    subtracted from what each token earned (Stiennon et al. 2020, section 3.4); group methods
    subtract the sum over the sample from its reward, and groups compare the differences."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus."""
    correction: CorrectionOrOwn | None = None
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
    distillation: DistillationSpec | None = None
    """Frozen policies as teachers, alone or in addition to rewards. Default: none."""
    router_aux_loss: Coefficient = 0.0
    """Mixtures of experts: weight of the loss that evens out the experts' load (Fedus et al. 2021,
    equation 4, over each sample's response; 1e-3 is usual). Without effect on dense policies."""
    router_replay: bool = False
    """Mixtures of experts: the trainer sends every token to the experts that the engine sent it to
    (R3, Ma et al. 2025), which keeps log-probs of both close. Engines return the experts with each
    turn, one byte (above 256 experts: two) per token, layer and expert of a token. Without effect
    on dense policies."""

    @property
    def own_functions(self) -> bool:
        """Whether a loss, an advantage or a correction is the user's own."""
        return any(":" in (name or "") for name in (self.loss, self.advantage, self.correction))

    @property
    def loss_traits(self) -> LossTraits:
        """Traits of the loss."""
        return loss_traits(self.loss)

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * self.minibatches

    @property
    def user_columns(self) -> tuple[str, ...]:
        """Columns that a workflow sets and the advantage reads."""
        observation = None if self.step_groups is None else self.step_groups.observation
        return self.columns if observation is None else (*self.columns, observation)

    @property
    def grouped_by_workflow(self) -> bool:
        """Whether `reply.group` overrides `group_by`; not where advantages are computed along the
        turns of an agent, which one group must contain."""
        return not self.advantage_traits.along_episodes

    @property
    def kl_penalty(self) -> float:
        """Weight of the divergence from the first version in rewards."""
        return self.kl_coefficient if self.kl_in == "reward" else 0.0

    @property
    def kl_loss(self) -> float:
        """Weight of the divergence from the first version in the loss."""
        return self.kl_coefficient if self.kl_in == "loss" else 0.0

    @property
    def grouping(self) -> Literal["agent", "turn", "branch", "query"]:
        """`group_by`, or what contains the episodes of the critic in force."""
        critic = self.value_function
        return "query" if critic and critic.episodes == "team" else self.group_by

    @property
    def learns_without_advantages(self) -> bool:
        """Whether a sample with zero advantage may contribute to learning: by a teacher, or by a
        user's own loss. Regularizers do not count."""
        return self.distillation is not None or not self.loss_traits.scales_with_advantage

    @property
    def advantage_traits(self) -> AdvantageTraits:
        """Traits of `advantage`."""
        return advantage_traits(self.advantage)

    @property
    def value_function(self) -> CriticSpec | None:
        """The critic in force; None: advantages need no values."""
        return (self.critic or CriticSpec()) if self.advantage_traits.by_values else None

    @property
    def team_tokens(self) -> int:
        """Number of the other agents' tokens that the critic in force observes; 0: none."""
        critic = self.value_function
        return critic.context_tokens if critic and critic.observes == "team" else 0

    @model_validator(mode="after")
    def _agree(self) -> Self:
        behaviour = self.old_logprobs == "behaviour"
        if self.correction == "truncated" and not self.loss_traits.yields and behaviour:
            raise ValueError(
                f"correction: loss `{self.loss}` weighs tokens by pi/mu itself, and `truncated` "
                "would do it again; choose `masked` or `sequence_masked`, loss "
                f"{losses_that(lambda traits: traits.yields)}, or old_logprobs `recomputed`"
            )
        traits = self.advantage_traits
        if self.critic is not None and not traits.by_values:
            raise ValueError(
                f"critic: without effect with advantage `{self.advantage}`; remove it, or choose "
                f"{advantages_that(lambda one: one.by_values)}"
            )
        if traits.by_values and self.group_by != "agent":
            raise ValueError(
                f"group_by: with advantage `{self.advantage}` nothing is measured against a group, "
                f"and `{self.group_by}` would cut an agent's turns apart; remove it"
            )
        if not traits.normalizes and not self.normalize_per_agent:
            raise ValueError(
                f"normalize_per_agent: with advantage `{self.advantage}` a baseline is of one "
                f"agent anyway; remove it, or choose {advantages_that(lambda one: one.normalizes)}"
            )
        if traits.along_episodes and self.group_by in ("turn", "branch"):
            raise ValueError(
                f"group_by: advantage `{self.advantage}` compares whole episodes, and "
                f"`{self.group_by}` would cut an agent's turns apart; choose `agent` or `query`"
            )
        if self.step_groups is not None and not traits.by_observations:
            raise ValueError(
                f"step_groups: without effect with advantage `{self.advantage}`; remove it, or "
                f"choose {advantages_that(lambda one: one.by_observations)}"
            )
        if not traits.averages and self.baseline_weight != "sample":
            raise ValueError(
                f"baseline_weight: advantage `{self.advantage}` has no baseline over trajectories; "
                "remove it"
            )
        if self.columns and ":" not in self.advantage:
            raise ValueError(
                f"columns: advantage `{self.advantage}` reads none; remove it, or name a function "
                "of your own as `advantage`"
            )
        if self.dual_clip is not None and not self.loss_traits.reads_dual_clip:
            raise ValueError(
                f"dual_clip: without effect with loss `{self.loss}`, which bounds the weight of "
                "every token; remove it, or choose "
                f"{losses_that(lambda traits: traits.reads_dual_clip)}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip: {self.dual_clip:g} is not above 1 + clip_high = "
                f"{1 + self.clip_high:g}; a negative advantage would be clipped more tightly than "
                "a positive one; 3 is usual"
            )
        if self.kl_in == "reward" and not self.kl_coefficient:
            raise ValueError("kl_in: without effect while kl_coefficient is 0; set that, too")
        if self.constant_tokens and self.normalize != "constant":
            raise ValueError(
                f"constant_tokens: without effect with normalize `{self.normalize}`; remove it, or "
                "choose `constant`"
            )
        return self
