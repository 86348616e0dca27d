"""Comparison of job specifications: whether a job may be resumed under a changed one; and settings
without effect.

A resumed job may change its length and speed, learning rates, how its agents sample, evaluations
and logging (`CHANGEABLE`), from the first step that is not done; but not what it learns from and
towards (`_REASONS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from troupe.job.engines import KINDS, kinds_with
from troupe.job.engines.sharing import reasons_apart
from troupe.job.section import Section
from troupe.job.sections.policy import EngineSpec, OptimizerSpec, PolicySpec, TrainerSpec
from troupe.job.sections.run import EvaluationSpec
from troupe.job.spec import JobSpec

# Trainer settings that also matter for frozen policies, since they have leases.
_OF_LEASES = ("quantum_seconds", "idle_seconds")


def advice(spec: JobSpec) -> list[str]:
    """Return the settings without effect, or that keep policies from sharing engines, one line
    each: field path, reason, remedy.

    Numbers and switches are shown with their values; other values may be long or secret.
    """
    return [
        *_pipeline(spec),
        *_groups(spec),
        *_policies(spec),
        *_evaluation(spec),
        *_engines_apart(spec),
    ]


def _engines_apart(spec: JobSpec) -> Iterator[str]:
    for one, other, fields in reasons_apart(spec):
        yield (
            f"policies.{other}.{fields[0]}: differs from '{one}', so each of them has engines "
            "and a base of its own; make them equal, or set `engine.share: never`"
        )


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


def _evaluation(spec: JobSpec) -> Iterator[str]:
    if spec.evaluation.queries:
        return
    for given in _given(spec.evaluation, EvaluationSpec.model_fields):
        yield (
            f"evaluation.{given}: without effect without `queries`, of which there is no default "
            "here; set that, or leave it out"
        )


def _groups(spec: JobSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    of_groups = algorithm.advantage_traits.compares
    # These gradients do not depend on rewards.
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
        if policy.trainer.shard != "auto" and policy.trainer.gang in (None, 1):
            yield (
                f"{field}.trainer.shard: without effect without a gang; set `gang`, or leave it out"
            )
        if policy.alpha is not None and spec.pipeline.mode != "async":
            yield (
                f"{field}.alpha = {policy.alpha}: without effect in mode `{spec.pipeline.mode}`; "
                "use mode `async`, or leave it out"
            )
        if policy.optimizer.warmup_steps >= spec.pipeline.steps > 0:
            yield (
                f"{field}.optimizer.warmup_steps = {policy.optimizer.warmup_steps}: the learning "
                f"rate rises until the job's last step, {spec.pipeline.steps}; lower it, or raise "
                "pipeline.steps"
            )


def _engine(field: str, engine: EngineSpec) -> Iterator[str]:
    for name in KINDS[engine.kind].without_effect:
        for given in _given(engine, [name]):
            yield (
                f"{field}.engine.{given}: without effect with kind `{engine.kind}`; use kind "
                f"{kinds_with(name)}, or leave it out"
            )


def _frozen(field: str, policy: PolicySpec) -> Iterator[str]:
    own_trainer = [name for name in TrainerSpec.model_fields if name not in _OF_LEASES]
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
    """Yield the fields among `names` that are not at their defaults, as text."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].get_default(call_default_factory=True):
            yield f"{name} = {value}" if isinstance(value, int | float) else name


_CHANGEABLE_COSTS: Final = (
    "timeout_seconds",
    "memory_mib",
    "max_concurrency",
    "max_queued",
    "retries",
    "idle_seconds",
    "min_workers",
)
# Fields that may change, with everything below them; `*` stands for a name. All other fields,
# including new ones, may not.
CHANGEABLE: Final = (
    "code",
    "pipeline.steps",
    "pipeline.alpha",
    "pipeline.micro_batch_samples",
    "pipeline.micro_batch_tokens",
    "pipeline.balance_tokens",
    "agents.*.sampling.temperature",
    "agents.*.sampling.top_p",
    "agents.*.sampling.top_k",
    "policies.*.alpha",
    "policies.*.engine",
    "policies.*.trainer",
    # A commit records the rate of its step, so that a step that is computed again after a crash has
    # the rate that it had.
    "policies.*.optimizer.lr",
    "policies.*.optimizer.schedule",
    "policies.*.optimizer.warmup_steps",
    "policies.*.optimizer.final_lr_fraction",
    *(f"{section}.*.{cost}" for section in ("rewards", "tools") for cost in _CHANGEABLE_COSTS),
    "population.stop",
    "population.engine",
    "balancing",
    "evaluation",
    "evaluations",
    "checkpoint",
    "priority",
    "limits",
    "stop",
    "logging",
)
# Why other fields may not, by pattern; the first that fits.
_REASONS: Final = (
    ("pipeline.steps", "so many steps are done"),
    ("seed", "the order of tasks and all randomness follow from it"),
    ("tasks", "steps have taken tasks in its order, and the next ones must not repeat them"),
    ("curriculum", "the success rates that it has measured choose the next tasks"),
    (
        "policies.*.model.dtype",
        "the trained weights have that type; its default follows from engine.kind, so name the old "
        "value",
    ),
    ("policies.*.model", "the trained weights belong to this model"),
    ("policies.*.network", "the trained weights belong to this network"),
    ("policies.*.lora", "the trained weights belong to this adapter"),
    ("policies.*.init_from", "the policy has begun from it"),
    ("policies.*.optimizer", "a step that is computed again after a crash would differ"),
    ("policies", "the policies' weights and versions would not fit together"),
    ("pipeline", "it decides which samples are in a step, also in those that are open"),
    ("algorithm", "its optimizer's state, and a step that is computed again, belong to this loss"),
)
_ANY_REASON: Final = "samples before and after the change would differ in meaning"
_ABSENT: Final = object()


@dataclass(frozen=True)
class Difference:
    """One value that differs; `old` or `new` is None if the value is missing there."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}"


def differences(old: JobSpec, new: JobSpec) -> list[Difference]:
    """Return all differences between two specifications with defaults filled in, sorted by path."""
    return sorted(
        _walk("", old.model_dump(mode="json"), new.model_dump(mode="json")),
        key=lambda one: one.path,
    )


def incompatible(old: JobSpec, new: JobSpec, *, steps_done: int) -> list[Difference]:
    """Return the differences that forbid resuming a job under `new` after `steps_done` steps under
    `old`."""
    return [
        one
        for one in differences(old, new)
        if not _changeable(one.path)
        or (one.path == "pipeline.steps" and new.pipeline.steps < steps_done)
    ]


def changeable_values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a specification, defaults filled in, that may change when its job is
    resumed, by path."""
    return {path: value for path, value in _leaves("", spec) if _changeable(path)}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}" if path else name, inner)


def reason(path: str) -> str:
    """Return why a field of a job may not change when the job is resumed."""
    return next((why for pattern, why in _REASONS if _covers(pattern, path)), _ANY_REASON)


def _changeable(path: str) -> bool:
    return any(_covers(pattern, path) for pattern in CHANGEABLE)


def _covers(pattern: str, path: str) -> bool:
    """Return whether `path` is a field that `pattern` names, or below it."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(
        fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False)
    )


def _walk(path: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in old.keys() | new.keys():
            inner = f"{path}.{name}" if path else name
            yield from _walk(inner, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif old is _ABSENT or new is _ABSENT or old != new or type(old) is not type(new):
        yield Difference(path, None if old is _ABSENT else old, None if new is _ABSENT else new)
