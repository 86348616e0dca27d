"""A recipe: jobs that differ in one thing, measurements of their runs, and criteria.

A recipe is the module `examples.papers.NAME.recipe`, whose `RECIPE` is a `Recipe`. It writes its
criteria down before it runs. Every arm starts from the same model for a seed. Arms may generate
different numbers of tokens per step, so curves are compared at equal generated tokens.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from troupe.client.handle import AsyncJobHandle
from troupe.job import JobSpec

SEEDS: Final = 5
"""Seeds that a recipe needs to pass."""
MOST_SEEDS: Final = 10
# The 97.5th percentile of Student's t by degrees of freedom, from 1.
_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Run:
    """One arm's job with one seed."""

    points: Sequence[tuple[float, float]]
    """The curve: tokens generated so far, and the value."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further measurements by name."""
    seconds: float = 0.0
    job: str = ""
    """The id of its job."""

    @property
    def tokens(self) -> float:
        """Tokens generated in the whole run."""
        return self.points[-1][0]

    def end(self, tokens: float | None = None, share: float = 0.1) -> float:
        """Return the mean value of the points in the last `share` of the first `tokens` tokens
        (default: all)."""
        tokens = self.tokens if tokens is None else tokens
        within = [(at, value) for at, value in self.points if at <= tokens * (1 + 1e-9)]
        last = [value for at, value in within if at >= tokens * (1 - share)]
        return statistics.fmean(last or [within[-1][1]])


@dataclass(frozen=True)
class SeedRuns:
    """All arms with one seed."""

    seed: int
    commit: str
    """The commit of the code that ran, followed by `+` if files had been changed; a version where
    there is no repository."""
    date: str
    runs: Mapping[str, Run]
    """By arm."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Results that the recipe computed without a job (`Recipe.computed`)."""

    @property
    def tokens(self) -> float:
        """The largest number of generated tokens that every arm has reached."""
        return min(run.tokens for run in self.runs.values())

    def end(self, arm: str, share: float = 0.1) -> float:
        """Return an arm's value at the number of tokens that every arm has reached."""
        return self.runs[arm].end(self.tokens, share)


@dataclass(frozen=True)
class Verdict:
    """A criterion, and what the seeds say about it."""

    goal: str
    """The criterion, as it was written down before the runs."""
    values: tuple[float, ...]
    """The value that decides, by seed."""
    passed: bool

    @property
    def estimate(self) -> Estimate:
        """The mean of the values."""
        return estimated(self.values)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 1 if abs(self.mean) >= 100 else 3
        if math.isinf(self.low):
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def estimated(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per seed, with Student's interval; of one seed it is infinite.

    Raises ValueError for no value, and for more than `MOST_SEEDS`.
    """
    if not 1 <= len(values) <= MOST_SEEDS:
        raise ValueError(f"{len(values)} values, not between 1 and {MOST_SEEDS}")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, -math.inf, math.inf)
    half = _T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


class Recipe(ABC):
    """A published result that jobs on this machine repeat."""

    number: ClassVar[str]
    """Its short name in `benchmarks.recipes`: `r5`."""
    name: ClassVar[str]
    """Its folder below `examples/papers`."""
    title: ClassVar[str]
    arms: ClassVar[Mapping[str, str]]
    """The arms: a line of description by the arm's name."""
    curve: ClassVar[str]
    """The label of the curves' vertical axis."""
    edition: ClassVar[int] = 1
    """Raised when first models or measurements change: results of editions are not comparable."""
    needs: ClassVar[Sequence[str]] = ()
    """Other folders below `examples` whose modules and data its jobs use, as `games`."""

    @abstractmethod
    def model(self, directory: Path, seed: int) -> Path:
        """Save the model with which all arms of a seed begin, and return its directory."""

    @abstractmethod
    def job(self, arm: str, model: Path, seed: int, *, quick: bool = False) -> JobSpec:
        """Return an arm's job; `quick`: of a smoke run, which measures nothing."""

    @abstractmethod
    async def measured(self, job: AsyncJobHandle, arm: str) -> Run:
        """Return the measurements of a job that has succeeded; `seconds` and `job` are filled in by
        the caller."""

    def computed(self, seed: int, *, quick: bool = False) -> dict[str, float]:
        """Return figures of a seed that need no job; may take minutes."""
        return {}

    @abstractmethod
    def verdicts(self, seeds: Sequence[SeedRuns]) -> list[Verdict]:
        """Judge the runs of one or more seeds by the criteria."""


def has_passed(recipe: Recipe, seeds: Sequence[SeedRuns]) -> bool:
    """Return whether all criteria hold over at least `SEEDS` seeds."""
    return len(seeds) >= SEEDS and all(one.passed for one in recipe.verdicts(seeds))


def by_tokens(
    frame: Sequence[Mapping[str, float | None]], value: str, trajectories: str, tokens: str
) -> list[tuple[float, float]]:
    """Return a curve from a job's `metrics_frame`: a step's `value` over the tokens generated up to
    its end; `tokens`: mean per trajectory, `trajectories`: their number."""
    found: list[tuple[float, float]] = []
    total = 0.0
    for row in frame:
        got: list[Any] = [row.get(name) for name in (value, trajectories, tokens)]
        if None in got:
            continue
        total += got[1] * got[2]
        found.append((total, got[0]))
    return found
