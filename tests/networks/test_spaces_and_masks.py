"""Every space, mask and set of agents of Gymnasium and PettingZoo is played rightly, or refused by
name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.rollout.networks.arena import Arena, Play, ServedVersion
from tests.networks.worlds import HERE, Part, Solo, cast, solo, twisted
from troupe.job import JobSpec
from troupe.job.sections.network import NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.actor import Actor, PlayedCopies, Seat
from troupe.networks.jobs import make_learner
from troupe.networks.vector import (
    BrokenEnvironment,
    Observed,
    Spaces,
    Stepped,
    VectorEnvironment,
    make_environment,
)
from troupe.rpc.errors import InvalidArgument
from troupe.workflow.errors import EnvironmentFault

PPO = NetworkSpec(hidden=(8,))
GRAPH = spaces.Graph(spaces.Box(-1, 1, (2,)), None)


def played(environment: VectorEnvironment, spec: NetworkSpec = PPO, seed: int = 0) -> PlayedCopies:
    torch.manual_seed(seed)
    agents = environment.agents
    actor = Actor(environment, {"p": Seat(spec, agents)})
    actor.load("p", ActingNetwork(spec, environment.spaces, len(agents)).state_dict(), 0)
    return actor.sample(seed)


# Spaces.


@pytest.mark.parametrize(
    "moves",
    [
        spaces.Discrete(3, start=10),
        spaces.Discrete(2, start=-1),
        spaces.Discrete(3, start=253, dtype=np.uint8),
        spaces.Box(-2, 5, (2,)),
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Box(np.array([-1, 0, 7]), np.array([1, 10, 7]), dtype=np.float32),
        spaces.Box(np.float32(0.1), np.float32(0.3), ()),
        spaces.Box(-3e38, 3e38, (1,)),
    ],
    ids=str,
)
def test_actions_are_elements_of_the_action_space(moves: Any) -> None:
    assert played(solo(moves=moves)).lengths.tolist() == [4, 4]


def test_every_action_of_a_discrete_space_is_taken() -> None:
    actions = spaces.Discrete(3, start=10)
    returns = played(solo(copies=200, steps=1, moves=actions)).returns
    assert set(returns.ravel()) == {10, 11, 12}


@pytest.mark.parametrize(
    "moves",
    [
        spaces.MultiBinary(4),
        spaces.MultiBinary([2, 2]),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([[2, 3], [2, 2]], start=[[1, 1], [0, 0]]),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2)]),
        GRAPH,
        spaces.Box(0, 255, (2,), np.uint8),
        spaces.Box(-np.inf, 1, (2,)),
        spaces.Box(0, 1, (0,)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_action_space_that_networks_cannot_play_is_refused_by_name(moves: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        solo(moves=moves)
    assert refused.value.kind == "unsupported_space"
    assert "agent 'agent'" in refused.value.message
    assert str(moves) in refused.value.message


LEAVES = st.sampled_from(
    [
        spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(-1, 1, ()),
        spaces.Discrete(5, start=-2),
        spaces.MultiBinary([2, 3]),
        spaces.MultiDiscrete([3, 4], start=[1, -1]),
    ]
)
VECTORS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict)
    ),
    max_leaves=4,
)


@settings(max_examples=15, deadline=None)
@given(seen=VECTORS, masked=st.booleans())
def test_observations_of_vector_spaces_are_flattened(seen: Any, masked: bool) -> None:
    shown = spaces.Dict({"observation": seen, "action_mask": spaces.MultiBinary(2)})
    environment = solo(copies=1, seen=shown if masked else seen)
    original = Solo(shown if masked else seen)
    own = int(np.random.SeedSequence(3).generate_state(1)[0])
    wanted, _ = original.reset(seed=own)
    observed = environment.reset(3)
    flat = spaces.flatten(seen, wanted["observation"] if masked else wanted)
    np.testing.assert_array_equal(observed.observations[0, 0], flat.astype(np.float32))
    assert environment.spaces.observation == spaces.flatdim(seen)
    if masked:
        assert observed.legal is not None
        np.testing.assert_array_equal(observed.legal[0, 0], wanted["action_mask"])
    else:
        assert observed.legal is None


@pytest.mark.parametrize(
    "part",
    [spaces.Text(3), spaces.Sequence(TWO := spaces.Discrete(2)), spaces.OneOf([TWO]), GRAPH],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_observation_space_that_is_not_a_vector_is_refused_by_name(
    part: Any, nested: bool
) -> None:
    seen = spaces.Dict({"x": spaces.Tuple([part, TWO])}) if nested else part
    with pytest.raises(InvalidArgument, match=type(part).__name__) as refused:
        solo(seen=seen)
    assert refused.value.kind == "unsupported_space"


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (spaces.Box(-1, 1, (3,)), np.zeros(2)),
        (spaces.Box(-1, 1, (3,)), np.zeros(1)),  # NumPy would broadcast it
        (spaces.Box(-1, 1, (3,)), None),
        (spaces.Discrete(3, start=10), 3),  # NumPy would count from the end
        (spaces.Dict({"a": TWO}), {"b": 1}),
        (spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3, start=10)])}), {"a": (8,)}),
        (spaces.MultiDiscrete([3, 4]), np.array([3, 0])),  # NumPy would set the other's number
        (spaces.MultiDiscrete([3, 4], start=[1, 1]), [0, 1]),
        (spaces.MultiBinary(3), [0, 2, 1]),
        (spaces.Discrete(3), 1.0),
        (spaces.Tuple([TWO, TWO]), (1,)),
    ],
)
def test_an_observation_outside_of_its_space_is_named(
    space: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = solo(seen=space)
    monkeypatch.setattr(space, "sample", lambda: given)
    with pytest.raises(BrokenEnvironment, match=r"of agent 'agent' of .* after reset in copy"):
        environment.reset(0)


# Returned values of environments.


def replaced(place: int, **given: Any) -> Any:
    """A twist: the entries of one part of a result replaced; None takes an entry away."""

    def twist(result: tuple[Any, ...]) -> tuple[Any, ...]:
        part = {name: one for name, one in (result[place] | given).items() if one is not None}
        return (*result[:place], part, *result[place + 1 :])

    return twist


@pytest.mark.parametrize(
    "twists",
    [
        {"reset": lambda given: (given[0], None)},
        {"reset": lambda given: (given[0], {})},
        {"step": lambda given: (*given[:4], None)},
        {"step": lambda given: (*given[:4], {"a": None})},
        {"step": replaced(1, a=np.array([1.0]), b=np.float64(1))},
        {"step": replaced(1, a=np.array([[1]]), b=True)},
        {"step": replaced(2, a=np.array([False]), b=0, __all__=False)},
        {"step": replaced(3, a=None, b=np.bool_(False))},
    ],
)
def test_results_that_mean_the_same_are_played_alike(twists: Any) -> None:
    assert played(twisted(**twists)).returns.tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize(
    ("twists", "field", "said"),
    [
        ({"reset": lambda given: given[0]}, "reset", "returns a dict, not a tuple of 2"),
        ({"step": lambda given: given[:4]}, "step", "returns a tuple of 4, not a tuple of 5"),
        ({"reset": lambda given: None}, "reset", "returns a NoneType"),
        ({"reset": replaced(0, b=None)}, "observations", "no observation after reset in copy 0"),
        ({"step": replaced(0, a=None)}, "observations", "no observation after step 1 in copy 0"),
        ({"step": replaced(1, a="one")}, "rewards", "a reward after step 1 in copy 0 is not a num"),
        ({"step": replaced(1, a=np.ones(2))}, "rewards", "not a number: array([1., 1.])"),
    ],
)
def test_a_result_that_cannot_be_played_is_named(twists: Any, field: str, said: str) -> None:
    with pytest.raises(BrokenEnvironment) as bad:
        played(twisted(**twists))
    assert bad.value.field == field
    assert said in bad.value.message


# Masks.


def test_a_mask_that_appears_after_reset_is_followed() -> None:
    moves = spaces.Discrete(3)
    masks = [None, [0, 1, 0], None, np.array([1, 0, 0], np.int8), [True, True, True]]
    environment = solo(copies=50, steps=4, moves=moves, masks=masks)
    for paradigm in ("ppo", "dqn"):
        spec = NetworkSpec.model_validate({"hidden": [8], "learning": {"paradigm": paradigm}})
        fragment = played(environment, spec).fragments["p"]
        assert set(fragment["actions"][1].ravel()) == {1}
        assert set(fragment["actions"][3].ravel()) == {0}
        # Without a mask all actions are legal, also behind one.
        assert set(fragment["actions"][[0, 2]].ravel()) == {0, 1, 2}
        wanted = [[1, 1, 1], [0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]
        assert fragment["legal"][:, 7, 0].tolist() == np.array(wanted, bool).tolist()


@pytest.mark.parametrize("paradigm", ["ppo", "mappo", "dqn", "vdn", "qmix", "maddpg"])
def test_a_mask_that_allows_no_action_is_an_error_that_says_where(paradigm: str) -> None:
    spec = NetworkSpec.model_validate({"hidden": [8], "learning": {"paradigm": paradigm}})
    environment = cast(a=Part(), b=Part(masks={2: [0, 0, 0]}))
    with pytest.raises(BrokenEnvironment) as refused:
        played(environment, spec)
    message = refused.value.message
    assert refused.value.kind == "no_legal_action"
    where = "of agent 'b' of tests.networks.worlds:Cast after step 2 in copy 0"
    assert f"mask {where} allows no action" in message


@pytest.mark.parametrize("paradigm", ["ppo", "mappo", "dqn", "vdn", "qmix", "maddpg"])
@pytest.mark.parametrize("in_observation", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_a_mask_of_zeros_of_an_agent_that_has_ended_asks_for_nothing(
    paradigm: str, in_observation: bool, cut: bool
) -> None:
    learning = {"paradigm": paradigm}
    spec = NetworkSpec.model_validate({"hidden": [8], "learning": learning})
    gone = Part(leaves=2, cut=cut, masks={0: [1, 1, 0], 2: [0, 0, 0]})
    environment = cast(a=Part(), b=gone, in_observation=in_observation)
    learner = make_learner(spec, environment.spaces, environment.agents, 0)
    metrics = learner.update([played(environment, spec).fragments["p"]])
    assert np.isfinite(list(metrics.values())).all()
    assert all(torch.isfinite(value).all() for value in learner.published().values())


@pytest.mark.parametrize("paradigm", ["dqn", "vdn", "maddpg"])
def test_masks_that_appear_in_a_later_episode_fit_the_replay_buffer(paradigm: str) -> None:
    learning = {"paradigm": paradigm, "batch": 4, "updates": 1}
    spec = NetworkSpec.model_validate({"hidden": [8], "learning": learning})
    plain, masked = cast(a=Part(), b=Part()), cast(a=Part(), b=Part(masks={3: [0, 1, 0]}))
    learner = make_learner(spec, plain.spaces, plain.agents, 0)
    for environment in (plain, masked, plain):
        learner.update([played(environment, spec).fragments["p"]])
    assert all(torch.isfinite(value).all() for value in learner.published().values())


@pytest.mark.parametrize(
    "mask",
    [[1, 1], [1, 1, 1, 1], [[1, 1, 1]], 1, [1, 2, 0], [0.5, 0.5, 0], "110", [None] * 3, [[1], 2]],
)
def test_a_mask_that_is_not_one_number_for_each_action_is_refused(mask: Any) -> None:
    environment = solo(moves=spaces.Discrete(3), masks=[None, mask])
    with pytest.raises(BrokenEnvironment) as refused:
        played(environment)
    assert refused.value.field == "action_mask"
    where = f"of agent 'agent' of {HERE}:Solo-v0 after step 1 in copy 0"
    assert f"mask {where} is not a vector of 3" in refused.value.message


class Loose:
    """A user's vectorised environment whose arrays appear, vanish or have wrong shapes."""

    agents = ("a", "b")
    spaces = Spaces(observation=1, state=1, actions=3, steps=3)
    copies = 2

    def __init__(self, **arrays: Any) -> None:
        self._arrays, self._step = arrays, 0

    def reset(self, seed: int) -> Observed:
        self._step = 0
        return self._observed()

    def step(self, actions: Any) -> Stepped:
        self._step += 1
        flags = {"rewards": np.zeros((2, 2), np.float32)}
        flags |= {name: np.zeros(2, bool) for name in ("terminated", "truncated")}
        return Stepped(self._observed(), **(flags | self._own(Stepped)))

    def close(self) -> None: ...

    def _observed(self) -> Observed:
        seen = np.zeros((2, 2, 1), np.float32)
        return Observed(seen, seen[:, 0])._replace(**self._own(Observed))

    def _own(self, kind: Any) -> dict[str, Any]:
        given = {name: array for name, array in self._arrays.items() if name in kind._fields}
        return given if self._step == 1 else {}


