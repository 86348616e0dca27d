"""What a valid job says that is without effect, or that teaches nothing: told, not refused.

A switch that is flipped for a run (`pipeline.mode`, `trainable`) leaves settings of the other way
behind, and they should stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from troupe.job.policy import EngineSpec, OptimizerSpec, PolicySpec
from troupe.job.section import Section
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
    pipeline = spec.pipeline
    for given in _given(pipeline, ["alpha"] if pipeline.mode != "async" else []):
        yield (
            f"pipeline.{given}: without effect in mode `{pipeline.mode}`, where all samples are of "
            "the newest version; use mode `async`, or leave it out"
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
    for kind, names in _OF_ONE_KIND.items():
        for given in _given(engine, names if engine.kind != kind else []):
            yield (
                f"{field}.engine.{given}: without effect with kind `{engine.kind}`; use kind "
                f"`{kind}`, or leave it out"
            )


def _frozen(field: str, policy: PolicySpec) -> Iterator[str]:
    own_trainer = [name for name in TrainerSpec.model_fields if name not in _OF_SEATS]
    for given in (
        *_given(policy, ["alpha"]),
        *(f"optimizer.{one}" for one in _given(policy.optimizer, OptimizerSpec.model_fields)),
        *(f"trainer.{one}" for one in _given(policy.trainer, own_trainer)),
    ):
        yield (
            f"{field}.{given}: without effect, the policy is frozen; set `trainable: true`, or "
            "leave it out"
        )


def _given(section: Section, names: Iterable[str]) -> Iterator[str]:
    """Those of the fields that are not at their defaults, as they are told."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].get_default(call_default_factory=True):
            yield f"{name} = {value}" if isinstance(value, int | float) else name
