"""Names of the metrics that a job logs, as far as its specification tells.

Workflows, own algorithms and kinds of learners log metrics of their own under known prefixes, so a
name below one of `_OPEN`, or of a policy, may exist although nothing here knows it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from troupe.contracts import metric_names

if TYPE_CHECKING:
    from troupe.job.fields import JobFields

# Prefixes of a step's metrics below which names follow from the workflow, or from what happened.
_OPEN: Final = (
    "balancing",
    "colocate",
    "curriculum",
    "environment",
    "population",
    "queries",
    "redundancy",
    "rollout",
    "split",
    "trajectories",
    "trajectory",
)
# Those among them that evaluations log, too.
_OPEN_IN_EVALUATIONS: Final = ("environment", "rollout", "trajectories", "trajectory")
# Metrics of a policy's update that most jobs have; for suggestions.
_OF_POLICY: Final = (
    metric_names.ENTROPY,
    metric_names.GRAD_NORM,
    metric_names.KL,
    metric_names.MISMATCH_KL,
    metric_names.POLICY_LOSS,
    metric_names.REWARD_MEAN,
    metric_names.REWARD_STD,
    metric_names.SIGNAL_STEPS,
    metric_names.STALENESS_MEAN,
    metric_names.ZERO_ADVANTAGES,
)


def evaluation_prefix(name: str) -> str:
    """Return the prefix of an evaluation's metrics; `name` is "" for the section `evaluation`."""
    return f"{metric_names.EVALUATIONS}{name}/" if name else metric_names.EVALUATION


def evaluation_of_metric(metric: str) -> str:
    """Return the name of the evaluation that logs `metric`; "" is the section `evaluation`."""
    found = metric.startswith(metric_names.EVALUATIONS)
    return metric.removeprefix(metric_names.EVALUATIONS).partition("/")[0] if found else ""


def evaluation_field(name: str) -> str:
    """Return the job's field of the evaluation `name`; "" is the section `evaluation`."""
    return f"evaluations.{name}" if name else "evaluation"


def metric_problem(spec: JobFields, metric: str) -> str:
    """Return why no step and no evaluation of the job logs `metric`, with names that are near to
    it; empty if one may."""
    played = () if spec.steps_are_offline else _rollout(spec)
    known = [*played, *_step(spec)]
    for name in spec.evaluation_sets:
        prefix = evaluation_prefix(name)
        names = (*_rollout(spec), *_solved(spec, name), *_team(spec, name))
        own = [f"{prefix}{one}" for one in names]
        known += own
        if metric.startswith(prefix):
            rest = metric.removeprefix(prefix)
            for bound in metric_names.BOUNDS:
                rest = rest.removesuffix(bound)
            if prefix + rest in own or _is_below(rest, (*_OPEN_IN_EVALUATIONS, "version")):
                return ""
    if metric in known or _is_below(metric, (*_OPEN, *spec.trained_policies)):
        return ""
    return f"`{metric}` is no metric of this job; " + suggestion(metric, known)


def suggestion(metric: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown metric: the names that are near to it, else some."""
    known = sorted(set(known))
    near = difflib.get_close_matches(metric, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(f"`{one}`" for one in near) + "?"
    return f"it logs {', '.join(known[:8])}" + (", ..." if len(known) > 8 else "")


def _is_below(metric: str, prefixes: Iterable[str]) -> bool:
    head, _, rest = metric.partition("/")
    return bool(rest) and head in prefixes


def _rollout(spec: JobFields) -> list[str]:
    """Return the metrics of trajectories, which steps and evaluations have."""
    return [
        metric_names.REWARD_MEAN,
        metric_names.TEAM_MEAN,
        *(metric_names.mean_reward(agent) for agent in spec.agents),
        *(f"response_length/{agent}" for agent in spec.agents),
        *(
            f"{share}{agent}"
            for share in (metric_names.TURN_SHARE, metric_names.TOKEN_SHARE)
            for agent in spec.agents
            if len(spec.agents) > 1
        ),
        metric_names.ROLLOUT_SECONDS,
        metric_names.TOKENS_PER_SECOND,
        "trajectories/failed",
    ]


def _step(spec: JobFields) -> list[str]:
    """Return the metrics that only steps have."""
    of_policies = (f"{policy}/{name}" for policy in spec.trained_policies for name in _OF_POLICY)
    return [
        metric_names.STEP_SECONDS,
        metric_names.STALENESS_MEAN,
        metric_names.STALENESS_MAX,
        *of_policies,
    ]


def _solved(spec: JobFields, name: str) -> list[str]:
    """Return the metrics of solved queries of an evaluation."""
    one = spec.evaluation_of(name)
    if not one.counts_solved:
        return []
    # Imported here because NumPy is slow to import and few jobs need it.
    from troupe.algorithms.scores import MOST_VOTERS, steps_of_k

    ks = steps_of_k(one.samples)
    return [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in ks if 1 < k <= MOST_VOTERS]


def _team(spec: JobFields, name: str) -> list[str]:
    """Return the metrics of agents that an evaluation judges and replaces."""
    judges = spec.evaluation_of(name).judges
    return [
        *(f"{metric_names.CONTRIBUTION}{agent}" for agent in spec.replaced_agents(name)),
        *(f"{metric_names.ACCEPTS_WRONG}{judge}" for judge in judges),
        *(f"{metric_names.REJECTS_RIGHT}{judge}" for judge in judges),
    ]