def test_masks_and_turns_that_appear_and_vanish_are_recorded() -> None:
    legal = np.zeros((2, 2, 3), bool)
    legal[..., 1] = True
    acting = np.array([[True, False]] * 2)
    fragment = played(Loose(legal=legal, acting=acting)).fragments["p"]
    assert fragment["legal"][[0, 2, 3]].all()
    assert set(fragment["actions"][1].ravel()) == {1}
    assert fragment["acting"].tolist() == [[[True] * 2] * 2, [[True, False]] * 2, [[True] * 2] * 2]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("observations", np.zeros((2, 1, 1))),
        ("state", np.zeros(2)),
        ("legal", np.ones((2, 2, 1), bool)),
        ("legal", np.ones(3, bool)),
        ("acting", np.ones(2, bool)),
        ("rewards", np.zeros(2)),
        ("terminated", np.zeros((2, 1), bool)),
        ("truncated", np.zeros((1, 2), bool)),
    ],
)
def test_an_array_of_another_shape_is_named(name: str, array: Any) -> None:
    with pytest.raises(BrokenEnvironment, match=f"its {name} after step 1 have the shape") as bad:
        played(Loose(**{name: array}))
    assert bad.value.field == name


# Agents that come and go.


def test_an_agent_that_leaves_early_does_not_end_the_episode_of_the_others() -> None:
    found = played(cast(steps=6, a=Part(), b=Part(leaves=2), c=Part(leaves=4, cut=True)))
    fragment = found.fragments["p"]
    assert found.lengths.tolist() == [6, 6]
    assert fragment["lengths"].tolist() == [[6, 2, 4]] * 2
    assert fragment["terminated"].tolist() == [[False, True, False]] * 2
    assert found.returns.tolist() == [[6, 2, 4]] * 2
    # Its last observation is kept; then it is not seen any more, also in the state.
    seen = fragment["observations"][:, 0, :, 0].T.tolist()
    assert seen == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0]]
    np.testing.assert_array_equal(fragment["state"], fragment["observations"][..., 0])


