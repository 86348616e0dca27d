"""Training state and checkpoints on disk: complete or absent, also when the disk is full."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.learning.model import load_model, load_tokenizer
from services.trainer.learning.optimizer import Randomness, capture, restore, seeded
from services.trainer.state.checkpoint import checkpoint_path, save_checkpoint
from services.trainer.state.training_state import Frontier, Snapshot, StateStore, TrainingState
from tests.support.training import make_spec, tiny_config
from tests.trainer.stage import fill_up
from troupe.rpc import DataLoss, FailedPrecondition, ResourceExhausted
from troupe.transfer import checksum_of


def make_state(version: int, size: int = 8) -> TrainingState:
    generator = torch.Generator().manual_seed(version)
    weights = {"w": torch.randn(size, size, generator=generator), "b": torch.ones(3)}
    moments = {"exp_avg/w": torch.randn(size, size), "step/w": torch.tensor(float(version))}
    frontier = Frontier(version - 1, (1 << 64) - version)
    generators = capture(torch.device("cpu"))
    snapshot = Snapshot(weights, moments)
    return TrainingState(version, checksum_of(weights), snapshot, generators, frontier)


def test_state_round_trip(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "job", "solver")
    for version in range(4):
        store.save(make_state(version))
    state = make_state(2)
    loaded = store.load(2, state.checksum)
    assert loaded.checksum == state.checksum
    assert all(torch.equal(t, state.snapshot.weights[n]) for n, t in loaded.weights.items())
    assert set(loaded.moments) == {"exp_avg/w", "step/w"}
    assert store.versions() == [0, 1, 2, 3]
    store.prune(3, 2)
    assert store.versions() == [2, 3]
    with pytest.raises(FailedPrecondition, match="kept here: 2, 3"):
        store.load(1)


def test_the_reference_is_never_pruned(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "job", "solver")
    for version in range(4):
        store.save(make_state(version))
    store.prune(3, 1, first=True)
    assert store.versions() == [0, 3]


def test_two_attempts_at_one_version_do_not_mix(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "job", "solver")
    one, two = make_state(1), make_state(2)
    two = replace(two, version=1)
    store.save(one)
    store.save(two)
    store.save(one)  # repeating is harmless
    assert torch.equal(store.load(1, one.checksum).weights["w"], one.snapshot.weights["w"])
    assert torch.equal(store.load(1, two.checksum).weights["w"], two.snapshot.weights["w"])
    assert not store.exists(1, "0" * 32)


def test_the_last_attempt_at_the_same_weights_counts(tmp_path: Path) -> None:
    # A version that was never committed: the same published bits, other samples, other moments.
    store = StateStore(tmp_path, "job", "solver")
    old = make_state(1)
    other = replace(old.snapshot, moments={"step/w": torch.tensor(3.0)})
    new = replace(old, frontier=Frontier(7, 1), snapshot=other)
    assert store.save(old) == store.save(new)
    loaded = store.load(1, old.checksum)
    assert loaded.frontier == Frontier(7, 1)
    assert set(loaded.moments) == {"step/w"}
    assert len(list((tmp_path / "job/state/solver").iterdir())) == 1


def test_random_generators_continue_from_the_restored_state(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "job", "solver")
    np.random.standard_normal()  # a second one is kept back by the generator
    store.save(make_state(1))

    def draw() -> tuple[list[float], list[float]]:
        return torch.rand(3).tolist(), np.random.standard_normal(3).tolist()

    expected = draw()
    loaded = store.load(1)
    restore(loaded.generators, torch.device("cpu"))
    assert draw() == expected
    assert loaded.frontier == Frontier(0, (1 << 64) - 1)


def test_states_of_another_format_are_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "job", "solver")
    path = store.save(make_state(1))
    meta = json.loads((path / "state.json").read_text())
    for other in (1, 99):
        (path / "state.json").write_text(json.dumps({**meta, "format": other}))
        with pytest.raises(DataLoss, match="another version of Troupe"):
            store.load(1)


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_state_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    store = StateStore(tmp_path, "job", "solver")
    path = store.save(make_state(1)) / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[-6] ^= 0x20
        path.write_bytes(data)
    with pytest.raises(DataLoss) as caught:
        store.load(1)
    assert caught.value.kind == "state_corrupt"


def test_a_full_disk_leaves_the_previous_state(small_disk: Path) -> None:
    store = StateStore(small_disk, "job", "solver")
    store.save(make_state(1))
    ballast = fill_up(small_disk, 100_000)
    with pytest.raises(ResourceExhausted) as caught:
        store.save(make_state(2, size=200))
    assert caught.value.kind == "storage_full"
    assert caught.value.field == "data_dir"
    assert store.versions() == [1]
    store.load(1)
    # No remains keep the disk full.
    (directory,) = small_disk.glob("job/state/*")
    assert [path.name[:3] for path in directory.iterdir()] == ["v1-"]
    ballast.unlink()
    store.save(make_state(2))


def test_an_unwritable_directory_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("in the way")
    with pytest.raises(FailedPrecondition) as caught:
        StateStore(tmp_path, "job", "solver").save(make_state(1))
    assert caught.value.kind == "storage_unwritable"


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_checkpoint(tmp_path: Path, tokenizer: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    spec = make_spec(tokenizer, model={"config": config, "tokenizer": str(tokenizer)})
    policy = spec.policies["solver"]
    model = load_model("solver", policy, 0)
    weights = {n: (p.detach() + 1).to(torch.bfloat16) for n, p in model.named_parameters()}
    path = checkpoint_path(tmp_path, "job", "solver", 7)
    size = save_checkpoint(path, model, weights, load_tokenizer("solver", policy), keep=2)
    assert size > sum(t.nbytes for t in weights.values())
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert checksum_of(dict(loaded.named_parameters())) == checksum_of(weights)
    assert (path / "tokenizer.json").exists()


def test_a_full_disk_leaves_older_checkpoints(small_disk: Path, tokenizer: Path) -> None:
    spec = make_spec(tokenizer)
    policy = spec.policies["solver"]
    model, fast = load_model("solver", policy, 0), load_tokenizer("solver", policy)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    paths = [checkpoint_path(small_disk, "job", "solver", version) for version in (1, 2)]
    save_checkpoint(paths[0], model, weights, fast, keep=2)
    fill_up(small_disk, 50_000)
    with pytest.raises(ResourceExhausted) as caught:
        save_checkpoint(paths[1], model, weights, fast, keep=1)
    assert caught.value.kind == "storage_full"
    AutoModelForCausalLM.from_pretrained(paths[0])
    assert not any(path.name.startswith(".") for path in paths[0].parent.iterdir())


def test_policies_of_one_process_draw_from_generators_of_their_own() -> None:
    """As if the other policy did not exist, in whatever order they take turns."""
    cpu = torch.device("cpu")

    def draw(randomness: Randomness) -> list[float]:
        with randomness.drawing():
            return [float(torch.rand(1)), float(np.random.standard_normal())]

    outside = capture(cpu)
    alone = Randomness(seeded(1, cpu), cpu)
    expected = [draw(alone), draw(alone)]
    other, mine = Randomness(seeded(2, cpu), cpu), Randomness(seeded(1, cpu), cpu)
    assert draw(mine) == expected[0] != draw(other)
    mine.commit()
    assert draw(mine) == expected[1]
    mine.rewind()
    draw(other)
    assert draw(mine) == expected[1]
    assert all(torch.equal(t, outside[name]) for name, t in capture(cpu).items())
