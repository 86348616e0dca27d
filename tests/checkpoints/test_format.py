"""A model's published tensors equal the output of transformers' `save_pretrained`, and give the
same model again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.support.architectures import ARCHITECTURES, make
from troupe.checkpoints import writing
from troupe.checkpoints.adapters import distinct_tensors
from troupe.checkpoints.format import (
    CheckpointFormat,
    FormatMismatch,
    ModelArrangement,
    in_float32,
    keep_float32,
)
from troupe.checkpoints.writing import write_checkpoint
from troupe.transfer import DeferredTensors, TensorGroup, Transfer, checksum_of

logging.disable_progress_bar()
logging.set_verbosity_error()


# One of each kind is tried every time.
ALIKE = {
    "qwen2_moe",
    "olmoe",
    "deepseek_v2",
    "qwen3_next",
    "minimax_m2",
    "hunyuan",
    "llama",
    "phi3",
}
EVERY = [
    pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in ARCHITECTURES
]


def written(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert sorted(mine) == sorted(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("name", EVERY)
def test_names_shapes_and_values_equal_those_that_save_pretrained_writes(
    name: str, tmp_path: Path
) -> None:
    """Both of a new model and of a loaded one, in float32 and rounded to bfloat16, in
    which transformers keeps some tensors of some architectures exact."""
    made = make(name)
    made.save_pretrained(tmp_path / "made")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    for model in (made, AutoModelForCausalLM.from_pretrained(tmp_path / "made")):
        for dtype, folder in ((torch.float32, "made"), (torch.bfloat16, "half")):
            form = CheckpointFormat(model, dtype)
            found = form.of(distinct_tensors(model))
            assert {n: t.shape for n, t in form.layout.items()} == {
                n: t.shape for n, t in found.items()
            }
            assert_same(dict(found), written(tmp_path / folder))


@pytest.mark.parametrize("name", EVERY)
def test_a_checkpoint_becomes_the_model_again(name: str, tmp_path: Path) -> None:
    """In the same way as transformers, with the model's log-probs."""
    model = make(name)
    published = dict(CheckpointFormat(model, torch.float32).of(distinct_tensors(model)))
    other = make(name, seed=1)
    found = dict(ModelArrangement.of(other, published).arranged(published))
    other.load_state_dict(found, strict=False)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    write_checkpoint(tmp_path, CheckpointFormat(model, torch.float32).of(distinct_tensors(model)))
    model.config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_a_checkpoint_with_stacked_experts_is_published_one_by_one(tmp_path: Path) -> None:
    """Only transformers loads that variant."""
    model = make("mixtral")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stacked")
    found = CheckpointFormat(loaded, torch.float32).of(distinct_tensors(loaded))
    expected = CheckpointFormat(model, torch.float32).of(distinct_tensors(model))
    assert_same(dict(found), dict(expected))
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in found
    # Engines of ours take it as well as transformers does.
    stacked = written(tmp_path / "stacked")
    arranged = ModelArrangement.of(make("mixtral", 1), stacked).arranged(stacked)
    assert_same(dict(arranged), dict(model.state_dict()))


def test_tensors_that_do_not_belong_to_the_model_are_named() -> None:
    model = make("qwen3_moe")
    published = dict(CheckpointFormat(model, torch.float32).of(distinct_tensors(model)))
    odd = published | {"model.layers.0.mlp.experts.0.extra.weight": torch.zeros(1)}
    with pytest.raises(FormatMismatch, match=r"experts\.0\.extra\.weight") as refused:
        ModelArrangement(model, odd)
    assert refused.value.name == "model.layers.0.mlp.experts.0.extra.weight"
    uneven = published | {"model.layers.1.mlp.experts.2.down_proj.weight": torch.zeros(3, 5)}
    with pytest.raises(FormatMismatch, match=r"layers\.1.*cannot be converted"):
        ModelArrangement(model, uneven)


def test_the_default_type_of_the_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written while other threads compute."""
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", seen.append)
    CheckpointFormat(make("glm4_moe"), torch.bfloat16)
    assert set(seen) <= {torch.float32}


def test_other_modules_stay_as_they_are() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    found = dict(CheckpointFormat(plain, torch.bfloat16).of(plain.state_dict()))
    assert set(found) == set(plain.state_dict())
    assert found["0.weight"].dtype == torch.bfloat16
    assert found["1.num_batches_tracked"].dtype == torch.int64
    with pytest.raises(FormatMismatch, match=r"'2\.weight' is published"):
        ModelArrangement(plain, {"2.weight": torch.zeros(1)})


def test_tensors_that_an_architecture_keeps_in_float32_are_not_rounded() -> None:
    model = make("deepseek_v3")
    exact = in_float32(model, torch.bfloat16)
    assert list(exact) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    exact["model.layers.1.mlp.gate.e_score_correction_bias"].fill_(1.0009765625)
    rounded = make("deepseek_v3").to(torch.bfloat16)
    keep_float32(rounded, exact)
    bias = rounded.model.layers[1].mlp.gate.e_score_correction_bias
    assert (bias.dtype, float(bias[0])) == (torch.float32, 1.0009765625)
    assert in_float32(model, torch.float32) == {}


@pytest.mark.parametrize("reader", ["items", "set", "file"])
def test_no_second_copy_of_a_model_is_made(reader: str, tmp_path: Path) -> None:
    """Only some groups of a mixture are in memory at a time, for every reader."""
    config = AutoConfig.for_model(**ARCHITECTURES["qwen3_moe"] | {"num_hidden_layers": 16})
    model = AutoModelForCausalLM.from_config(config)
    published = CheckpointFormat(model, torch.bfloat16).of(distinct_tensors(model))
    held, most = 0, 0

    def let_go(nbytes: int) -> None:
        nonlocal held
        held -= nbytes

    def counted(make: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        nonlocal held, most
        made = make()
        for tensor in made.values():
            held += tensor.nbytes
            weakref.finalize(tensor, let_go, tensor.nbytes)
        most = max(most, held)
        return made

    groups = [TensorGroup(g.layout, functools.partial(counted, g.make)) for g in published.groups]
    counting = DeferredTensors(groups)
    if reader == "items":
        assert checksum_of(counting) == checksum_of(published)
    elif reader == "set":
        manifest = Transfer(tmp_path).set("job/p/weights@1", counting)
        assert manifest.checksum == checksum_of(published)
    else:
        write_checkpoint(tmp_path, counting)
        assert_same(written(tmp_path), dict(published))
    largest = max(sum(t.nbytes for t in group.layout.values()) for group in groups)
    assert 0 < most <= 3 * largest < published.nbytes / 6
    assert len(counting) == len(published) == len(set(counting))


def test_a_long_checkpoint_is_cut_and_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MOST_FILE_BYTES", 20_000)
    model: Any = make("qwen3_moe")
    model.config.save_pretrained(tmp_path)
    write_checkpoint(tmp_path, CheckpointFormat(model, torch.float32).of(distinct_tensors(model)))
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
