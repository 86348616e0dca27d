"""Monitors of a team: who copies whom, who agrees with whom, what each agent contributes, and what
a judge lets through. docs/team-monitors.md has the definitions and how to read them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from troupe.algorithms.scores import Z_95, interval

GRAM: Final = 32
"""Characters of a passage: five or six words, which two authors rarely choose alike."""
# Passages of a trajectory that are compared; of longer ones, about so many drawn by their hashes.
_MOST_PASSAGES: Final = 16_384
# Odd multipliers of the rolling hash, one per doubling of its width.
_MULTIPLIERS: Final = tuple(
    np.uint64(one)
    for one in (
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
    )
)
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT: Final = np.uint64(33)
# The author of the task's passages; no agent has an empty name.
_TASK: Final = ""


def copied_shares(replies: Sequence[tuple[str, str]], task: Sequence[str] = ()) -> dict[str, float]:
    """Return, by agent, the share of its passages that another agent wrote first.

    `replies`: agent and text, in the order of the trajectory; `task`: texts that all may quote. A
    passage is `GRAM` consecutive characters at any offset, or the whole text if that is shorter. It
    belongs to whoever wrote it first; passages of the task do not count. Agents that wrote no other
    passage have no value.

    The time grows with the length of the texts. Of more than 16,384 passages about as many are
    compared, the same ones in all texts: those whose hashes end with enough zero bits.
    """
    texts = [(_TASK, text) for text in task if text]
    texts += [(agent, text) for agent, text in replies if text]
    agents = sorted({agent for agent, _ in texts} - {_TASK})
    if not agents:
        return {}
    numbers = {_TASK: 0} | {agent: number for number, agent in enumerate(agents, 1)}
    length = sum(len(text) for _, text in texts)
    bits = max(0, math.ceil(math.log2(length / _MOST_PASSAGES)))
    passages, authors = [], []
    for agent, text in texts:
        hashes = _passages(text)
        if bits:
            hashes = hashes[(hashes & np.uint64((1 << bits) - 1)) == 0]
        passages.append(hashes)
        authors.append(np.full(len(hashes), numbers[agent], np.int32))
    author = np.concatenate(authors)
    _, first, same = np.unique(np.concatenate(passages), return_index=True, return_inverse=True)
    owner = author[first][same]
    counted = owner > 0
    written = np.bincount(author[counted], minlength=len(numbers))
    copied = np.bincount(author[counted & (owner != author)], minlength=len(numbers))
    return {
        agent: float(copied[number] / written[number])
        for agent, number in numbers.items()
        if number and written[number]
    }


def _passages(text: str) -> NDArray[np.uint64]:
    """Return the 64-bit hash of each passage of a text that is not empty."""
    if len(text) < GRAM:
        return np.array([xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))], np.uint64)
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
    found = codes.astype(np.uint64)
    width = 1
    # The hash of 2w characters from two hashes of w: all offsets at once, in five passes for 32.
    for multiplier in _MULTIPLIERS:
        found = found[:-width] * multiplier + found[width:]
        width *= 2
    found ^= found >> _SHIFT
    found *= _MIX
    found ^= found >> _SHIFT
    return found


def agreement(answers: Mapping[str, str]) -> dict[str, float]:
    """Return, by agent, the share of the other agents' answers that equal its own. `answers`: by
    agent; empty if fewer than two agents have one."""
    if len(answers) < 2:
        return {}
    counts = Counter(answers.values())
    return {agent: (counts[one] - 1) / (len(answers) - 1) for agent, one in answers.items()}


class PairedMeans:
    """The mean difference of two values over queries, each the mean of a query's trajectories."""

    def __init__(self) -> None:
        # By query: the values of either side.
        self._values: defaultdict[str, tuple[list[float], list[float]]]
        self._values = defaultdict(lambda: ([], []))

    def add(self, query_id: str, value: float, *, replaced: bool) -> None:
        """Add the value of one trajectory."""
        self._values[query_id][replaced].append(value)

    def difference(self) -> tuple[float, tuple[float, float] | None] | None:
        """Return the mean over queries of the mean as played minus the mean with the replacement,
        and its 95 % interval (of the normal distribution over queries; None for one query). None:
        no query has both."""
        both = [(one, other) for one, other in self._values.values() if one and other]
        found = [math.fsum(a) / len(a) - math.fsum(b) / len(b) for a, b in both]
        if not found:
            return None
        mean = math.fsum(found) / len(found)
        if len(found) < 2:
            return mean, None
        half = Z_95 * statistics.stdev(found) / math.sqrt(len(found))
        return mean, (mean - half, mean + half)


class SharesByQuery:
    """How often something is true, as a mean over queries of the share of their trajectories."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, query_id: str, true: bool) -> None:
        """Count one trajectory."""
        counts = self._counts[query_id]
        counts[0] += true
        counts[1] += 1

    def value(self) -> tuple[float, tuple[float, float]] | None:
        """Return the mean and its 95 % interval (Wilson's, with the number of queries); None if
        nothing was counted."""
        found = [true / count for true, count in self._counts.values()]
        if not found:
            return None
        mean = math.fsum(found) / len(found)
        return mean, interval(mean, len(found))
