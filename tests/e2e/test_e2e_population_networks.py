"""Populations of small networks, as whole jobs: real services, real episodes, exact values."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.e2e.conftest import House
from tests.e2e.populated import another, check_payoffs
from tests.support.waiting import until
from troupe.client import AsyncJobHandle
from troupe.client.records.populations import Population
from troupe.job.sections.network import NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.environments.openspiel import histories_of
from troupe.networks.vector import Spaces
from troupe.populations.tree import agent_nash_conv, agent_values, mixed
from troupe.transfer import checksum_of

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "poker_networks" / "psro.yaml"
DQN = {
    "hidden": [16],
    "learning": {"paradigm": "dqn", "lr": 0.005, "gamma": 1.0, "buffer": 4000, "updates": 2},
}


def job(**changes: Any) -> str:
    """The example's job, cut down; `changes` by section."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["environment"]["copies"] = 32
    spec["pipeline"] |= {"steps": 4, "queries_per_step": 4, "deterministic": True}
    spec["population"] = {"iteration_steps": 2, "slots": 2, "matches": {"least": 8}}
    for section, values in changes.items():
        spec[section] |= values
    return yaml.safe_dump(spec)


async def end(handle: AsyncJobHandle) -> Population:
    record = await handle.wait(timeout=200)
    assert record.state == "succeeded", record
    audit = await handle.audit()
    assert not audit.violations, audit
    return await handle.population()


def weights_of(house: House, job_id: str, found: Population) -> dict[str, dict[str, torch.Tensor]]:
    """Published tensors by member, which are what was frozen to the bit."""
    kept = {}
    for one in (one for pool in found.pools for one in pool.members):
        folder = house.data_dir / job_id / "members" / one.learner / f"v{one.version}"
        if one.state == "retired" and not folder.is_dir():
            continue  # a newer version took its place
        files = {path.name: path for path in folder.glob("*.safetensors")}
        tensors = load_file(files.get("published.safetensors", files["model.safetensors"]))
        assert checksum_of(tensors) == one.checksum
        kept[one.id] = tensors
    return kept


def plans_of(weights: dict[str, torch.Tensor], game: str = "kuhn_poker") -> list[Any]:
    """The behaviour of the example's network, by seat."""
    tree = histories_of(game)
    players = len(tree.tensors)
    network = NetworkSpec.model_validate(
        yaml.safe_load(EXAMPLE.read_text())["policies"]["player"]["network"]
    )
    width = tree.tensors[0].shape[1]
    acting = ActingNetwork(network, Spaces(width, width, tree.actions, tree.longest), players)
    acting.take(weights)
    found = []
    for player in range(players):
        marks = np.tile(np.eye(players, dtype=np.float32)[player], (len(tree.tensors[player]), 1))
        seen = torch.from_numpy(np.concatenate([tree.tensors[player], marks], axis=1))
        legal = torch.from_numpy(tree.legal[player])
        with torch.inference_mode():
            out = acting.policy.members[0](seen).masked_fill(~legal, -torch.inf)
        found.append(tree.plan(player, out.softmax(-1).double().numpy()))
    return found