def test_a_copy_ends_when_its_last_agent_leaves() -> None:
    found = played(cast(steps=9, a=Part(leaves=3), b=Part(leaves=5)))
    assert found.lengths.tolist() == [5, 5]
    assert found.fragments["p"]["terminated"].all()


def test_an_agent_that_joins_late_has_no_decisions_before() -> None:
    environment = cast(steps=6, a=Part(), b=Part(joins=2, leaves=5), c=Part(joins=50))
    fragment = played(environment).fragments["p"]
    acting = fragment["acting"][:, 0].T.tolist()
    assert acting == [[True] * 6, [False, False, True, True, True, False], [False] * 6]
    for paradigm in ("ppo", "mappo", "dqn"):
        spec = NetworkSpec.model_validate({"hidden": [8], "learning": {"paradigm": paradigm}})
        learner = make_learner(spec, environment.spaces, environment.agents, 0)
        metrics = learner.update([played(environment, spec).fragments["p"]])
        assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("returns", [3, 5])
def test_an_agent_that_is_there_again_after_its_end_is_named(cut: bool, returns: int) -> None:
    environment = cast(steps=9, a=Part(), b=Part(leaves=2, cut=cut, returns=returns))
    said = f"agent 'b' is there again after step {returns} in copy 0, after its episode ended"
    with pytest.raises(BrokenEnvironment, match=said) as bad:
        played(environment)
    assert bad.value.field == "agents"


