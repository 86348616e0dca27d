"""Checks that a job's evaluations, and what chooses by their metrics, fit the rest of the job."""

from __future__ import annotations

from troupe.contracts import metric_names
from troupe.job.fields import JobFields
from troupe.job.metrics import (
    evaluation_field,
    evaluation_of_metric,
    evaluation_prefix,
    metric_problem,
)
from troupe.job.section import MAX_TRAJECTORIES
from troupe.job.sections.population import slot_problem
from troupe.job.sections.run import EvaluationSetSpec, EvaluationSpec


def check_evaluations(job: JobFields) -> None:
    """Raise ValueError that names the field of an evaluation, of `checkpoint.best` or of `stop`."""
    tasks = job.tasks
    for name, one in job.evaluation_sets.items():
        field = evaluation_field(name)
        own = one.tasks if isinstance(one, EvaluationSetSpec) else None
        if own is None and tasks is not None and not tasks.holds_out:
            raise ValueError(
                f"tasks.held_out: is missing, but `{field}` needs it; name a split or a file, "
                "or a fraction (0.05) of the rows"
            )
        if job.environment is not None and (own is not None or not one.queries):
            raise ValueError(
                f"{field}.{'tasks' if own else 'queries'}: networks play the environment; say "
                "how many `queries`, and no tasks"
            )
        if name in ("reward", "trajectories"):
            raise ValueError(f"{field}: metrics have this name; choose another")
        check_success(job, field, one.success)
        _check_judges(job, field, one)
        _check_contributions(job, field, name)
    if not job.pipeline.steps and not job.evaluation_sets:
        raise ValueError(
            "pipeline.steps: with 0 steps there is no training, and the job has no evaluation; "
            "set evaluation.queries, or take steps"
        )
    best = job.checkpoint.best
    if best is not None:
        prefixes = tuple(evaluation_prefix(name) for name in job.evaluation_sets)
        if not best.metric.startswith(prefixes):
            raise ValueError(
                f"checkpoint.best.metric: `{best.metric}` is of no evaluation of this job; its "
                f"metrics begin with {', '.join(prefixes) or 'nothing: it has none'}"
            )
    _check_stop(job)


def _check_stop(job: JobFields) -> None:
    stop, best = job.stop, job.checkpoint.best
    if stop is None:
        return
    if problem := metric_problem(job, stop.metric):
        raise ValueError(f"stop.metric: {problem}")
    if stop.of_evaluation:
        name = evaluation_of_metric(stop.metric)
        if not job.evaluation_of(name).every:
            field = evaluation_field(name)
            raise ValueError(
                f"{field}.every: is 0, so `stop` would see no value before the last step; set "
                "the steps between evaluations"
            )
    elif stop.best and job.pipeline.mode == "async":
        raise ValueError(
            "stop.best: in mode `async` steps overlap, so no checkpoint belongs to a value of "
            f"`{stop.metric}`; choose a metric of an evaluation, or another mode"
        )
    if stop.best and best is not None and (best.metric, best.mode) != (stop.metric, stop.mode):
        raise ValueError(
            f"stop.best: checkpoint.best already chooses by `{best.metric}` (mode "
            f"`{best.mode}`), and a job keeps one best checkpoint; leave one of them out"
        )


def check_success(job: JobFields, field: str, success: str | None) -> None:
    """Raise ValueError that names the field unless `success` is an agent or a reward."""
    known = (metric_names.TEAM, *job.agents, *job.rewards)
    if success is not None and success not in known:
        raise ValueError(
            f"{field}.success: '{success}' is neither an agent nor one of `rewards`; "
            f"known: {', '.join(known)}"
        )


def _check_judges(job: JobFields, field: str, evaluation: EvaluationSpec) -> None:
    """Raise ValueError that names the field for a judge that is no agent."""
    for judge in evaluation.judges:
        if judge not in job.agents:
            known = ", ".join(sorted(job.agents))
            raise ValueError(f"{field}.judges: '{judge}' is not an agent; known: {known}")


def _check_contributions(job: JobFields, field: str, name: str) -> None:
    """Raise ValueError that names the field if agents of evaluation `name` cannot be replaced."""
    evaluation = job.evaluation_of(name)
    spec = evaluation.contributions
    if spec is None:
        return
    field = f"{field}.contributions"
    if spec.by is not None:
        if spec.by not in job.policies:
            known = ", ".join(sorted(job.policies))
            raise ValueError(f"{field}.by: '{spec.by}' is not a policy; known: {known}")
        if spec.by in job.slots:
            raise ValueError(f"{field}.by: {slot_problem(spec.by)}")
        if job.policies[spec.by].trainable:
            raise ValueError(
                f"{field}.by: '{spec.by}' is trained, so contributions before and after would "
                "be relative to different weights; name a policy with `trainable: false`"
            )
    for agent in spec.agents:
        if agent not in job.agents:
            known = ", ".join(sorted(job.agents))
            raise ValueError(f"{field}.agents: '{agent}' is not an agent; known: {known}")
        if job.agents[agent].policy == spec.by:
            raise ValueError(
                f"{field}.agents: '{spec.by}' plays '{agent}' anyway, so nothing would be "
                "replaced; leave the agent out"
            )
    if not (replaced := job.replaced_agents(name)):
        raise ValueError(f"{field}.by: '{spec.by}' plays all agents, so nothing is replaced")
    queries = min(spec.queries, evaluation.queries or spec.queries)
    total = queries * evaluation.samples * len(replaced)
    if total > MAX_TRAJECTORIES:
        raise ValueError(
            f"{field}.queries: {total:,} trajectories with one of {len(replaced)} agents replaced "
            f"are more than {MAX_TRAJECTORIES:,}; lower it"
        )
