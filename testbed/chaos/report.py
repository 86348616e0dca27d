"""The report of a chaos run, for people and for programs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from testbed.chaos.accounts import SampleAudit
from testbed.chaos.fault_injector import InjectedFault, InjectionLog
from testbed.chaos.schedule import KILL
from testbed.chaos.transcript import Transcript


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of one job on one cluster."""

    # The job's last state: "succeeded", "failed", ...
    state: str
    # From submission to the end.
    seconds: float
    steps: int
    total_steps: int
    # Policy -> (version, checksum of the weights).
    versions: dict[str, tuple[int, str]]
    accounts: SampleAudit
    transcript: Transcript
    # The reason of every failure of the job; it was resumed after all but the last.
    failures: tuple[str, ...] = ()
    # The harness's time limit passed first.
    cut_short: bool = False


@dataclass(frozen=True)
class Recovery:
    """Times that one service took to become healthy again after kills."""

    kills: int
    median: float
    longest: float


@dataclass(frozen=True)
class ChaosReport:
    """The comparison of an undisturbed and a disturbed run."""

    seed: int
    kills_wanted: int
    disturbed: JobOutcome
    disturbance: InjectionLog
    # None: there was no undisturbed run.
    baseline: JobOutcome | None
    # Whether the job promises bitwise equal weights (`pipeline.deterministic`).
    deterministic: bool
    differences: list[str] = field(default_factory=list)

    @property
    def bitwise_equal(self) -> bool | None:
        """Whether the final weights of every policy are the same; None if nothing was compared.

        Without `deterministic` a difference means nothing, so nothing is compared.
        """
        if self.baseline is None or not self.deterministic:
            return None
        return bool(self.baseline.versions) and self.baseline.versions == self.disturbed.versions

    @property
    def lost(self) -> int | None:
        """Samples and trajectories that are unaccounted for; None without an audit."""
        accounts = self.disturbed.accounts
        return None if accounts.missing else accounts.unaccounted

    @property
    def duplicated(self) -> int | None:
        """Uses of samples beyond the job's limit; None without an audit."""
        accounts = self.disturbed.accounts
        return None if accounts.missing else accounts.duplicated

    @property
    def faults(self) -> list[str]:
        """The violations of exactly-once processing, in words; empty if there are none."""
        disturbed = self.disturbed
        found: list[str] = []
        if disturbed.cut_short:
            found.append("the time limit passed before the job ended")
        elif disturbed.state != "succeeded":
            found.append(f"the disturbed job {disturbed.state}")
        if self.baseline is not None and self.baseline.state != "succeeded":
            found.append(f"the undisturbed job {self.baseline.state}")
        if disturbed.accounts.missing:
            found.append(disturbed.accounts.missing)
        elif not disturbed.cut_short and self.lost:
            found.append(f"{self.lost} samples or trajectories lost")
        if self.duplicated:
            found.append(f"{self.duplicated} samples duplicated")
        found += disturbed.accounts.violations
        if self.bitwise_equal is False and not disturbed.cut_short:
            found.append("the final weights differ from the undisturbed run's")
        return found

    @property
    def passed(self) -> bool:
        """Whether no sample was lost or duplicated, the weights are equal and the job is done."""
        return not self.faults

    def recoveries(self) -> dict[str, Recovery]:
        """Return recovery times by service that was killed."""
        return recoveries(self.disturbance.injected)

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values; the first four keys are the guarantees."""
        disturbed, accounts = self.disturbed, self.disturbed.accounts
        kinds = Counter(one.kind for one in self.disturbance.injected)
        return {
            "kills": self.disturbance.kills,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "bitwise_equal": self.bitwise_equal,
            "passed": self.passed,
            "kills_wanted": self.kills_wanted,
            "power_offs": self.disturbance.power_offs,
            "seed": self.seed,
            "job": disturbed.state,
            "steps": disturbed.steps,
            "total_steps": disturbed.total_steps,
            "cut_short": disturbed.cut_short,
            "resumed": max(0, len(disturbed.failures) - (disturbed.state == "failed")),
            "failures": list(disturbed.failures),
            "seconds": round(disturbed.seconds, 1),
            "baseline_seconds": (
                None if self.baseline is None else round(self.baseline.seconds, 1)
            ),
            "trained": accounts.trained,
            "dropped": accounts.dropped,
            "drop_reasons": accounts.drop_reasons,
            "violations": list(accounts.violations),
            "faults": dict(sorted(kinds.items())),
            "recovery_seconds": {
                name: {
                    "kills": one.kills,
                    "median": round(one.median, 2),
                    "max": round(one.longest, 2),
                }
                for name, one in self.recoveries().items()
            },
            "versions": {p: list(v) for p, v in sorted(disturbed.versions.items())},
            "differences": self.differences,
            "troubles": self.disturbance.troubles,
        }


def recoveries(injected: Sequence[InjectedFault]) -> dict[str, Recovery]:
    """Return the recovery times of killed services, by service."""
    seconds: dict[str, list[float]] = {}
    for one in injected:
        if one.kind == KILL:
            seconds.setdefault(one.victim, []).append(one.seconds)
    return {
        name: Recovery(len(values), statistics.median(values), max(values))
        for name, values in sorted(seconds.items())
    }