async def test_psro_of_networks_becomes_hard_to_exploit(house: House) -> None:
    """Its payoffs and NashConv equal the values computed from the members' files."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    spec["population"]["stop"] = {"nash_conv": 0.25}
    handle = await house.client.submit(yaml.safe_dump(spec))
    found = await end(handle)
    gaps = [one.nash_conv for one in found.history]
    assert None not in gaps
    # An untrained network plays everything equally often, which is worth 0.917.
    assert gaps[0] == pytest.approx(0.917, abs=0.02)
    assert gaps[-1] <= 0.25
    assert found.matches_played == 0
    form = histories_of("kuhn_poker").form
    known = {name: plans_of(one) for name, one in weights_of(house, handle.id, found).items()}
    names = [one.id for one in found.pools[0].members]
    assert len(names) > 2
    for cell in found.cells:
        assert cell.exact
        one, other = (known[names[place]] for place in cell.members)
        there = agent_values(form, [one, other], [[0, 1]])[0]
        back = agent_values(form, [other, one], [[0, 1]])[1]
        assert cell.mean == pytest.approx([(there + back) / 2, -(there + back) / 2], abs=1e-6)
    for solved in found.history:
        shares = solved.mixtures["all"]
        played = mixed([known[name] for name in shares], list(shares.values()))
        gap = agent_nash_conv(form, [played, played], [[0, 1]])
        assert solved.nash_conv == pytest.approx(max(gap, 0), abs=1e-6)


async def test_three_players_whose_best_responses_begin_again(house: House) -> None:
    """Also with older versions; the order of seats matters, and no player changes seats."""
    game = "kuhn_poker(players=3)"
    text = job(
        environment={"args": {"game": game, "seats": None}},
        agents={"player_2": {"policy": "player"}},
        pipeline={"mode": "async", "alpha": 1, "deterministic": False},
        population={"slots": 3, "game": game, "restart": "base", "redraw_steps": 1},
    )
    handle = await house.client.submit(text)
    found = await end(handle)
    (pool,) = found.pools
    assert [(one.id, one.parent) for one in pool.members] == [
        ("player@0", ""),
        ("player@2", "player@0"),
        ("player@5", "player@0"),
    ]
    versions = {one.version: one for one in await handle.versions("player")}
    assert versions[3].outcome == "restarted"
    assert versions[3].checksum == versions[0].checksum
    form = histories_of(game).form
    weights = weights_of(house, handle.id, found)
    known = {name: plans_of(one, game) for name, one in weights.items()}
    names = [one.id for one in pool.members]
    assert len(found.cells) == 10
    for cell in found.cells:
        members = [known[names[place]] for place in cell.members]
        assert cell.mean == pytest.approx(list(agent_values(form, members)), abs=1e-6)
    assert found.history[0].nash_conv == pytest.approx(form.nash_conv(known["player@0"]), abs=1e-6)


async def test_a_population_of_networks_survives_the_orchestrator(house: House) -> None:
    """Off-policy: buffer, members, payoffs and meta-strategies equal the results of an undisturbed
    run."""
    text = job(policies={"player": {"network": DQN}})
    quiet = await house.client.submit(text)
    expected = await end(quiet)
    check_payoffs(expected, await quiet.matches(limit=1000))
    (pool,) = expected.pools
    assert [one.id for one in pool.members] == ["player@0", "player@2", "player@4"]
    weights_of(house, quiet.id, expected)
    rows = [json.loads(line) for line in (house.data_dir / quiet.id / "metrics.jsonl").open()]
    steps = [row for row in rows if "player/learning/buffer" in row]
    # The learner has one seat of each trajectory, and remembers these episodes only.
    assert [row["player/episodes"] for row in steps] == [128.0] * 4
    assert [row["player/learning/buffer"] for row in steps] == [128.0, 256.0, 384.0, 512.0]

    troubled = await house.client.submit(text)
    for played in (0, 8):
        await until(lambda least=played: enough(troubled, least))
        pid = house.pid("orchestrator")
        os.kill(pid, signal.SIGKILL)
        await until(lambda old=pid: another(house, old))
    found = await end(troubled)
    assert found.cells == expected.cells
    assert found.history == expected.history
    assert [one.checksum for one in found.pools[0].members] == [
        one.checksum for one in pool.members
    ]


PLAYER = yaml.safe_load(EXAMPLE.read_text())["policies"]["player"]
PENNIES: dict[str, Any] = {
    "environment": {
        "source": "matrix",
        "args": {"payoffs": [[[1, -1], [-1, 1]], [[-1, 1], [1, -1]]]},
        "copies": 32,
    },
    "agents": {"agent_0": {"policy": "player"}, "agent_1": {"policy": "player"}},
}
LEDUC: dict[str, Any] = {
    "environment": {"args": {"game": "leduc_poker", "seats": None}},
    "policies": {"spy": PLAYER},
}
PUSH: dict[str, Any] = {
    "environment": {
        "source": "pettingzoo",
        "args": {"entrypoint": "mpe2.simple_push_v3:parallel_env", "steps": 5},
        "copies": 4,
    },
    "agents": {"adversary_0": {"policy": "player"}, "agent_0": {"policy": "rival"}},
    "policies": {"rival": {"network": DQN}},
}
Case = tuple[dict[str, Any], dict[str, Any]]


@pytest.mark.parametrize(
    "cases",
    [
        [
            ({"algorithm": "self_play"}, {}),
            ({"algorithm": "fictitious", "evaluation_slots": 2}, PENNIES),
            ({"algorithm": "prioritized"}, PENNIES),
        ],
        [
            (
                {"algorithm": "pipeline_psro", "symmetric": True, "learners": {"second": {}}},
                {"policies": {"second": PLAYER}},
            ),
            (
                {
                    "algorithm": "league",
                    "symmetric": True,
                    "learners": {"spy": {"kind": "main_exploiter"}},
                },
                LEDUC,
            ),
            # General-sum, a network of its own kind for each side.
            ({"algorithm": "psro", "slots": 1}, PUSH),
        ],
    ],
    ids=["one learner", "several learners"],
)
async def test_every_algorithm_plays_networks(house: House, cases: list[Case]) -> None:
    """On games of several kinds, one after the other."""
    for population, changes in cases:
        spec = yaml.safe_load(job(population=population))
        for section, values in changes.items():
            if section == "agents" or "source" in values:
                spec[section] = values
            else:
                spec[section] |= values
        handle = await house.client.submit(yaml.safe_dump(spec))
        found = await end(handle)
        if changes is not PUSH:  # whose rewards do not add up to zero
            check_payoffs(found, await handle.matches(limit=1000))
        weights_of(house, handle.id, found)
        assert found.iteration == 2, population
        learners = {name for pool in found.pools for name in pool.learners}
        rows = [json.loads(line) for line in (house.data_dir / handle.id / "metrics.jsonl").open()]
        samples = [row["player/samples"] for row in rows if "player/samples" in row]
        # Each query trains one learner; without drawn opponents it trains all.
        expected = 4 if population["algorithm"] == "self_play" else 4 / len(learners)
        assert samples == [expected] * 4, population


async def enough(handle: AsyncJobHandle, played: int) -> bool:
    return (await handle.population()).matches_played >= played
