"""May a job go on under another specification? It may if it stays the same job: what was learned
so far must be what the new specification would have learned, up to how far, how fast, and what is
looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from troupe.job.spec import JobSpec

# What may change, with all that is below it; `*` stands for a name. All else makes the job what it
# is: a field that is added later is refused until somebody has thought about it.
CHANGEABLE: Final = (
    "pipeline.steps",
    "pipeline.alpha",
    "pipeline.micro_batch_samples",
    "pipeline.micro_batch_tokens",
    "pipeline.balance_tokens",
    "policies.*.alpha",
    "policies.*.engine",
    "policies.*.trainer",
    "rewards.*.timeout_seconds",
    "rewards.*.memory_mib",
    "rewards.*.max_concurrency",
    "rewards.*.max_queued",
    "rewards.*.retries",
    "rewards.*.idle_seconds",
    "rewards.*.min_workers",
    "tools.*.timeout_seconds",
    "tools.*.memory_mib",
    "tools.*.max_concurrency",
    "tools.*.max_queued",
    "tools.*.retries",
    "tools.*.idle_seconds",
    "tools.*.min_workers",
    "population.stop",
    "population.engine",
    "balancing",
    "evaluation",
    "checkpoint",
    "limits",
    "logging",
)
_ABSENT: Final = object()


@dataclass(frozen=True)
class Difference:
    """One value that differs; `old` or `new` is None where there is none."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}"


def differences(old: JobSpec, new: JobSpec) -> list[Difference]:
    """Everything in which two specifications differ, defaults filled in, by path."""
    return sorted(
        _walk("", old.model_dump(mode="json"), new.model_dump(mode="json")),
        key=lambda one: one.path,
    )


def incompatible(old: JobSpec, new: JobSpec, *, steps_done: int) -> list[Difference]:
    """What keeps a job that has done `steps_done` steps under `old` from going on under `new`."""
    return [
        one
        for one in differences(old, new)
        if not _changeable(one.path)
        or (one.path == "pipeline.steps" and new.pipeline.steps < steps_done)
    ]


def _changeable(path: str) -> bool:
    parts = path.split(".")
    return any(
        len(parts) >= len(wanted := pattern.split("."))
        and all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False))
        for pattern in CHANGEABLE
    )


def _walk(path: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in old.keys() | new.keys():
            inner = f"{path}.{name}" if path else name
            yield from _walk(inner, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif old is _ABSENT or new is _ABSENT or old != new or type(old) is not type(new):
        yield Difference(path, None if old is _ABSENT else old, None if new is _ABSENT else new)