@pytest.mark.parametrize("cut", [False, True])
def test_the_value_of_an_agent_is_bootstrapped_where_it_was_cut_off(cut: bool) -> None:
    """Fitted values of an agent that left with 1 to come: 1, or more if its return continues."""
    learning = {"paradigm": "dqn", "gamma": 0.5, "lr": 0.05, "updates": 100, "tau": 0.2}
    spec = NetworkSpec.model_validate({"hidden": [16], "learning": learning})
    environment = cast(steps=3, copies=4, a=Part(), b=Part(leaves=1, cut=cut))
    learner = make_learner(spec, environment.spaces, environment.agents, 0)
    fragment = played(environment, spec).fragments["p"]
    learner.update([fragment])
    network = ActingNetwork(spec, environment.spaces, 2)
    network.take(learner.published())
    seen = torch.tensor([[[0.0, 0, 1]], [[1.0, 0, 1]]])
    with torch.no_grad():
        now, then = network.policy.step(seen, [None])[0][:, 0]
    drawn = fragment["actions"][0, :, 1]
    wanted = 1 + (0.5 * float(then.max()) if cut else 0.0)
    assert now[drawn].numpy() == pytest.approx(wanted, abs=0.05)


MASK = st.lists(st.integers(0, 1), min_size=3, max_size=3).filter(any)
PARTS = st.builds(
    Part,
    joins=st.integers(0, 5),
    leaves=st.integers(1, 8),
    cut=st.booleans(),
    masks=st.dictionaries(st.integers(0, 6), MASK),
)


