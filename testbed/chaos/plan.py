"""The plan of a chaos run, and the changes to the job that faults require."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from testbed.chaos.schedule import DELAY, DUPLICATE, FULL_QUEUE, KINDS, PARTITION
from troupe.cluster import ClusterSettings, NotWritable
from troupe.cluster.settings import default_transfer_dir
from troupe.functions.costs import DEFAULTS
from troupe.job import JobSpec, parse_job
from troupe.rpc.channel import FAULTS_VARIABLE, FaultSettings
from troupe.rpc.errors import InvalidArgument

JOB_ID: Final = "chaos"
_WIRE_KINDS: Final = frozenset({PARTITION, DELAY, FULL_QUEUE})
# Seconds. A call that waits for a service to restart must not time out.
_LIMITS: Final = {"turn_seconds": 600, "trajectory_seconds": 900, "step_seconds": 7200}
_FUNCTION_SECONDS: Final = 60
_MANY: Final = 100_000


@dataclass(frozen=True)
class ChaosPlan:
    """The plan of one chaos run."""

    # As written by the user; see `prepared`.
    spec: JobSpec
    # Settings of both clusters; directories and faults are added.
    settings: ClusterSettings
    # Made by the harness: the two data directories and the transcripts.
    directory: Path
    kills: int = 20
    seed: int = 0
    kinds: frozenset[str] = frozenset(KINDS)
    power_offs: int = 0
    baseline: bool = True
    max_seconds: float = 1800.0

    @property
    def proxied(self) -> bool:
        """Whether calls between services go through proxies."""
        return bool(self.kinds & _WIRE_KINDS)

    def cluster(self, name: str, *, disturbed: bool) -> ClusterSettings:
        """Return settings of the cluster whose data is in `directory`/`name`."""
        data_dir = (self.directory / name).expanduser().absolute()
        changes: dict[str, Any] = {
            "data_dir": data_dir,
            # The two clusters must not share weights, wherever the user keeps them.
            "transfer_dir": default_transfer_dir(data_dir),
        }
        if disturbed:
            # Regardless of the user's settings: a Redis that is killed during a flush loses the
            # writes that it acknowledged since, unless it flushes before it answers.
            changes["redis_fsync"] = "always"
            changes["max_restarts"] = _MANY
            changes["max_backoff_seconds"] = 0.5
            changes["environment"] = {**self.settings.environment, **self.environment()}
        return self.settings.model_copy(update=changes)

    def environment(self) -> dict[str, str]:
        """Return environment variables of the faults that last for the whole run."""
        found: dict[str, str] = {}
        if DUPLICATE in self.kinds:
            delay = 0.1 if DELAY in self.kinds else 0.0
            found[FAULTS_VARIABLE] = FaultSettings(0.05, delay, 0.2, self.seed).text()
        if FULL_QUEUE in self.kinds:
            found["TROUPE_STORE_HIGH_WATER_MIB"] = "1"
        return found


def prepare_directory(directory: Path) -> None:
    """Make `directory`. Raises `InvalidArgument` if it has an earlier run, `NotWritable`."""
    for name in ("baseline", "disturbed"):
        if (directory / name).exists():
            raise InvalidArgument(
                "this directory has an earlier run.",
                field="--data-dir",
                value=directory,
                remedy="Remove it or choose another: both runs start from nothing.",
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritable(directory, error) from error


def prepared(spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """Return the job of both runs, and its changes, as `key.path=value`."""
    changes: dict[str, Any] = {}
    if spec.limits.worker_deaths < _MANY:
        changes["limits.worker_deaths"] = _MANY
    for name, seconds in _LIMITS.items():
        if getattr(spec.limits, name) < seconds:
            changes[f"limits.{name}"] = seconds
    for section in ("tools", "rewards"):
        for name, function in getattr(spec, section).items():
            given = function.timeout_seconds or DEFAULTS["timeout_seconds"]
            # The time limit of a deployed function was set at its deployment.
            if function.code is not None and given < _FUNCTION_SECONDS:
                changes[f"{section}.{name}.timeout_seconds"] = _FUNCTION_SECONDS
    # In the other modes the content of a step depends on timing, so that no two runs are equal.
    pipeline = spec.pipeline
    first_come = pipeline.over_sampling or pipeline.redundant_trajectories
    timeless = pipeline.mode != "async" and not first_come
    if timeless and not spec.pipeline.deterministic:
        changes["pipeline.deterministic"] = True
    document = spec.model_dump(mode="json")
    for path, value in changes.items():
        _set(document, path, value)
    return parse_job(json.dumps(document)), [f"{k}={json.dumps(v)}" for k, v in changes.items()]


def _set(document: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for section in sections:
        document = document[section]
    document[last] = value
