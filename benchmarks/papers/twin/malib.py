"""MALib's two claims (JMLR 24, 2023) at sizes beyond this machine: sampling by 1 to 1,024 workers,
and PSRO with 1 to 64 best responses trained concurrently.

Sampling is a closed network of queues in simpy: each worker is a core, and one store, one Redis and
one orchestrator serve all trajectories in turn; `admission` decides which trajectories start where.
`troupe.populations` plans the matches and loads of PSRO for a growing payoff table.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import simpy

from benchmarks.papers.twin.control import QUIET
from troupe.populations import solve
from troupe.populations.payoffs import PayoffTable, Precision, matches_due
from troupe.populations.slots import match_waves
from troupe.scheduling import admission

WORKERS: Final = (1, 4, 16, 64, 256, 1024)
LEARNERS: Final = (1, 2, 4, 8, 16, 32, 64)
# Turns of a trajectory in benchmarks.scale: its cost in the control plane follows from the cost of
# 1,000 turns.
_TURNS: Final = 10
# The orchestrator's cost per trajectory, the same for all kinds.
_ORCHESTRATOR: Final = QUIET["orchestrator"] * _TURNS / 1000


@dataclass(frozen=True)
class SamplingCase:
    """One kind of trajectory, its costs in seconds, and its number of units."""

    title: str
    unit: str
    units: float
    """Units per trajectory."""
    core: float
    """Seconds of the worker's core."""
    latency: float
    """Seconds in engines, without load on the control plane."""
    places: int
    """Concurrent trajectories per worker."""
    group: int
    """Trajectories of one query."""
    single: tuple[tuple[str, float], ...]
    """Seconds of each process that exists once."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number out of range."""
        for name in ("units", "core", "places", "group"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")
        if self.latency < 0 or any(seconds < 0 for _, seconds in self.single):
            raise ValueError(f"latency = {self.latency}, single = {self.single}: negative seconds")

    @property
    def most(self) -> float:
        """Trajectories per second at which the first single process saturates."""
        return 1 / max(seconds for _, seconds in self.single)


def _fragments(title: str, steps_per_second: float) -> SamplingCase:
    """Return the case of network episodes on simple_spread, one sample for 256 copies of 25 steps.
    Its arrays are kept by reference, so that the store's row is small (benchmarks.experience_store:
    73 and 63 microseconds for 512 tokens)."""
    steps = 256 * 25.0
    rows = (("store", 73e-6), ("redis", 63e-6), ("orchestrator", _ORCHESTRATOR))
    return SamplingCase(title, "steps", steps, steps / steps_per_second, 0.0, 2, 1, rows)


def _turns(title: str, rate: float) -> SamplingCase:
    """Return the case of language models' trajectories with ten turns at `rate` turns per second
    and worker."""
    store, redis = (QUIET[name] * _TURNS / 1000 for name in ("store", "redis"))
    core = QUIET["rollout"] * _TURNS / 1000
    # As many as for a host in speed.py; for busier workers fewer than in reality, with a latency
    # that preserves the rate.
    places = 40
    latency = places * _TURNS / rate
    rows = (("store", store), ("redis", redis), ("orchestrator", _ORCHESTRATOR))
    return SamplingCase(title, "turns", _TURNS, core, latency, places, 8, rows)


# Steps per CPU second of a worker: docs/benchmarks/networks.md, our arrays of 256 copies, and
# environments in Python, one copy each, as in RLlib and Sample Factory. Turns per second of a
# worker: the job of speed.py (530 of 250 hosts with eight H800), and the maximum, by
# benchmarks.scale's CPU seconds, of a worker that uses 0.7 of a core.
CASES: Final = {
    "python": _fragments("networks, environments in Python", 1_255.0),
    "arrays": _fragments("networks, environments as arrays", 217_921.0),
    "hosts": _turns("language models, a host of eight devices per worker", 530 / 250),
    "cores": _turns("language models, workers at 0.7 of a core", 0.7 * 1000 / QUIET["rollout"]),
}


def sampled(case: SamplingCase, workers: int, seed: int = 0) -> float:
    """Return the units per second of `workers` workers. Raises ValueError without workers."""
    if workers < 1:
        raise ValueError(f"workers = {workers}: must be at least 1")
    return _Sampling(case, workers, seed).run() * case.units


class _Sampling:
    """Workers, the processes shared by all of them, and successive trajectories."""

    def __init__(self, case: SamplingCase, workers: int, seed: int) -> None:
        self._case, self._rng = case, random.Random(seed)
        self._env = simpy.Environment()
        self._cores = [simpy.Resource(self._env) for _ in range(workers)]
        self._single = [(simpy.Resource(self._env), seconds) for _, seconds in case.single]
        self._running = [0] * workers
        self._limit = case.places * workers
        self._turn = self._ended = self._in_flight = 0
        # The first trajectories start together; counting begins after three times as many.
        self._first = 3 * self._limit
        self._last = self._first + max(2000, 3 * self._limit)
        self._began = 0.0
        self._done = self._env.event()

    def run(self) -> float:
        """Return trajectories per second."""
        self._start()
        self._env.run(self._done)
        return (self._last - self._first) / (self._env.now - self._began)

    def _start(self) -> None:
        size, running = self._case.group, self._running
        # One group more than the window has room for, so that there is always one to start. The
        # first group determines whether a wave is due.
        limit, running_now = self._limit, self._in_flight
        if not admission.due_wave([size, limit + 1], in_flight=running_now, limit=limit):
            return
        waiting = [size] * ((limit - running_now) // size + 1)
        count = admission.due_wave(waiting, in_flight=running_now, limit=limit)
        loads = [admission.RolloutWorker(f"{n:06}", one) for n, one in enumerate(running)]
        self._turn += 1
        for name in admission.spread_queries([size] * count, loads, turn=self._turn):
            running[int(name)] += size
            self._in_flight += size
            for _ in range(size):
                self._env.process(self._play(int(name)))

    def _play(self, worker: int) -> Generator[simpy.Event, Any, None]:
        env, rng, case = self._env, self._rng, self._case
        length = rng.lognormvariate(-(0.3**2) / 2, 0.3)
        if case.latency:
            yield env.timeout(case.latency * length)
        with self._cores[worker].request() as core:
            yield core
            yield env.timeout(case.core * length)
        for process, seconds in self._single:
            with process.request() as turn:
                yield turn
                yield env.timeout(seconds)
        self._running[worker] -= 1
        self._in_flight -= 1
        self._ended += 1
        if self._ended == self._first:
            self._began = env.now
        if self._ended == self._last:
            self._done.succeed()
        self._start()


def scale_out(name: str, workers: tuple[int, ...] = WORKERS) -> dict[int, float]:
    """Return the units per second of one of `CASES` by workers. Raises ValueError for another
    name."""
    if name not in CASES:
        raise ValueError(f"name = {name!r}: one of {', '.join(CASES)}")
    return {count: sampled(CASES[name], count) for count in workers}


@dataclass(frozen=True)
class PsroCase:
    """A symmetric two-player game, and best responses of language models (all assumed)."""

    members: int = 64
    """Final number of best responses in the population."""
    train: float = 1800.0
    """Seconds of one best response."""
    sigma: float = 0.25
    """Sigma of the logarithm of these seconds, since learners differ in speed."""
    matches: int = 8
    """Matches per cell of the payoff table."""
    match: float = 30.0
    at_once: int = 64
    """Concurrent matches on the engines of one learner."""
    slots: int = 4
    """Concurrently served members on the engines of one learner."""
    load: float = 10.0
    """Seconds until the members of a wave of matches are loaded."""


@dataclass(frozen=True)
class PsroRun:
    """Seconds until the population has its members, by activity."""

    training: float
    matches: float
    loads: float
    solving: float
    """Measured core seconds of the meta-game's linear programs."""
    played: int
    waves: int

    @property
    def seconds(self) -> float:
        """The sum, since iterations do these one after another."""
        return self.training + self.matches + self.loads + self.solving


def psro(learners: int, case: PsroCase = PsroCase(), seed: int = 0) -> PsroRun:
    """Simulate iterations of `learners` concurrent best responses, each learner with its own
    devices, which play matches once all are trained.

    Raises ValueError unless `learners` divides the members.
    """
    if learners < 1 or case.members % learners:
        raise ValueError(
            f"learners = {learners}: must divide the {case.members} members of the population"
        )
    rng = random.Random(seed)
    # The same for any number of learners.
    trains = [
        case.train * rng.lognormvariate(-(case.sigma**2) / 2, case.sigma)
        for _ in range(case.members)
    ]
    wins = np.random.default_rng(seed)
    table = PayoffTable([1, 1], symmetric=True)
    training = matches = loads = solving = 0.0
    played = waves = 0
    for first in range(0, case.members, learners):
        training += max(trains[first : first + learners])
        size = 1 + first + learners
        table.grow([size, size])
        due = matches_due(table, Precision(least=case.matches))
        counts = dict(due)
        slots = {"pool": max(2, case.slots * learners)}
        for _, cells in match_waves([one for one, _ in due], ["pool", "pool"], slots):
            waves += 1
            loads += case.load
            number = sum(counts[one] for one in cells)
            rounds = math.ceil(number / (case.at_once * learners))
            matches += max(rounds * case.match, number * _ORCHESTRATOR)
            played += number
        for cell, count in due:
            won = np.where(wins.random(count) < 0.5, 1.0, -1.0)
            table.record_all(cell, np.stack([won, -won], axis=1))
        began = time.thread_time()
        solve("nash", table.tensor())
        solving += time.thread_time() - began
    return PsroRun(training, matches, loads, solving, played, waves)
