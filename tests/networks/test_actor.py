"""The actor plays whole episodes, the same ones for the same seed, and says how likely each action
was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from troupe.job.sections.network import NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.actor import Actor, PlayedCopies, Seat
from troupe.networks.fragments import Fragment
from troupe.networks.vector import (
    BrokenEnvironment,
    Observed,
    Spaces,
    Stepped,
    make_environment,
)
from troupe.rpc.errors import InvalidArgument, NotFound

PPO = NetworkSpec(hidden=(8,))


def weights(spec: NetworkSpec, spaces: Spaces, agents: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return ActingNetwork(spec, spaces, agents).state_dict()


def spread(spec: NetworkSpec = PPO, copies: int = 4, **settings: Any) -> Actor:
    environment = make_environment("simple_spread", copies, steps=5, **settings)
    actor = Actor(environment, {"team": Seat(spec, environment.agents)})
    actor.load("team", weights(spec, environment.spaces, 3), 7)
    return actor


def same(one: PlayedCopies, other: PlayedCopies) -> bool:
    mine, yours = one.fragments["team"], other.fragments["team"]
    return all(np.array_equal(mine[name], yours[name]) for name in mine.arrays)


@pytest.mark.parametrize(
    "spec",
    [
        PPO,
        NetworkSpec(kind="rnn", hidden=(8,), memory=4),
        NetworkSpec(hidden=(8,), parameters="per_agent"),
        NetworkSpec.model_validate({"hidden": [8], "learning": {"paradigm": "dqn"}}),
        NetworkSpec.model_validate({"hidden": [8], "learning": {"paradigm": "maddpg"}}),
    ],
)
def test_a_seed_is_an_episode(spec: NetworkSpec) -> None:
    actor = spread(spec)
    first = actor.sample(1)
    assert not same(first, actor.sample(2))
    assert same(first, actor.sample(1))
    assert same(first, spread(spec).sample(1))
    fragment = first.fragments["team"]
    assert (fragment.version, fragment.episodes, fragment.steps) == (7, 4, 20)
    assert fragment["observations"].shape == (6, 4, 3, 18)
    np.testing.assert_allclose(first.returns, fragment.returns(), rtol=1e-6)


@pytest.mark.parametrize("paradigm", ["ppo", "dqn"])
def test_log_probs_belong_to_the_drawn_actions(paradigm: str) -> None:
    learning: dict[str, Any] = {"paradigm": paradigm}
    if paradigm == "dqn":
        learning["epsilon"] = [0.5, 0.5]
    spec = NetworkSpec.model_validate({"hidden": [8], "learning": learning})
    actor = spread(spec, copies=400)
    fragment = actor.sample(3).fragments["team"]
    network = ActingNetwork(spec, Spaces(18, 54, 5, 5), 3)
    network.load_state_dict(weights(spec, Spaces(18, 54, 5, 5), 3))
    seen = torch.from_numpy(fragment["observations"][:-1]).flatten(0, 1)
    marked = torch.cat([seen, torch.eye(3).expand(len(seen), 3, 3)], dim=-1)
    out, _ = network.policy.step(marked, [None])
    if paradigm == "dqn":
        best = torch.nn.functional.one_hot(out.argmax(-1), 5)
        chances = 0.5 * best + 0.1
    else:
        chances = out.softmax(-1)
    drawn = torch.from_numpy(fragment["actions"]).flatten(0, 1)
    expected = chances.gather(-1, drawn.unsqueeze(-1)).squeeze(-1).log()
    np.testing.assert_allclose(
        torch.from_numpy(fragment["log_probs"]).flatten(0, 1), expected.detach(), atol=1e-5
    )
    # And the frequencies of 6,000 draws agree.
    counts = torch.nn.functional.one_hot(drawn, 5).float().mean(dim=(0, 1))
    np.testing.assert_allclose(counts, chances.mean(dim=(0, 1)).detach(), atol=0.03)


class Turns:
    """Two alternating agents; the last action is never legal, and copy b ends after b + 1 steps."""

    agents = ("a", "b")
    spaces = Spaces(observation=1, state=1, actions=3, steps=4)

    def __init__(self, copies: int) -> None:
        self.copies, self._step = copies, 0

    def reset(self, seed: int) -> Observed:
        self._step = 0
        return self._observed()

    def step(self, actions: Any) -> Stepped:
        assert (actions < 2).all()
        self._step += 1
        over = np.arange(self.copies) < self._step
        cut = np.full(self.copies, self._step >= 4)
        return Stepped(self._observed(), np.full((self.copies, 2), 1.0, np.float32), over, cut)

    def _observed(self) -> Observed:
        seen = np.full((self.copies, 2, 1), self._step, np.float32)
        legal = np.tile(np.array([True, True, False]), (self.copies, 2, 1))
        acting = np.zeros((self.copies, 2), bool)
        acting[:, self._step % 2] = True
        return Observed(seen, seen[:, 0], legal, acting)

    def close(self) -> None: ...


def test_turns_masks_and_lengths_are_recorded_for_each_policy_alone() -> None:
    environment = Turns(3)
    actor = Actor(environment, {"one": Seat(PPO, ("b",)), "two": Seat(PPO, ("a",))})
    for policy in ("one", "two"):
        actor.load(policy, weights(PPO, environment.spaces, 1), 0)
    played = actor.sample(0)
    assert played.lengths.tolist() == [1, 2, 3]
    assert played.returns.tolist() == [[1, 1], [2, 2], [3, 3]]
    fragment = played.fragments["one"]
    assert fragment.agents == ("b",)
    assert fragment["legal"].shape == (4, 3, 1, 3)
    assert fragment["acting"][:, :, 0].tolist() == [
        [False, False, False],
        [False, True, True],
        [False, False, False],
    ]
    assert fragment["terminated"].all()


@pytest.mark.parametrize("kind", ["mlp", "rnn"])
@pytest.mark.parametrize("parameters", ["shared", "per_agent"])
def test_a_network_plays_some_of_its_agents_as_it_plays_them_among_all(
    kind: str, parameters: str
) -> None:
    spec = NetworkSpec.model_validate({"kind": kind, "hidden": [8], "parameters": parameters})
    environment = make_environment("simple_spread", 4, steps=3)
    own, other = weights(spec, environment.spaces, 3), weights(PPO, environment.spaces, 1, seed=1)
    agents = environment.agents
    mixed = Actor(
        environment,
        {"own": Seat(spec, (agents[2], agents[0]), agents), "other": Seat(PPO, (agents[1],))},
    )
    mixed.load("own", own, 0)
    mixed.load("other", other, 0)
    fragment = mixed.sample(1).fragments["own"]
    assert fragment.agents == (agents[0], agents[2])
    network = ActingNetwork(spec, environment.spaces, 3)
    network.take(own)
    network.begin(4)
    seen = np.zeros((4, 3, environment.spaces.observation), np.float32)
    for step in range(3):
        seen[:, [0, 2]] = fragment["observations"][step]
        found = network.probabilities(torch.from_numpy(seen), None)[:, [0, 2]]
        drawn = torch.from_numpy(fragment["actions"][step]).unsqueeze(-1)
        expected = found.gather(-1, drawn).squeeze(-1).log()
        torch.testing.assert_close(
            torch.from_numpy(fragment["log_probs"][step]), expected.float(), atol=1e-5, rtol=1e-5
        )
    # The same network among others, and then with fewer of its agents.
    network.begin(4, [1])
    assert network.probabilities(torch.from_numpy(seen[:, [1]]), None).shape == (4, 1, 5)


def test_a_policy_in_earnest_does_not_explore() -> None:
    random = NetworkSpec.model_validate(
        {"hidden": [8], "learning": {"paradigm": "dqn", "epsilon": [1.0, 1.0]}}
    )
    environment = make_environment("two_step", 64)
    one, two = environment.agents
    actor = Actor(environment, {"p": Seat(PPO, (one,)), "q": Seat(random, (two,))})
    actor.load("p", weights(PPO, environment.spaces, 1), 0)
    actor.load("q", weights(random, environment.spaces, 1), 0)
    drawn = actor.sample(1).fragments
    earnest = actor.sample(1, earnest=("p", "q")).fragments
    first = [len(np.unique(fragments["q"]["actions"][0])) for fragments in (drawn, earnest)]
    assert first == [2, 1]
    # A learned distribution is also sampled without exploration.
    assert len(np.unique(earnest["p"]["actions"][0])) == 2


def test_seats_that_do_not_fit_are_refused() -> None:
    environment = make_environment("two_step", 1)
    with pytest.raises(InvalidArgument, match="exactly one policy"):
        Actor(environment, {"p": Seat(PPO, ("agent_0",))})
    with pytest.raises(InvalidArgument, match="was made for agent_1 only"):
        Actor(environment, {"p": Seat(PPO, environment.agents, ("agent_1",))})
    actor = Actor(environment, {"p": Seat(PPO, environment.agents)})
    with pytest.raises(NotFound, match="no weights yet"):
        actor.sample(0)
    with pytest.raises(NotFound, match="does not play here"):
        actor.load("q", {}, 0)
    good = weights(PPO, environment.spaces, 2)
    with pytest.raises(InvalidArgument, match="is missing"):
        actor.load("p", dict(list(good.items())[1:]), 0)
    with pytest.raises(InvalidArgument, match="has shape"):
        actor.load("p", {name: value[..., :1] for name, value in good.items()}, 0)


def test_a_fragment_of_arrays_that_do_not_fit_is_refused() -> None:
    fragment = spread().sample(4).fragments["team"]
    arrays = dict(fragment.arrays)
    with pytest.raises(InvalidArgument, match=r"B is 2 here"):
        Fragment("p", 0, fragment.agents, arrays | {"lengths": arrays["lengths"][:2]})
    with pytest.raises(InvalidArgument, match="no such array"):
        Fragment("p", 0, fragment.agents, arrays | {"pickle": arrays["lengths"]})


class Broken(Turns):
    """A number that is none comes in a step (0: the reset), of one copy."""

    def __init__(self, what: str, value: float, at: int, copy: int) -> None:
        super().__init__(3)
        self._broken = what, value, at, copy

    def step(self, actions: Any) -> Stepped:
        stepped = super().step(actions)
        what, value, at, copy = self._broken
        rewards = stepped.rewards.astype(np.float64)
        if what == "rewards" and self._step == at:
            rewards[copy, 1] = value
        return stepped._replace(rewards=rewards)

    def _observed(self) -> Observed:
        observed = super()._observed()
        what, value, at, copy = self._broken
        seen, state = (one.astype(np.float64) for one in observed[:2])
        if self._step == at and what == "observations":
            seen[copy, 1] = value
        if self._step == at and what == "state":
            state[copy] = value
        return observed._replace(observations=seen, state=state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("what", ["observations", "state", "rewards"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_values_that_are_not_finite_are_reported_with_step_and_copy(
    what: str, value: float, at: int
) -> None:
    if what == "rewards" and at == 0:
        return
    # Copy b ends after b + 1 steps: its later values are meaningless.
    for copy, matters in ((2, True), (0, at <= 1)):
        environment = Broken(what, value, at, copy)
        actor = Actor(environment, {"team": Seat(PPO, environment.agents)})
        actor.load("team", weights(PPO, environment.spaces, 2), 1)
        when = f"step {at}" if at else "reset"
        if matters:
            with pytest.raises(
                BrokenEnvironment, match=f"its {what} after {when} .* in copy {copy}"
            ):
                actor.sample(3)
        else:
            assert actor.sample(3).lengths.tolist() == [1, 2, 3]
