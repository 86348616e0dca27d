"""Names of metrics that one file writes and another reads.

Services report them, the orchestrator aggregates and logs them; the client, the panel and
benchmarks look them up. The panel's scripts and the dashboards in `deploy/grafana` cannot import
them, so tests compare the names there with these. Names that only people read are defined where
they are written; docs/training.md explains them.
"""

from __future__ import annotations

from typing import Final

# --- A trajectory ----------------------------------------------------------------------------

ENVIRONMENT_RETRIES: Final = "environment_retries"
"""The number of times it was restarted after its environment or a tool failed."""

UNUSED_ENDPOINT: Final = "endpoint_unused"
"""1 if it opened an endpoint, made no turn there, and was rewarded anyway."""

AGREEMENT: Final = "agreement/"
"""The share of the other agents' answers that equal an agent's answer; the agent's name follows."""

COPYING: Final = "copying/"
"""The share of an agent's text that another agent wrote first; the agent's name follows."""

ACCEPTS: Final = "accepts/"
"""1 if a judge's last reply accepts; the judge's name follows."""

# --- A policy's update, as `<policy>/<name>` in the metrics of the step -----------------------

ZERO_ADVANTAGES: Final = "advantage/zero_fraction"
"""The share of response tokens whose advantage is zero."""

ENTROPY: Final = "entropy"

GRAD_NORM: Final = "grad_norm"

LEARNING_RATE: Final = "lr"

CRITIC_LEARNING_RATE: Final = "critic/lr"

KL: Final = "kl"
"""The KL divergence from the reference policy."""

MISMATCH_KL: Final = "k3_kl"
"""The KL divergence from the policy that the engines sampled the tokens with."""

POLICY_LOSS: Final = "loss/policy"

RATIO_MAX: Final = "importance_sampling_ratio/max"

REWARD_MEAN: Final = "reward/mean"
"""Without a policy, also the mean over all trajectories of the step."""

REWARD_STD: Final = "reward/std"

STALENESS_MEAN: Final = "staleness/mean"
"""The lag of samples behind the trained version, in versions. Also over all policies."""

STALENESS_MAX: Final = "staleness/max"

TRAIN_SECONDS: Final = "train/seconds"

PUBLISH_SECONDS: Final = "train/publish_seconds"

MICRO_BATCHES: Final = "train/micro_batches"

VALUES_GONE: Final = "train/values_gone"
"""The number of samples dropped because their stored values were lost."""

SAMPLES: Final = "samples"
"""The number of samples in the update."""

NO_SIGNAL: Final = "no_signal"
"""1 if the update had no signal: all advantages were zero."""

SKIPPED: Final = "skipped"
"""1 if the update was not applied."""

SIGNAL_STEPS: Final = "signal_steps"
"""The number of steps so far in which the policy had a signal."""

# --- A step ----------------------------------------------------------------------------------

STEP_SECONDS: Final = "step/seconds"

ROLLOUT_SECONDS: Final = "rollout/seconds"

TOKENS_PER_SECOND: Final = "rollout/tokens_per_second"
"""The number of tokens generated per second of the rollout."""

TEAM: Final = "team"
"""The name of the team's reward, which belongs to no agent."""

TEAM_MEAN: Final = f"{TEAM}/mean"


def mean_reward(agent: str) -> str:
    """Return the metric of an agent's mean reward."""
    return f"reward/{agent}/mean"


TURN_SHARE: Final = "turn_share/"
"""The share of all turns that an agent took; the agent's name follows."""

TOKEN_SHARE: Final = "token_share/"
"""The share of all response tokens that an agent wrote; the agent's name follows."""

# --- An evaluation ---------------------------------------------------------------------------

EVALUATION: Final = "evaluation/"
"""The prefix of the metrics of the job's section `evaluation`."""

EVALUATIONS: Final = "evaluations/"
"""The prefix of the metrics of named evaluations; the evaluation's name follows."""

TEAM_SCORE: Final = "team_success"
"""The score that is the mean of the team's rewards."""

BOUNDS: Final = ("/low", "/high")
"""The suffixes of the bounds of a metric's confidence interval."""

CONTRIBUTION: Final = "contribution/"
"""The success as played minus the success with an agent replaced; the agent's name follows."""

ACCEPTS_WRONG: Final = "accepts_wrong/"
"""The share of unsolved queries that a judge accepts; the judge's name follows."""

REJECTS_RIGHT: Final = "rejects_right/"
"""The share of solved queries that a judge rejects; the judge's name follows."""
