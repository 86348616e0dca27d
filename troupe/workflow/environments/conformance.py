"""Tries an environment against everything that the interface promises, and names what is broken.

    report = check(MyGame)
    assert report.ok, report

or `troupe environment check my_module:MyGame`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from troupe.outcomes import Interruption
from troupe.user_code import interruptible
from troupe.workflow.environments import check_moves, checks
from troupe.workflow.environments.errors import ObservationTooLargeError, RewardNotFiniteError
from troupe.workflow.environments.interface import EnvironmentFactory
from troupe.workflow.environments.opening import raised_fault
from troupe.workflow.environments.playing import Mover, legal_mover
from troupe.workflow.environments.trial import Broken, Inapplicable, Trial
from troupe.workflow.errors import WorkflowError

DEFAULT_SEEDS: Final = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    detail: str
    """What is wrong, or what was tried."""
    skipped: bool = False
    """It does not apply to what the environment declares."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one environment."""

    environment: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(finding.ok for finding in self.findings)

    @property
    def broken(self) -> tuple[Finding, ...]:
        """What is."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __str__(self) -> str:
        lines = [f"{self.environment}: {'conforms' if self.ok else 'does not conform'}"]
        for finding in self.findings:
            mark = "-" if finding.skipped else "ok" if finding.ok else "BROKEN"
            lines.append(f"  {mark:6} {finding.name}: {finding.detail}")
        return "\n".join(lines)


_CHECKS: Final[dict[str, Callable[[Trial], str]]] = {
    "interface": checks.interface,
    "same_seed_same_episode": checks.same_seed_same_episode,
    "instances_independent": checks.instances_independent,
    "agents_fixed": checks.agents_fixed,
    "terminates": checks.terminates,
    "rewards_finite": checks.rewards_finite,
    "observations": checks.observations,
    "zero_sum": checks.zero_sum,
    "cooperative": checks.cooperative,
    "illegal_move": check_moves.illegal_move,
    "unknown_player": check_moves.unknown_player,
    "joint_move_order": check_moves.joint_move_order,
    "seat_permutation": check_moves.seat_permutation,
    "hosted_alike": checks.hosted_alike,
    "close_repeatable": checks.close_repeatable,
}


def check(
    make: EnvironmentFactory, *, seeds: Sequence[int] = DEFAULT_SEEDS, move: Mover = legal_mover
) -> Report:
    """Play episodes of environments that `make` makes, and report.

    `move(observation, random, seat)` chooses an action; the default draws a legal one, and a few
    words where the environment lists none. Never raises for what an environment does wrong.
    """
    with interruptible():
        return _report(Trial(make, tuple(seeds), move))


def _report(trial: Trial) -> Report:
    findings: list[Finding] = []
    hidden: list[Finding] = []
    for name, attempt in _CHECKS.items():
        try:
            findings.append(Finding(name, True, attempt(trial)))
        except Inapplicable as why:
            findings.append(Finding(name, True, str(why), skipped=True))
        except Broken as why:
            findings.append(Finding(name, False, str(why)))
        except WorkflowError as error:
            owner = _owner(error)
            if owner is not None and owner != name:
                findings.append(Finding(name, True, f"not tried: see {owner}", skipped=True))
                hidden.append(Finding(owner, False, str(error)))
            else:
                findings.append(Finding(name, False, str(error)))
        except Interruption:
            raise
        except BaseException as error:  # whatever the environment's own code raises
            findings.append(Finding(name, False, raised_fault(trial.name, error).message))
        if name == "interface" and not findings[-1].ok:
            break  # nothing else would tell more
    if hidden and all(finding.ok for finding in findings):
        findings.append(hidden[0])  # seen once, and not again
    return Report(trial.name, tuple(findings))


def _owner(error: WorkflowError) -> str | None:
    """The check that an error of the contract belongs to, wherever it came up."""
    if isinstance(error, RewardNotFiniteError):
        return "rewards_finite"
    if isinstance(error, ObservationTooLargeError):
        return "observations"
    if error.field == "properties.max_steps":
        return "terminates"
    if error.kind == "environment_contract" and (error.field or "").startswith("step."):
        return "agents_fixed"
    return None
