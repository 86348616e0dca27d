"""`population` in a job of networks: the agents of their networks, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from troupe.job import JobSpecError, parse_job

EXAMPLE = Path(__file__).parents[3] / "examples" / "poker_networks" / "psro.yaml"


def job(**changes: Any) -> dict[str, Any]:
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["population"] |= changes
    return dict(spec)


def fault(spec: dict[str, Any]) -> str:
    with pytest.raises(JobSpecError) as caught:
        parse_job(yaml.safe_dump(spec))
    return str(caught.value)


def test_slots_are_networks_for_all_that_their_learners_play() -> None:
    spec = parse_job(yaml.safe_dump(job(slots=2)))
    assert spec.slots == ("all--0", "all--1")
    assert spec.policies["all--0"].network == spec.policies["player"].network
    assert not spec.policies["all--0"].trainable
    for policy in ("player", *spec.slots):
        assert spec.roster(policy) == ("player_0", "player_1")
    assert parse_job(spec.model_dump_json()) == spec


def test_policies_that_share_a_pool_are_made_for_the_same_agents() -> None:
    """One plays both sides, one exploits the second: versions of both take turns in its slots."""
    spec = job(algorithm="league", symmetric=False, slots=1)
    spec["policies"]["spy"] = spec["policies"]["player"]
    spec["policies"]["dealer"] = {**spec["policies"]["player"], "trainable": False}
    spec["agents"]["dealer"] = {"policy": "dealer"}
    spec["population"]["learners"] = {"spy": {"kind": "main_exploiter", "agents": ["player_1"]}}
    found = parse_job(yaml.safe_dump(spec))
    assert found.slots == ("player_0--0", "player_1--0")
    for policy in ("player", "spy", *found.slots):
        assert found.roster(policy) == ("player_0", "player_1")
    assert found.roster("dealer") == ("dealer",)


def test_policies_with_their_own_pools_are_made_for_their_own_agents() -> None:
    spec = job(slots=1)
    spec["policies"]["rival"] = spec["policies"]["player"]
    spec["agents"]["player_1"]["policy"] = "rival"
    found = parse_job(yaml.safe_dump(spec))
    rosters = {name: found.roster(name) for name in found.policies}
    assert rosters == {
        "player": ("player_0",),
        "player_0--0": ("player_0",),
        "rival": ("player_1",),
        "player_1--0": ("player_1",),
    }


@pytest.mark.parametrize(
    ("network", "population", "says"),
    [
        (
            {"learning": {"paradigm": "qmix"}},
            {},
            "policies.player.network.learning.paradigm: `qmix`",
        ),
        ({"learning": {"paradigm": "maddpg"}}, {}, "use ppo, mappo or dqn"),
        ({"kind": "rnn"}, {"game": "kuhn_poker"}, "policies.player.network.kind: with"),
        ({}, {"engine": {}}, "population.engine: networks run inside"),
        ({}, {"slots": 1}, "population.slots: 1 cannot serve a match"),
        (
            {"learning": {"paradigm": "dqn"}},
            {"algorithm": "regularized"},
            "set policies.player.network.learning.entropy_coefficient (ppo, mappo)",
        ),
    ],
)
def test_populations_refuse_networks_that_cannot_play_in_them(
    network: dict[str, Any], population: dict[str, Any], says: str
) -> None:
    spec = job(**population)
    spec["policies"]["player"]["network"] = {"hidden": [8], **network}
    assert says in fault(spec)


def test_a_learner_that_plays_all_agents_may_learn_as_a_team() -> None:
    spec = job(algorithm="self_play")
    spec["policies"]["player"]["network"] = {"hidden": [8], "learning": {"paradigm": "maddpg"}}
    assert parse_job(yaml.safe_dump(spec)).pools is not None


def test_slots_serve_one_network() -> None:
    spec = job(learners={"spy": {}}, symmetric=True)
    spec["policies"]["spy"] = {"network": {"hidden": [64]}}
    assert "policies.spy" in fault(spec)
