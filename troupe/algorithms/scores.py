"""Success of a query, and scores of several samples: pass@k, maj@k, confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from troupe.contracts.metric_names import TEAM

MOST_VOTERS: Final = 64
"""Largest k of maj@k: its cost grows with the cube of k."""
Z_95: Final = 1.959963984540054
"""The 97.5th percentile of the normal distribution: intervals of 95 %."""


def success_of(
    rewards: Mapping[str, float], metrics: Mapping[str, float], name: str | None
) -> float:
    """Return the value that decides whether a completed trajectory has solved its query; minus
    infinity if there is none.

    `rewards`: of agents, and of the team; `metrics` have the scores of reward functions as
    `rewards.<name>`. `name`: the field `success` of an evaluation or a curriculum.
    """
    if name is not None:
        return rewards.get(name, metrics.get(f"rewards.{name}", -math.inf))
    if TEAM in rewards:
        return rewards[TEAM]
    return sum(rewards.values()) / len(rewards) if rewards else -math.inf


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the chance that one of `k` samples solves a query, given that `solved` of `samples`
    do.

    Unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises
    ValueError unless 1 <= k <= samples.
    """
    if not 0 <= solved <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {solved} solved")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def majority_at_k(votes: Sequence[tuple[str | None, bool]], ks: Sequence[int]) -> list[float]:
    """Return the chance that the majority of k samples is right, for each of `ks`; k samples are
    drawn from `votes` without replacement.

    `votes`: the answer of each sample (None: no answer and no vote), and whether it solves the
    query. The most frequent drawn answer wins, and ties are broken by lot. Its correctness is the
    fraction of all samples with this answer that solve the query. Exact: sums over all subsets by
    their counts per answer. Raises ValueError unless 1 <= k <= `MOST_VOTERS` and the number of
    votes.
    """
    most = max(ks)
    if not 1 <= min(ks) <= most <= min(len(votes), MOST_VOTERS):
        raise ValueError(f"maj@{most} of {len(votes)} samples")
    counts = Counter(answer for answer, _ in votes)
    right = Counter(answer for answer, solved in votes if solved)
    silent = counts.pop(None, 0)
    # Subsets of `row` samples whose winner has `top` votes, times the correctness of their winners.
    won = np.zeros(most + 1)
    for top in range(1, min(max(counts.values(), default=0), most) + 1):
        won += _won_with(top, counts, right, silent, most)
    return [float(won[k] / math.comb(len(votes), k)) for k in ks]


def _won_with(
    top: int, counts: Counter[str | None], right: Counter[str | None], silent: int, most: int
) -> NDArray[np.float64]:
    """Return, by number of drawn samples (up to `most`), the sum of the mean correctness of the
    winners over the subsets in which the leading answers have exactly `top` votes."""
    ties = most // top
    # By the number of answers with `top` votes and the number of drawn samples: the number of
    # subsets, and the sum over them of the correctness of these answers.
    ways, sums = np.zeros((2, ties + 1, most + 1))
    for drawn in range(min(silent, most) + 1):
        ways[0, drawn] = math.comb(silent, drawn)
    for answer, count in counts.items():
        more_ways, more_sums = np.zeros_like(ways), np.zeros_like(sums)
        for taken in range(min(count, top, most) + 1):
            chosen = math.comb(count, taken)
            here = slice(taken, None)
            before = slice(None, most + 1 - taken)
            if taken < top:
                more_ways[:, here] += chosen * ways[:, before]
                more_sums[:, here] += chosen * sums[:, before]
            else:
                value = right[answer] / count
                more_ways[1:, here] += chosen * ways[:-1, before]
                more_sums[1:, here] += chosen * (sums + value * ways)[:-1, before]
        ways, sums = more_ways, more_sums
    total: NDArray[np.float64] = (sums[1:] / np.arange(1, ties + 1)[:, None]).sum(axis=0)
    return total


def interval(mean: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean of `count` values in [0, 1]: Wilson's.

    Coverage is nearly exact if the values are 0 or 1; values in between vary less, so their
    interval is wider than necessary, never narrower. It is not degenerate at means of 0 and 1.
    """
    if count < 1:
        raise ValueError("an interval needs at least one value")
    z2 = Z_95 * Z_95 / count
    middle = (mean + z2 / 2) / (1 + z2)
    half = Z_95 / (1 + z2) * math.sqrt(max(0.0, mean * (1 - mean)) / count + z2 / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of independent values; None if it is unknown.

    Wilson's (`interval`) if all values are in [0, 1], such as success or failure; else the interval
    of the normal distribution, which needs at least two values.
    """
    if not values or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / len(values)
    if min(values) >= 0 and max(values) <= 1:
        return interval(mean, len(values))
    if len(values) < 2:
        return None
    half = Z_95 * statistics.stdev(values) / math.sqrt(len(values))
    return (mean - half, mean + half) if math.isfinite(half) else None


def steps_of_k(samples: int) -> list[int]:
    """Return the k that are reported: powers of two below `samples`, and `samples`."""
    return [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
