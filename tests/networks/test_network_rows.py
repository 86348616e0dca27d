"""The rows of learners: every agent's own decisions, with any turns and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.networks.fragments import Fragment
from troupe.networks.rows import check, rows_of
from troupe.networks.vector import Spaces
from troupe.rpc.errors import InvalidArgument

SPACES = Spaces(observation=1, state=1, actions=3, steps=6)


def fragment(
    seed: int,
    lengths: list[int],
    agents: int = 2,
    turns: bool = False,
    masked: bool = False,
    leaving: bool = False,
) -> Fragment:
    """Random episodes; observations and states are the time. `masked`: the last action is never
    legal. `leaving`: all agents but one may leave an episode before it ends."""
    random = np.random.default_rng(seed)
    copies, steps = len(lengths), max(lengths)
    ends = np.array(lengths, np.int32)[:, None].repeat(agents, axis=1)
    over = (random.random(copies) < 0.5)[:, None].repeat(agents, axis=1)
    if leaving:
        ends[:, 1:] = random.integers(1, ends[:, 1:] + 1)
        over = random.random(over.shape) < 0.5
    time = np.arange(steps + 1, dtype=np.float32)[:, None, None, None]
    arrays: dict[str, Any] = {
        "observations": np.tile(time, (1, copies, agents, 1)),
        "state": np.tile(time[:, 0], (1, copies, 1)),
        "actions": random.integers(0, 2 if masked else 3, (steps, copies, agents)),
        "log_probs": random.normal(size=(steps, copies, agents)).astype(np.float32),
        "rewards": random.normal(size=(steps, copies, agents)).astype(np.float32),
        "lengths": ends,
        "terminated": over,
    }
    if turns:
        arrays["acting"] = random.random((steps, copies, agents)) < 0.5
    if masked:
        legal = np.array([True, True, False])
        arrays["legal"] = np.tile(legal, (steps + 1, copies, agents, 1))
    return Fragment("p", 0, tuple(f"agent_{i}" for i in range(agents)), arrays)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=2),
    turns=st.booleans(),
    leaving=st.booleans(),
)
def test_a_row_has_its_agent_s_decisions(
    seed: int, lengths: list[list[int]], turns: bool, leaving: bool
) -> None:
    fragments = [
        fragment(seed + i, own, turns=turns, leaving=leaving) for i, own in enumerate(lengths)
    ]
    rows = rows_of(fragments)
    episode = 0
    for one in fragments:
        for b in range(one.episodes):
            for a in range(2):
                length = int(one["lengths"][b, a])
                acting = one.arrays.get("acting", np.ones_like(one["rewards"], bool))
                times = [t for t in range(length) if acting[t, b, a]]
                assert rows.lengths[episode, a] == len(times)
                ends = [*times[1:], length]
                for k, (begin, end) in enumerate(zip(times, ends, strict=False)):
                    assert rows.observations[episode, a, k, 0] == begin
                    assert rows.state[episode, a, k, 0] == begin
                    assert rows.actions[episode, a, k] == one["actions"][begin, b, a]
                    assert rows.log_probs[episode, a, k] == one["log_probs"][begin, b, a]
                    gained = one["rewards"][begin:end, b, a].sum()
                    assert rows.rewards[episode, a, k] == pytest.approx(gained, abs=1e-5)
                assert rows.observations[episode, a, len(times), 0] == length
                assert rows.terminated[episode, a] == one["terminated"][b, a]
            episode += 1


def test_fragments_of_other_spaces_are_refused() -> None:
    good = fragment(0, [3, 2])
    check([good], SPACES, good.agents)
    with pytest.raises(InvalidArgument, match="at least one"):
        check([], SPACES, good.agents)
    with pytest.raises(InvalidArgument, match="the policy plays agent_9"):
        check([good], SPACES, ("agent_9",))
    with pytest.raises(InvalidArgument, match=r"O is 1, but the environment's is 4"):
        check([good], Spaces(4, 1, 3, 6), good.agents)
    with pytest.raises(InvalidArgument, match="but episodes have at most 2"):
        check([good], Spaces(1, 1, 3, 2), good.agents)
    with pytest.raises(InvalidArgument, match="actions beyond 0 to 1"):
        check([fragment(1, [6] * 3)], Spaces(1, 1, 2, 6), good.agents)
    with pytest.raises(InvalidArgument, match="does not fit these spaces"):
        check([good], Spaces(1, 1, 3, 6, continuous=True), good.agents)
    rewards = good["rewards"].copy()
    rewards[0, 0, 0] = np.nan
    broken = Fragment("p", 0, good.agents, {**good.arrays, "rewards": rewards})
    with pytest.raises(InvalidArgument, match="not finite"):
        check([broken], SPACES, good.agents)
