"""Seeded workloads: the turns of coding agents, and the duration of each action.

Everything is drawn per trajectory from (seed, index), so that a batch of 256 is the beginning of
one of 1536. Published figures: a coding sandbox is busy for 47 % of its life (ARL-Tangram section
2); coding agents take 26.4 turns on average and at most 408 among 80,036 trajectories without a
turn limit (the data set nebius/SWE-agent-trajectories), a lognormal with a sigma of 0.7; the
longest response is 5 to 9 times the mean (RollArt), a sigma of 0.5. The durations of actions are
our assumption, and so is the part of their variance that the query determines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from testbed.twin.actions import REWARD, SimulatedAction

Rng: TypeAlias = np.random.Generator

SHELL, TESTS = "shell", "tests"


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """`think` seconds of generation, then an action."""

    think: float
    call: SimulatedAction


@dataclass(frozen=True, slots=True)
class CodingLaw:
    """Distribution of a coding agent's turns. Seconds are of one core; spreads are
    sigmas of lognormals.

    Most actions are commands; `test_share` of them are test runs, which can use many cores, and the
    last action of every trajectory is its reward, the whole test suite. `duty` is the part of a
    trajectory's life in which its sandbox is busy with `duty_cores` cores of its own, from which
    the model's thinking time follows.

    `group` trajectories share one query, which determines the part `alike` of the variance of the
    logarithm of their tests' and rewards' durations. For rewards, which run the same suite, the
    query determines all of that part; for tests it determines one half, and the selection of tests,
    one of `selections`, the other. 0: every action is drawn independently, and a scheduler cannot
    predict it.
    """

    turns: float = 26.0
    turns_spread: float = 0.7
    test_share: float = 0.3
    shell_seconds: float = 1.0
    test_seconds: float = 60.0
    reward_seconds: float = 180.0
    seconds_spread: float = 0.8
    parallel_fraction: float = 0.98
    max_cores: int = 8
    duty: float = 0.47
    duty_cores: int = 2
    think_spread: float = 0.5
    group: int = 8
    alike: float = 0.0
    selections: int = 4

    @property
    def busy_seconds(self) -> float:
        """Mean seconds of actions per trajectory, each with `duty_cores`."""
        line = 1 - self.parallel_fraction + self.parallel_fraction / self.duty_cores
        tests = self.turns * self.test_share * self.test_seconds + self.reward_seconds
        return self.turns * (1 - self.test_share) * self.shell_seconds + tests * line

    @property
    def think_seconds(self) -> float:
        """Mean seconds of generation before each action."""
        return self.busy_seconds * (1 - self.duty) / self.duty / (self.turns + 1)

    def scaled(self, factor: float) -> CodingLaw:
        """Return the same distribution with all times multiplied by `factor`."""
        return replace(
            self,
            shell_seconds=factor * self.shell_seconds,
            test_seconds=factor * self.test_seconds,
            reward_seconds=factor * self.reward_seconds,
        )


Trajectory: TypeAlias = Sequence[SimulatedTurn]


def coding(
    count: int, law: CodingLaw, seed: int, epoch: int = 0, first: int = 0
) -> list[Trajectory]:
    """Return `count` trajectories from number `first` on, query by query; the last turn of each is
    its reward. Another `epoch` gives other trajectories of the same queries."""
    return [
        _trajectory(
            law,
            np.random.default_rng((seed, index, epoch) if epoch else (seed, index)),
            _Query(law, seed, index),
        )
        for index in range(first, first + count)
    ]


class _Query:
    """Effects shared by the tests and rewards of a query: standard normal."""

    def __init__(self, law: CodingLaw, seed: int, index: int) -> None:
        number = index // law.group
        self.name = f"{seed}/{number}" if law.alike else ""
        rng = np.random.default_rng((seed, number, 1))
        self.suite = float(rng.standard_normal())
        self.selections = [float(rng.standard_normal()) for _ in range(law.selections)]


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """A call of `service` at `at` seconds that takes `seconds`."""

    at: float
    service: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TeacherLaw:
    """Calls of model services for scores: at the end of each group of trajectories a call of its
    domain's service, in bursts, since the groups of a step end together.

    `busy` is the part of the time in which a dedicated service would be busy: dedicated reward GPUs
    are busy 7 % of the time (RollArt). The other values are our assumptions.
    """

    services: int = 9
    busy: float = 0.07
    seconds: float = 4.0
    seconds_spread: float = 0.5
    step_seconds: float = 600.0
    # Mean end of the first group, as a fraction of the step, and the spread of ends.
    first_end: float = 0.5
    ends_spread: float = 0.25

    @property
    def calls_per_step(self) -> int:
        """Rate of all services together."""
        return round(self.services * self.busy * self.step_seconds / self.seconds)


def teaching(steps: int, law: TeacherLaw, seed: int) -> list[ServiceRequest]:
    """Return the calls of `steps` steps, ordered by time."""
    asked: list[ServiceRequest] = []
    for step in range(steps):
        rng = np.random.default_rng((seed, step))
        for _ in range(law.calls_per_step):
            end = _lognormal(rng, law.first_end, law.ends_spread)
            at = (step + min(1.0, end)) * law.step_seconds
            service = int(rng.integers(law.services))
            asked.append(
                ServiceRequest(at, service, _lognormal(rng, law.seconds, law.seconds_spread))
            )
    return sorted(asked, key=lambda one: one.at)


def _trajectory(law: CodingLaw, rng: Rng, query: _Query) -> Trajectory:
    turns: list[SimulatedTurn] = []
    for _ in range(max(1, round(_lognormal(rng, law.turns, law.turns_spread)))):
        if rng.random() < law.test_share:
            seconds, content = _lognormal(rng, law.test_seconds, law.seconds_spread), ""
            if law.alike:
                chosen = int(rng.integers(law.selections))
                content = f"selection-{chosen}"
                common = (query.suite + query.selections[chosen]) / math.sqrt(2)
                seconds = _common(seconds, law.test_seconds, common, law)
            call = _elastic(TESTS, seconds, law, query.name, content)
        else:
            seconds = _lognormal(rng, law.shell_seconds, law.seconds_spread)
            call = SimulatedAction(SHELL, 1, 1, seconds, 0.0, query.name)
        turns.append(SimulatedTurn(_lognormal(rng, law.think_seconds, law.think_spread), call))
    seconds = _lognormal(rng, law.reward_seconds, law.seconds_spread)
    if law.alike:
        seconds = _common(seconds, law.reward_seconds, query.suite, law)
    think = _lognormal(rng, law.think_seconds, law.think_spread)
    return [*turns, SimulatedTurn(think, _elastic(REWARD, seconds, law, query.name))]


def _common(seconds: float, mean: float, common: float, law: CodingLaw) -> float:
    """Return `seconds`, a draw about `mean`, with the common part of its spread replaced by
    `common`."""
    spread = law.seconds_spread
    own = (math.log(seconds / mean) + spread * spread / 2) / spread
    drawn = math.sqrt(1 - law.alike) * own + math.sqrt(law.alike) * common
    return mean * math.exp(spread * drawn - spread * spread / 2)


def _elastic(
    function: str, seconds: float, law: CodingLaw, query: str = "", content: str = ""
) -> SimulatedAction:
    parallel = seconds * law.parallel_fraction
    return SimulatedAction(function, 1, law.max_cores, seconds - parallel, parallel, query, content)


def _lognormal(rng: Rng, mean: float, spread: float) -> float:
    return float(rng.lognormal(math.log(mean) - spread * spread / 2, spread))
