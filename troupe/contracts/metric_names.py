"""Names of metrics that one file writes and another reads.

Services report them, the orchestrator adds them up and logs them; the client, the panel and
benchmarks look them up. The panel's scripts and the dashboards in `deploy/grafana` cannot import
them: tests hold their names against these. Names that have no reader but people stand where they
are written; docs/training.md explains them.
"""

from __future__ import annotations

from typing import Final

# --- A trajectory ----------------------------------------------------------------------------

ENVIRONMENT_RETRIES: Final = "environment_retries"
"""How often it was begun again after its environment or a tool failed."""

UNUSED_ENDPOINT: Final = "endpoint_unused"
"""1 if it opened an endpoint, made no turn there, and was rewarded all the same."""

# --- A policy's update, as `<policy>/<name>` in the metrics of the step -----------------------

ZERO_ADVANTAGES: Final = "advantage/zero_fraction"
"""The share of response tokens whose advantage is zero."""

ENTROPY: Final = "entropy"

GRAD_NORM: Final = "grad_norm"

KL: Final = "kl"
"""To the reference policy."""

MISMATCH_KL: Final = "k3_kl"
"""To the policy that engines drew the tokens with."""

POLICY_LOSS: Final = "loss/policy"

RATIO_MAX: Final = "importance_sampling_ratio/max"

REWARD_MEAN: Final = "reward/mean"
"""Also, without a policy, the mean over all trajectories of the step."""

REWARD_STD: Final = "reward/std"

STALENESS_MEAN: Final = "staleness/mean"
"""By how many versions samples were older than the one that was trained. Also over all policies."""

STALENESS_MAX: Final = "staleness/max"

TRAIN_SECONDS: Final = "train/seconds"

PUBLISH_SECONDS: Final = "train/publish_seconds"

MICRO_BATCHES: Final = "train/micro_batches"

VALUES_GONE: Final = "train/values_gone"
"""Samples that were dropped since stored values of theirs were lost."""

SAMPLES: Final = "samples"
"""Samples that the update was made of."""

NO_SIGNAL: Final = "no_signal"
"""1 if the update taught nothing: all advantages were zero."""

SKIPPED: Final = "skipped"
"""1 if the update was not applied."""

SIGNAL_STEPS: Final = "signal_steps"
"""How many steps so far taught the policy something."""

# --- A step ----------------------------------------------------------------------------------

STEP_SECONDS: Final = "step/seconds"

ROLLOUT_SECONDS: Final = "rollout/seconds"

TOKENS_PER_SECOND: Final = "rollout/tokens_per_second"
"""Tokens that were generated per second of the rollout."""

TEAM: Final = "team"
"""A reward of this name belongs to no agent: it says how the team did."""

TEAM_MEAN: Final = f"{TEAM}/mean"


def mean_reward(agent: str) -> str:
    """The metric of an agent's mean reward."""
    return f"reward/{agent}/mean"


# --- An evaluation ---------------------------------------------------------------------------

EVALUATION: Final = "evaluation/"
"""What the metrics of the job's section `evaluation` begin with."""

EVALUATIONS: Final = "evaluations/"
"""What the metrics of named evaluations begin with; their name follows."""

TEAM_SCORE: Final = "team_success"
"""The score that is the mean of the team's rewards."""

BOUNDS: Final = ("/low", "/high")
"""What the bounds of a metric's confidence interval are named after it."""
