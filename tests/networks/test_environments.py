"""Vectorised environments match their originals step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpe2 import simple_spread_v3

from troupe.networks.environments.simple_spread import SimpleSpread
from troupe.networks.vector import make_environment
from troupe.rpc.errors import InvalidArgument


@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("continuous", [False, True])
def test_simple_spread_is_mpe2s_step_by_step(agents: int, continuous: bool) -> None:
    copies, random = 3, np.random.default_rng(7)
    ours = SimpleSpread(copies, agents=agents, continuous=continuous, local_ratio=0.3)
    # Near each other, so that they push and bump.
    positions = random.uniform(-0.4, 0.4, (copies, agents, 2))
    landmarks = random.uniform(-1, 1, (copies, agents, 2))
    seen = ours.place(positions, landmarks)
    originals = []
    for b in range(copies):
        original = simple_spread_v3.parallel_env(
            N=agents, local_ratio=0.3, continuous_actions=continuous
        )
        original.reset(seed=b)
        world = original.unwrapped.world
        for i in range(agents):
            world.agents[i].state.p_pos = positions[b, i].copy()
            world.landmarks[i].state.p_pos = landmarks[b, i].copy()
        originals.append(original)
    bumped = 0.0
    for step in range(25):
        actions: Any = (
            random.random((copies, agents, 5), np.float32)
            if continuous
            else random.integers(0, 5, (copies, agents))
        )
        stepped = ours.step(actions)
        seen = stepped.observed
        for b, original in enumerate(originals):
            taken = {f"agent_{i}": actions[b, i] for i in range(agents)}
            theirs, rewards, _, truncations, _ = original.step(taken)
            for i, agent in enumerate(ours.agents):
                np.testing.assert_allclose(seen.observations[b, i], theirs[agent], atol=1e-6)
                assert stepped.rewards[b, i] == pytest.approx(rewards[agent], abs=1e-5)
            np.testing.assert_allclose(
                seen.state[b], original.state() if step < 24 else seen.state[b], atol=1e-6
            )
            assert stepped.truncated[b] == truncations["agent_0"]
        bumped = max(bumped, float(np.ptp(stepped.rewards, axis=1).max()))
    assert agents == 2 or bumped > 0, "nobody bumped: the test saw too little"


def test_the_first_release_moves_at_once_and_shares_the_sum_of_rewards() -> None:
    environment = SimpleSpread(1, variant="mpe")
    positions = np.array([[[0.0, 0.0], [0.1, 0.0], [1.0, 1.0]]])
    landmarks = np.array([[[0.0, 1.0], [0.5, 0.0], [1.0, 1.0]]])
    environment.place(positions, landmarks)
    stepped = environment.step(np.array([[0, 0, 2]]))
    at = stepped.observed.observations[0, :, 2:4]
    assert at[2].tolist() == pytest.approx([1.05, 1.0])
    away = np.linalg.norm(at[:, None] - landmarks[0][None], axis=-1).min(axis=0).sum()
    near = np.linalg.norm(at[:, None] - at[None], axis=-1) < 0.3
    # An agent also counts as near itself, as in the first release.
    assert stepped.rewards[0].tolist() == pytest.approx([-3 * away - near.sum()] * 3, rel=1e-6)


def test_pettingzoo_copies_are_their_originals() -> None:
    entrypoint = "mpe2.simple_spread_v3:parallel_env"
    ours = make_environment("pettingzoo", 2, entrypoint=entrypoint, steps=25, N=2)
    seeds = np.random.SeedSequence(5).generate_state(2)
    first = ours.reset(5)
    assert first.legal is None
    for b in range(2):
        original = simple_spread_v3.parallel_env(N=2)
        theirs, _ = original.reset(seed=int(seeds[b]))
        np.testing.assert_array_equal(first.observations[b, 1], theirs["agent_1"])
    stepped = ours.step(np.array([[1, 2], [3, 4]]))
    theirs, rewards, *_ = original.step({"agent_0": 3, "agent_1": 4})
    np.testing.assert_array_equal(stepped.observed.observations[1, 0], theirs["agent_0"])
    assert stepped.rewards[1, 0] == pytest.approx(rewards["agent_0"])
    ours.close()


def test_a_copy_that_has_ended_waits() -> None:
    ours = make_environment("gymnasium", 2, id="CartPole-v1", steps=60)
    ours.reset(3)
    ended = np.zeros(2, bool)
    seen = None
    for step in range(60):
        # One copy balances badly, the other a little better.
        stepped = ours.step(np.array([[0], [step % 2]]))
        if ended[0]:
            assert stepped.rewards[0, 0] == 0
            assert seen is not None
            np.testing.assert_array_equal(stepped.observed.observations[0], seen)
        ended |= stepped.terminated[:, 0]
        if stepped.terminated[0, 0]:
            seen = stepped.observed.observations[0].copy()
    assert ended[0]
    assert stepped.truncated[1, 0] or ended[1]
    ours.close()


def test_the_two_step_game_has_the_paper_s_rewards() -> None:
    for first, second, both in ((0, 0, 7), (1, 0, 0), (1, 1, 8)):
        environment = make_environment("two_step", 1)
        environment.reset(0)
        environment.step(np.array([[first, 0]]))
        stepped = environment.step(np.array([[second, second]]))
        assert stepped.rewards.tolist() == [[both, both]]
        assert stepped.terminated.all()


def test_an_unusable_environment_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidArgument, match="no vectorised environment has this name"):
        make_environment("simple_sprea", 1)
    with pytest.raises(InvalidArgument, match="does not take these settings"):
        make_environment("two_step", 1, speed=3)
    with pytest.raises(InvalidArgument, match="not a VectorEnvironment"):
        make_environment("builtins:dict", 1)
    with pytest.raises(InvalidArgument, match="one table per agent"):
        make_environment("matrix", 1, payoffs=[[1, 2], [3, 4]])