@settings(max_examples=40, deadline=None)
@given(others=st.lists(PARTS, max_size=3), first=PARTS, steps=st.integers(1, 7))
def test_every_agent_decides_from_when_it_joins_until_it_leaves(
    others: list[Part], first: Part, steps: int
) -> None:
    parts = {f"agent_{i}": part for i, part in enumerate([replace(first, joins=0), *others])}
    # `Cast` asserts that actions come from those who are there, and are legal.
    fragment = played(cast(steps=steps, **parts)).fragments["p"]
    leaves = {name: max(part.leaves, part.joins + 1) for name, part in parts.items()}
    there = [
        any(part.joins <= t < leaves[name] for name, part in parts.items())
        for t in range(steps + 1)
    ]
    end = min(steps, there.index(False) if False in there else steps)
    acting = fragment.arrays.get("acting", np.ones_like(fragment["rewards"], bool))
    for i, (name, part) in enumerate(parts.items()):
        joined = part.joins < end
        length = min(end, leaves[name]) if joined else end
        assert fragment["lengths"][:, i].tolist() == [length] * 2
        decided = acting[:length, 0, i].sum()
        assert decided == (length - part.joins if joined else 0)
        assert fragment.returns()[:, i].tolist() == [decided] * 2
        if joined and leaves[name] <= end:
            assert fragment["terminated"][0, i] == (not part.cut and leaves[name] <= end)


@pytest.mark.filterwarnings("ignore:The old environment creation API")
def test_an_environment_whose_agents_take_turns_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="AEC environment") as refused:
        make_environment("pettingzoo", 1, entrypoint="pettingzoo.classic.rps_v2:env", steps=3)
    assert refused.value.field == "environment.entrypoint"


# Settings.

TWO_STEP = Path(__file__).parents[2] / "examples" / "particles" / "two_step.yaml"


def job(source: str, /, agent: str = "agent", **args: Any) -> JobSpec:
    spec = yaml.safe_load(TWO_STEP.read_text())
    spec["environment"] = {"source": source, "args": args, "copies": 2}
    spec["agents"] = {agent: {"policy": "team"}}
    spec["policies"]["team"]["network"] = {"hidden": [8], "learning": {"paradigm": "ppo"}}
    return JobSpec.model_validate(spec)


@pytest.mark.parametrize("name", ["name", "source", "factory", "args", "seed", "settings", "self"])
def test_a_setting_may_have_any_name(name: str) -> None:
    spec = job("gymnasium", id=f"{HERE}:Solo-v0", steps=3, **{name: "x"})
    if name == "name":  # the environment takes it
        Arena.open(spec, 1).close()
        return
    with pytest.raises(
        InvalidArgument, match=f"unexpected keyword argument '{name}'|'self'"
    ) as bad:
        Arena.open(spec, 1)
    assert bad.value.field == "environment.args"


def test_the_number_of_copies_is_refused_as_an_argument() -> None:
    with pytest.raises(ValidationError, match=r"set `environment\.copies`"):
        job("gymnasium", id="CartPole-v1", steps=3, copies=4)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3"])
def test_an_invalid_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(InvalidArgument, match="whole number of steps"):
        make_environment("gymnasium", 1, id="CartPole-v1", steps=steps)


async def test_a_job_names_the_environment_whose_mask_allows_nothing() -> None:
    masks = [None, [0, 0]]
    spec = job("gymnasium", id=f"{HERE}:Solo-v0", steps=3, make_args={"masks": masks})
    arena = Arena.open(spec, 1)
    network = ActingNetwork(spec.policies["team"].network or PPO, arena.spaces, 1)
    served = {"team": ServedVersion(0, "", network.state_dict())}
    with pytest.raises(EnvironmentFault, match=r"after step 1 .* allows no action") as failed:
        await arena.play(arena.seating({"agent": "team"}), served, 1, Play(explore=True))
    assert failed.value.value == "gymnasium"
    assert failed.value.kind == "environment_raised"
    arena.close()
