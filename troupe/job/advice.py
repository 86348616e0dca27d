"""What a valid job says that is without effect, or that teaches nothing: told, not refused.

A switch that is flipped for a run (`pipeline.mode`, `trainable`) leaves settings of the other way
behind, and they should stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from troupe.job.policy import EngineSpec, OptimizerSpec, PolicySpec
from troupe.job.sections import PipelineSpec
from troupe.job.spec import JobSpec
from troupe.job.training import TrainerSpec

_OF_ONE_KIND = {"embedded": ("own_process",), "sglang": ("launch", "python", "update")}
# Of a policy's trainer section: when its seat is given back. Frozen ones have seats, too.
_OF_SEATS = ("quantum_seconds", "idle_seconds")


def advice(spec: JobSpec) -> list[str]:
    """One line each: the field by its path, why it is without effect, what to do.

    With its value if that is a number or a switch: others are long, or secret.
    """
    return [*_pipeline(spec), *_groups(spec), *_policies(spec)]


def _pipeline(spec: JobSpec) -> Iterator[str]:
    pipeline, usual = spec.pipeline, PipelineSpec(steps=1, queries_per_step=1)
    if pipeline.mode != "async" and pipeline.alpha != usual.alpha:
        yield (
            f"pipeline.alpha = {pipeline.alpha}: without effect in mode `{pipeline.mode}`, where "
            "all samples are of the newest version; use mode `async`, or leave it out"
        )
    if pipeline.max_refills and not pipeline.dynamic_sampling:
        yield (
            f"pipeline.max_refills = {pipeline.max_refills}: without effect without "
            "`dynamic_sampling`; set that, or leave it out"
        )


def _groups(spec: JobSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    of_groups = algorithm.advantage in ("grpo", "dr_grpo", "rloo")
    # Gradients that no reward goes into.
    others = algorithm.kl_coefficient or algorithm.entropy_coefficient
    if spec.environment is None and of_groups and not others and spec.pipeline.group_size == 1:
        yield (
            f"pipeline.group_size = 1: advantage `{algorithm.advantage}` measures a sample against "
            "its group, and one that is alone teaches nothing; raise it, unless trajectories have "
            "several samples of an agent with rewards of their own, or choose another "
            "algorithm.advantage"
        )


def _policies(spec: JobSpec) -> Iterator[str]:
    for name, policy in sorted(spec.policies.items()):
        if name in spec.slots:
            continue
        field = f"policies.{name}"
        if policy.network is None:
            yield from _engine(field, policy.engine)
        if not policy.trainable:
            yield from _frozen(field, policy)
            continue
        if policy.alpha is not None and spec.pipeline.mode != "async":
            yield (
                f"{field}.alpha = {policy.alpha}: without effect in mode `{spec.pipeline.mode}`; "
                "use mode `async`, or leave it out"
            )
        if policy.optimizer.warmup_steps >= spec.pipeline.steps:
            yield (
                f"{field}.optimizer.warmup_steps = {policy.optimizer.warmup_steps}: the job has "
                f"{spec.pipeline.steps} steps, so that the learning rate rises to its end; lower "
                "it, or raise pipeline.steps"
            )


def _engine(field: str, engine: EngineSpec) -> Iterator[str]:
    usual = EngineSpec()
    for kind, names in _OF_ONE_KIND.items():
        for name in names:
            if engine.kind != kind and _differ(engine, usual, name):
                yield (
                    f"{field}.engine.{_shown(engine, name)}: without effect with kind "
                    f"`{engine.kind}`; use kind `{kind}`, or leave it out"
                )


def _frozen(field: str, policy: PolicySpec) -> Iterator[str]:
    given = [] if policy.alpha is None else [_shown(policy, "alpha")]
    for section, usual in (("optimizer", OptimizerSpec()), ("trainer", TrainerSpec())):
        own = getattr(policy, section)
        given += [
            f"{section}.{_shown(own, name)}"
            for name in type(usual).model_fields
            if name not in _OF_SEATS and _differ(own, usual, name)
        ]
    for one in given:
        yield (
            f"{field}.{one}: without effect, the policy is frozen; set `trainable: true`, or leave "
            "it out"
        )


def _shown(section: object, name: str) -> str:
    value = getattr(section, name)
    return f"{name} = {value}" if isinstance(value, int | float) else name


def _differ(one: object, other: object, key: str) -> bool:
    return bool(getattr(one, key) != getattr(other, key))
