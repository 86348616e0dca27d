"""Monitors of a team against their definitions, counted in plain Python, on small conversations."""

from __future__ import annotations

import random
import statistics
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.algorithms.scores import interval
from troupe.algorithms.team_monitors import (
    GRAM,
    PairedMeans,
    SharesByQuery,
    agreement,
    copied_shares,
)

AGENTS = ("checker", "judge", "solver")
# Two letters and lengths around that of a passage: most texts share passages with another.
TEXTS = st.text("ab", max_size=3) | st.builds(
    lambda one, times: one * times, st.sampled_from(["a", "ab", "abb"]), st.integers(10, 20)
)
CONVERSATIONS = st.lists(st.tuples(st.sampled_from(AGENTS), TEXTS), max_size=8)


def words(count: int, seed: int) -> str:
    """A text that shares no passage with that of another seed."""
    drawn = random.Random(seed)
    return "".join(drawn.choice(string.ascii_lowercase) for _ in range(count))


def passages(text: str) -> list[str]:
    return [text[i : i + GRAM] for i in range(max(1, len(text) - GRAM + 1))] if text else []


def counted(replies: list[tuple[str, str]], task: list[str]) -> dict[str, float]:
    """The definition: a passage belongs to whoever wrote it first."""
    owner: dict[str, str] = {one: "" for text in task for one in passages(text)}
    own: Counter[str] = Counter()
    copied: Counter[str] = Counter()
    for agent, text in replies:
        for one in passages(text):
            first = owner.setdefault(one, agent)
            own[agent] += first != ""
            copied[agent] += first not in ("", agent)
    return {agent: copied[agent] / count for agent, count in own.items() if count}


@given(CONVERSATIONS, st.lists(TEXTS, max_size=2))
def test_copied_shares_are_those_counted_passage_by_passage(
    replies: list[tuple[str, str]], task: list[str]
) -> None:
    assert copied_shares(replies, task) == pytest.approx(counted(replies, task))


def test_who_repeats_another_agent_copies_and_who_repeats_itself_or_the_task_does_not() -> None:
    task, own, other = words(200, 1), words(300, 2), words(400, 3)
    replies = [("solver", own), ("checker", other), ("judge", own + own), ("solver", own + task)]
    shares = copied_shares(replies, [task])
    assert shares["solver"] == shares["checker"] == 0
    # Its own are the passages across the seam, which the solver did not write.
    assert shares["judge"] == (2 * (300 - GRAM + 1)) / (600 - GRAM + 1)
    assert copied_shares([("solver", task)], [task]) == {}
    assert copied_shares([("solver", "")]) == {}


def test_short_replies_are_compared_as_a_whole() -> None:
    replies = [("solver", "42"), ("checker", "42"), ("judge", "42, as said"), ("judge", "42")]
    assert copied_shares(replies) == {"solver": 0, "checker": 1, "judge": 0.5}


def test_half_a_copied_text_in_any_script_counts_half() -> None:
    said = "".join(chr(0x4E00 + i) for i in range(1000)) + "\ud800"
    shares = copied_shares([("solver", said), ("checker", said + words(1001, 5))])
    assert shares["checker"] == pytest.approx(0.5, abs=GRAM / 2002)


def test_the_shares_of_long_conversations_are_near_the_exact_ones() -> None:
    """Two replies of 130,000 characters: about one passage in sixteen is compared."""
    own = words(130_000, 6)
    shares = copied_shares([("solver", own), ("checker", own[:39_000] + words(91_000, 7))])
    assert shares["solver"] == 0
    assert shares["checker"] == pytest.approx(0.3, abs=0.02)


def test_agreement_is_the_share_of_others_with_the_same_answer() -> None:
    answers = {"a": "7", "b": "7", "c": "8", "d": "7"}
    assert agreement(answers) == {"a": 2 / 3, "b": 2 / 3, "c": 0, "d": 2 / 3}
    assert agreement({"a": "7"}) == agreement({}) == {}


def test_a_difference_pairs_the_trajectories_of_each_query() -> None:
    means = PairedMeans()
    for query, values in {"q0": ([1, 0], [0, 0]), "q1": ([1, 1], [1, 0, 1, 0])}.items():
        for replaced, side in enumerate(values):
            for value in side:
                means.add(query, value, replaced=bool(replaced))
    means.add("only played", 1, replaced=False)
    means.add("only replaced", 1, replaced=True)
    half = 1.959963984540054 * statistics.stdev([0.5, 0.5]) / 2**0.5
    assert means.difference() == (0.5, (0.5 - half, 0.5 + half))
    means.add("q2", 0, replaced=False)
    means.add("q2", 1, replaced=True)
    found = means.difference()
    assert found is not None
    assert found[0] == pytest.approx(0)
    assert found[1] == pytest.approx((-1.959963984540054 * 0.5, 1.959963984540054 * 0.5))


def test_a_difference_needs_a_query_with_both_and_its_interval_two() -> None:
    means = PairedMeans()
    means.add("q0", 1, replaced=False)
    assert means.difference() is None
    means.add("q0", 0, replaced=True)
    assert means.difference() == (1, None)


def test_shares_are_means_over_queries() -> None:
    shares = SharesByQuery()
    assert shares.value() is None
    for query, true in (("q0", True), ("q0", False), ("q0", False), ("q0", False), ("q1", True)):
        shares.add(query, true)
    assert shares.value() == (0.625, interval(0.625, 2))
