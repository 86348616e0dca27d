"""A checkpoint's folder plays as the network that it was written of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.networks.learner import NetworkLearner
from troupe.checkpoints.hub import write_card
from troupe.checkpoints.verifying import Lineage
from troupe.job import JobSpec
from troupe.networks.exported import ExportedNetwork
from troupe.rpc.errors import InvalidArgument


def written(folder: Path, learning: dict[str, Any]) -> NetworkLearner:
    """A checkpoint as trainers write it."""
    spec = {
        "name": "exported",
        "environment": {"source": "simple_spread", "args": {"steps": 6}, "copies": 4},
        "agents": {f"agent_{i}": {"policy": "team"} for i in range(3)},
        "policies": {"team": {"network": {"hidden": [8], "learning": learning}}},
        "pipeline": {"steps": 1, "queries_per_step": 1},
    }
    if learning["paradigm"] == "maddpg":
        spec["environment"]["args"]["continuous"] = True  # type: ignore[index]
    learner = NetworkLearner(JobSpec.model_validate(spec), "team")
    folder.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in learner.weights().items()}
    learner.model.save_pretrained(folder, weights)
    return learner


@pytest.mark.parametrize("paradigm", ["ppo", "mappo", "dqn", "vdn", "qmix", "maddpg"])
def test_an_exported_network_plays_the_published_weights(paradigm: str, tmp_path: Path) -> None:
    learner = written(tmp_path / "out", {"paradigm": paradigm})
    found = ExportedNetwork.read(tmp_path / "out")
    published = learner.published()
    assert found.weights.keys() == published.keys()
    assert all(torch.equal(found.weights[name], published[name]) for name in published)
    assert found.agents == ("agent_0", "agent_1", "agent_2")
    environment = found.play(copies=5)
    assert (environment.copies, environment.spaces) == (5, found.spaces)
    returns = found.actor(environment).sample(3, explore=False).returns
    assert returns.shape == (5, 3)
    assert np.isfinite(returns).all()


def test_a_tensor_too_many_or_too_few_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written(folder, {"paradigm": "mappo"})
    weights = load_file(folder / "model.safetensors")
    first = next(name for name in sorted(weights) if name.startswith("acting."))
    for name, changed in {
        "v_head.weight": weights | {"v_head.weight": torch.zeros(2)},
        "policy.more": weights | {"acting.policy.more": torch.zeros(2)},
        first.removeprefix("acting."): {n: t for n, t in weights.items() if n != first},
    }.items():
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(InvalidArgument) as caught:
            ExportedNetwork.read(folder)
        assert (caught.value.field, caught.value.value) == ("weights", name)


def test_a_folder_without_an_exported_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        ExportedNetwork.read(tmp_path)
    folder = tmp_path / "out"
    written(folder, {"paradigm": "ppo"})
    weights = load_file(folder / "model.safetensors")
    name = next(one for one in weights if one.startswith("acting.policy"))
    save_file({n: t for n, t in weights.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(InvalidArgument, match="is missing") as missing:
        ExportedNetwork.read(folder)
    assert name.removeprefix("acting.") in str(missing.value)
    described = json.loads((folder / "config.json").read_text())
    described["network"]["paradigm"] = "of another release"
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(InvalidArgument, match=r"of this release: network\.paradigm: ") as later:
        ExportedNetwork.read(folder)
    assert "pydantic" not in str(later.value)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InvalidArgument, match="not a network"):
        ExportedNetwork.read(folder)


def test_the_card_of_a_network_names_its_loader(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written(folder, {"paradigm": "ppo"})
    Lineage("job-1", "particles", "team", 3, 2, "x" * 16, "network").write(folder)
    write_card(folder, {"reward/mean": -20.0})
    card = (folder / "README.md").read_text()
    assert 'library_name: "troupe"' in card
    assert "A small network" in card
    assert "ExportedNetwork.read" in card
