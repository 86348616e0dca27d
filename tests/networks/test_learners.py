"""Learners continue exactly from their state, change only by their input, and find the optimum of
games with a known optimum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.networks.test_network_rows import fragment
from troupe.job.sections.network import NetworkSpec
from troupe.networks.actor import Actor, Seat
from troupe.networks.fragments import SHAPES, Fragment
from troupe.networks.jobs import make_learner
from troupe.networks.learner_state import NetworkTrainer
from troupe.networks.qlearning import QLearner
from troupe.networks.vector import Spaces, VectorEnvironment, make_environment
from troupe.rpc.errors import InvalidArgument

SPACES = Spaces(observation=1, state=1, actions=3, steps=6)
AGENTS = ("agent_0", "agent_1")


def network(
    paradigm: str, kind: str = "mlp", parameters: str = "shared", **more: Any
) -> NetworkSpec:
    learning = {"paradigm": paradigm, **more}
    if paradigm not in ("ppo", "mappo"):
        learning = {"batch": 4, "buffer": 7, "updates": 2, **learning}
    else:
        learning = {"epochs": 2, "minibatches": 2, **learning}
    return NetworkSpec.model_validate(
        {"kind": kind, "hidden": [8], "memory": 4, "parameters": parameters, "learning": learning}
    )


EVERY = [
    ("ppo", "mlp", "shared"),
    ("ppo", "rnn", "per_agent"),
    ("mappo", "mlp", "per_agent"),
    ("dqn", "mlp", "shared"),
    ("dqn", "rnn", "shared"),
    ("vdn", "mlp", "shared"),
    ("qmix", "rnn", "per_agent"),
    ("maddpg", "mlp", "per_agent"),
]


@pytest.mark.parametrize(("paradigm", "kind", "parameters"), EVERY)
def test_a_learner_goes_on_from_its_state_bit_for_bit(
    paradigm: str, kind: str, parameters: str
) -> None:
    more = {"standardize_rewards": True} if paradigm == "maddpg" else {}
    spec = network(paradigm, kind, parameters, **more)
    learner = make_learner(spec, SPACES, AGENTS, seed=1)
    before = learner.published()
    # More than the buffer holds, so that its end has come round to its beginning.
    for seed in (1, 2):
        learner.update([fragment(seed, [3, 6, 2]), fragment(seed + 10, [1, 4])])
    saved = {name: value.clone() for name, value in learner.state().items()}
    assert any(not torch.equal(before[name], saved[f"weights.acting.{name}"]) for name in before)
    learner.update([fragment(3, [5, 2])])
    other = make_learner(spec, SPACES, AGENTS, seed=2)
    other.restore(saved)
    other.update([fragment(3, [5, 2])])
    mine, yours = learner.state(), other.state()
    assert mine.keys() == yours.keys()
    assert all(torch.equal(mine[name], yours[name]) for name in mine)
    assert all(torch.equal(learner.published()[name], v) for name, v in other.published().items())


def test_a_state_that_does_not_fit_moves_nothing() -> None:
    learner = make_learner(network("qmix"), SPACES, AGENTS, seed=1)
    learner.update([fragment(1, [3, 6])])
    saved = {name: value.clone() for name, value in learner.state().items()}
    other = make_learner(network("qmix"), SPACES, AGENTS, seed=2)
    before = {name: value.clone() for name, value in other.state().items()}
    for name in ("weights.mixer.hyper_b_1.bias", "buffer.cursor", "random.generator"):
        partial = {key: value for key, value in saved.items() if key != name}
        with pytest.raises(InvalidArgument, match=f"{name}: is missing"):
            other.restore(partial)
    with pytest.raises(InvalidArgument, match="not a tensor of this learner"):
        other.restore(saved | {"weights.more": torch.zeros(1)})
    with pytest.raises(InvalidArgument, match="has shape"):
        other.restore(saved | {"count.updates": torch.zeros(2)})
    assert all(torch.equal(value, before[name]) for name, value in other.state().items())


def test_refused_fragments_leave_the_learner_unchanged() -> None:
    learner = make_learner(network("vdn"), SPACES, AGENTS, seed=1)
    before = {name: value.clone() for name, value in learner.state().items()}
    with pytest.raises(InvalidArgument, match="take turns"):
        learner.update([fragment(1, [3], turns=True)])
    assert all(torch.equal(value, before[name]) for name, value in learner.state().items())
    with pytest.raises(InvalidArgument, match="learns values of discrete actions"):
        make_learner(network("dqn"), Spaces(1, 1, 3, 6, continuous=True), AGENTS, seed=1)
    with pytest.raises(ValueError, match="needs `kind: mlp`"):
        network("maddpg", kind="rnn")


@pytest.mark.parametrize("paradigm", ["ppo", "mappo", "dqn", "vdn", "qmix", "maddpg"])
def test_illegal_actions_teach_nothing(paradigm: str) -> None:
    more = {"regularization": 0.0} if paradigm == "maddpg" else {}
    learner = make_learner(network(paradigm, **more), SPACES, AGENTS, seed=1)
    turns = paradigm in ("ppo", "mappo", "dqn")
    before = learner.published()["policy.members.0.head.bias"]
    for seed in range(3):
        metrics = learner.update([fragment(seed, [4, 6, 1], turns=turns, masked=True)])
        assert np.isfinite(list(metrics.values())).all()
    after = learner.published()["policy.members.0.head.bias"]
    assert (after[:2] != before[:2]).all()
    assert after[2] == before[2]


@pytest.mark.parametrize("paradigm", ["ppo", "mappo"])
def test_padding_and_the_cut_of_fragments_change_nothing(paradigm: str) -> None:
    """One epoch in one minibatch: a step is a function of the set of episodes."""
    spec = network(paradigm, kind="rnn", epochs=1, minibatches=1)
    short, long = fragment(1, [2, 1]), fragment(2, [6])
    both = _joined(short, long)
    one, other = (make_learner(spec, SPACES, AGENTS, seed=3) for _ in range(2))
    one.update([short, long])
    other.update([both])
    for name, value in one.published().items():
        torch.testing.assert_close(value, other.published()[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("paradigm", "kind", "parameters"), EVERY)
def test_values_behind_the_end_of_an_episode_are_never_read(
    paradigm: str, kind: str, parameters: str
) -> None:
    given = [fragment(1, [2, 6, 1]), fragment(2, [3, 1]), fragment(3, [5, 4], leaving=True)]
    filled = []
    for one in given:
        arrays = {name: array.copy() for name, array in one.arrays.items()}
        for name, array in arrays.items():
            if SHAPES[name].startswith("T") and array.dtype.kind == "f":
                ends = one["lengths"] + SHAPES[name].startswith("T+1")
                ends = ends if "A" in SHAPES[name].split() else ends.max(axis=1)
                array[np.arange(len(array)).reshape(-1, *[1] * ends.ndim) >= ends] = np.nan
        filled.append(Fragment("p", 0, AGENTS, arrays))
    one, other = (
        make_learner(network(paradigm, kind, parameters), SPACES, AGENTS, seed=3) for _ in "12"
    )
    one.update(given)
    other.update(filled)
    for name, value in one.published().items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, other.published()[name])


@pytest.mark.parametrize("paradigm", ["ppo", "mappo"])
@pytest.mark.parametrize("off", [100.0, -100.0, 1000.0, -1000.0])
def test_weights_stay_finite_after_an_action_that_the_policy_hardly_takes(
    paradigm: str, off: float
) -> None:
    """Clipped decisions have no gradient, and the others learn."""
    given = fragment(1, [4, 6])
    log_probs = given["log_probs"].copy()
    log_probs[0] -= off
    far = Fragment("p", 0, AGENTS, {**given.arrays, "log_probs": log_probs})
    learner = make_learner(network(paradigm), SPACES, AGENTS, seed=3)
    before = learner.published()
    metrics = learner.update([far])
    assert all(np.isfinite(value) for value in metrics.values())
    after = learner.published()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("paradigm", ["ppo", "mappo", "dqn"])
def test_agents_that_did_not_play_teach_nothing(paradigm: str) -> None:
    """Fragments of some of its agents, in one update, are those in which the others never act."""
    first, second = fragment(1, [4, 2]), fragment(2, [3])
    some, whole = [], []
    for seat, one in ((1, first), (0, second)):
        acting = np.zeros(one["rewards"].shape, bool)
        acting[:, :, seat] = True
        whole.append(Fragment("p", 0, AGENTS, {**one.arrays, "acting": acting}))
        own = {
            name: array.take([seat], SHAPES[name].split().index("A"))
            if "A" in SHAPES[name].split()
            else array
            for name, array in one.arrays.items()
        }
        some.append(Fragment("p", 0, (AGENTS[seat],), own))
    # In others it had all seats: in self-play it learns from both.
    both = fragment(3, [2])
    some.append(both)
    whole.append(both)
    learners = [make_learner(network(paradigm), SPACES, AGENTS, seed=3) for _ in range(2)]
    before = learners[0].published()
    metrics = [one.update(them) for one, them in zip(learners, (some, whole), strict=True)]
    assert metrics[0]["return"] == pytest.approx(
        np.mean([*first.returns()[:, 1], *second.returns()[:, 0], *both.returns().ravel()])
    )
    after, wanted = learners[0].published(), learners[1].published()
    assert all(torch.equal(value, wanted[name]) for name, value in after.items())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("parameters", ["shared", "per_agent"])
def test_a_memory_in_turns_is_of_an_agents_own_decisions(parameters: str) -> None:
    """For who plays as for who learns: before the first gradient all ratios are 1."""
    environment = make_environment("openspiel", 16, game="leduc_poker", seats=None)
    agents = environment.agents
    spec = network("ppo", kind="rnn", parameters=parameters, epochs=1, minibatches=1)
    learner = make_learner(spec, environment.spaces, agents, seed=1)
    torch.manual_seed(0)
    learner.restore(
        {
            name: value + 0.5 * torch.randn_like(value)
            if name.startswith("weights.acting.policy")
            else value
            for name, value in learner.state().items()
        }
    )
    actor = Actor(environment, {"p": Seat(spec, agents)})
    actor.load("p", learner.published(), 0)
    metrics = learner.update([actor.sample(1).fragments["p"]])
    assert metrics["kl_approx"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0


def test_a_team_learner_refuses_fragments_of_single_agents() -> None:
    learner = make_learner(network("qmix"), SPACES, AGENTS, seed=1)
    with pytest.raises(InvalidArgument, match="are of agent_0"):
        learner.update([fragment(1, [3], agents=1)])


def _joined(short: Fragment, long: Fragment) -> Fragment:
    arrays = {}
    for name, array in long.arrays.items():
        part = short[name]
        axis = SHAPES[name].split().index("B")
        if axis:
            # Values after an episode's end are meaningless: make them extreme.
            filler = np.full((len(array) - len(part), *part.shape[1:]), 2, part.dtype)
            part = np.concatenate([part, filler])
        arrays[name] = np.concatenate([part, array], axis=axis)
    return Fragment("p", 0, long.agents, arrays)


@pytest.mark.parametrize("paradigm", ["dqn", "vdn"])
@pytest.mark.parametrize("kind", ["mlp", "rnn"])
def test_targets_are_of_the_same_agents_next_decision(paradigm: str, kind: str) -> None:
    """The loss of one batch, computed naively: one step, agent and episode at a time."""
    spec = network(paradigm, kind=kind, double=False, gamma=0.9, buffer=1, batch=1, updates=1)
    learner = make_learner(spec, SPACES, AGENTS, seed=4)
    assert isinstance(learner, QLearner)
    one = fragment(5, [5])
    policy = learner._acting.policy
    # Values of what each agent saw, at all times [A, T + 1, n], from the beginning.
    seen = torch.from_numpy(one["observations"][:, 0]).transpose(0, 1)
    marked = torch.cat([seen, torch.eye(2)[:, None].expand(2, 6, 2)], dim=-1)
    with torch.no_grad():
        values = policy.members[0](marked)
    errors = []
    for t in range(5):
        taken = [float(values[a, t, one["actions"][t, 0, a]]) for a in range(2)]
        follows = 0.0 if t == 4 and one["terminated"].all() else 0.9
        best = [float(values[a, t + 1].max()) for a in range(2)]
        rewards = one["rewards"][t, 0]
        if paradigm == "vdn":
            errors.append(sum(taken) - (rewards.mean() + follows * sum(best)))
        else:
            errors += [taken[a] - (rewards[a] + follows * best[a]) for a in range(2)]
    metrics = learner.update([one])
    assert metrics["loss"] == pytest.approx(np.mean(np.square(errors)), rel=1e-4)


def train(
    spec: NetworkSpec, environment: VectorEnvironment, updates: int, enough: Callable[[float], bool]
) -> float:
    """Return the mean return without exploration, once it is enough or after this number of
    updates."""
    learner: NetworkTrainer = make_learner(spec, environment.spaces, environment.agents, seed=1)
    actor = Actor(environment, {"p": Seat(spec, environment.agents)})
    found = float("nan")
    for version in range(updates + 1):
        actor.load("p", learner.published(), version)
        if version and version % 20 == 0:
            found = float(actor.evaluate([10**6]).mean())
            if enough(found):
                break
        learner.update([actor.sample(version).fragments["p"]])
    return found


# The climbing game (Claus and Boutilier 1998) without its penalties' depth: both get the table.
_TEAM = [[[4, -2, 0], [-2, 2, 1], [0, 1, 1]]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paradigm", "kind", "more"),
    [
        ("ppo", "mlp", {"lr": 3e-3}),
        ("mappo", "rnn", {"lr": 3e-3}),
        ("dqn", "mlp", {"lr": 3e-3, "batch": 32, "buffer": 500, "epsilon_episodes": 500}),
        ("maddpg", "mlp", {"batch": 64, "buffer": 1000, "actor_lr": 3e-3, "critic_lr": 1e-2}),
    ],
)
def test_every_paradigm_learns_a_team_game(paradigm: str, kind: str, more: dict[str, Any]) -> None:
    environment = make_environment("matrix", 16, payoffs=_TEAM)
    assert (
        train(network(paradigm, kind, "per_agent", **more), environment, 200, lambda r: r == 4) == 4
    )


@pytest.mark.slow
@pytest.mark.parametrize(("paradigm", "finds"), [("qmix", 8), ("vdn", 7)])
def test_qmix_finds_what_a_sum_of_values_cannot(paradigm: str, finds: int) -> None:
    """Rashid et al. 2018, section 5.1 and table 1."""
    spec = network(paradigm, lr=3e-3, batch=32, buffer=300, updates=4, epsilon=[1.0, 1.0])
    environment = make_environment("two_step", 32)
    # It has to be stable: the untrained policy is worth anything.
    train(spec, environment, 60, lambda _: False)
    assert train(spec, environment, 100, lambda _: False) == finds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paradigm", "more"),
    [
        ("ppo", {"lr": 3e-3}),
        ("maddpg", {"batch": 64, "buffer": 4000, "actor_lr": 3e-3, "critic_lr": 1e-2}),
    ],
)
def test_continuous_actions_are_learned(paradigm: str, more: dict[str, Any]) -> None:
    """Moving costs, and the hill is out of reach in 20 steps: the agent learns to stand still."""
    spec = network(paradigm, **more)
    environment = make_environment("gymnasium", 8, id="MountainCarContinuous-v0", steps=20)
    learner = make_learner(spec, environment.spaces, environment.agents, seed=1)
    actor = Actor(environment, {"p": Seat(spec, environment.agents)})
    returns = []
    for version in range(60):
        actor.load("p", learner.published(), version)
        played = actor.sample(version)
        returns.append(float(played.returns.mean()))
        learner.update([played.fragments["p"]])
    assert played.fragments["p"]["actions"].shape == (20, 8, 1, 1)
    assert abs(np.mean(returns[-5:])) < 0.65 * abs(np.mean(returns[:5]))
