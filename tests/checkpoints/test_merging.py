"""Adapters are merged into their base one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.architectures import LARGE, make
from tests.support.peaks import growth
from troupe.checkpoints import writing
from troupe.checkpoints.adapters import AdapterContent, distinct_tensors, linear_layers, merged
from troupe.checkpoints.merging import merge_in_place, whole_model
from troupe.checkpoints.verifying import Lineage, digests
from troupe.rpc import DataLoss, FailedPrecondition


def write_adapter(folder: Path, model: Any, base: Path, dtype: torch.dtype) -> AdapterContent:
    """An adapter on all linear layers of `model`, in the form of an export."""
    torch.manual_seed(1)
    shapes, _ = linear_layers(model, "all-linear")
    tensors: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in shapes.items():
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(2, inputs).to(dtype)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, 2).to(dtype)
    targets = tuple(sorted({name.rpartition(".")[2] for name in shapes}))
    content = AdapterContent("", 2, 4.0, targets, model.config.model_type == "gpt2", tensors)
    folder.mkdir(parents=True)
    about = content.peft_config(str(base))
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
    return content


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_tied", "gpt2"])
@pytest.mark.parametrize("files", ["one", "several", "pickled"])
def test_a_merged_export_has_the_logits_of_the_merged_model(
    name: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, base, folder = make(name), tmp_path / "base", tmp_path / "out"
    size = "60KB" if files == "several" else "5GB"
    model.save_pretrained(base, max_shard_size=size)
    if files == "pickled":
        torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    content = write_adapter(folder, model, base, torch.float32)
    shown: list[tuple[str, int]] = []
    monkeypatch.setattr(writing, "_MOST_FILE_BYTES", 50_000)
    merge_in_place(
        folder, progress=lambda what, total: shown.append((what, total)) or (lambda n: None)
    )
    with torch.no_grad():
        model.load_state_dict(merged(distinct_tensors(model), content), strict=False)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        ids = torch.arange(5, 17)[None]
        found, own = (one(ids, use_cache=False).logits for one in (loaded, model))
    assert torch.equal(found, own)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert not list(folder.glob("*adapter*")) + list(folder.glob(".merging*"))
    assert [what for what, _ in shown] == ["verifying the base", "merging"]


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        ("gone", "base_not_found", "cannot be loaded"),
        ("empty", "base_not_found", "there are no weights"),
        ("extra", "base_mismatch", "'lm_head.more' is published"),
        ("lacking", "base_mismatch", "it lacks 'model.norm.weight'"),
        ("cut", "base_not_found", "not within the file"),
        ("other", "base_mismatch", "it has no 'model.layers.1.mlp.down_proj.weight'"),
    ],
)
def test_a_base_that_does_not_fit_is_named_and_the_adapter_stays(
    change: str, kind: str, told: str, tmp_path: Path
) -> None:
    model, base, folder = make("qwen3"), tmp_path / "base", tmp_path / "out"
    model.save_pretrained(base)
    write_adapter(folder, model, base, torch.float32)
    before = sorted(folder.iterdir())
    file = base / "model.safetensors"
    tensors = load_file(file)
    if change == "gone":
        base.rename(tmp_path / "elsewhere")
    elif change == "empty":
        file.unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "other":
        config = model.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}
        small: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        small.save_pretrained(base)
    else:
        tensors.pop("model.norm.weight")
        if change == "extra":
            tensors |= {"lm_head.more": torch.ones(1)}
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((DataLoss, FailedPrecondition), match=told) as caught:
        merge_in_place(folder)
    assert caught.value.kind == kind
    assert sorted(folder.iterdir()) == before


def test_a_merge_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**LARGE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    for name in ("first", "out"):
        write_adapter(tmp_path / name, model, tmp_path / "base", torch.bfloat16)
    largest, size = (f(p.nbytes for p in model.parameters()) for f in (max, sum))
    del model
    merge_in_place(tmp_path / "first")  # imports modules that take memory themselves
    grown = growth(lambda: merge_in_place(tmp_path / "out"))
    assert grown <= 1.2 * largest + (8 << 20) < size / 2


def test_a_checkpoint_plays_on_the_base_that_its_job_keeps(tmp_path: Path) -> None:
    """The adapter names a directory that is gone, as for random weights or `init_from`."""
    model, job = make("gpt2"), tmp_path / "mine"
    folder = job / "checkpoints/solver/v2"
    write_adapter(folder, model, tmp_path / "gone", torch.float32)
    base = job / "checkpoints/.base/abc"
    model.save_pretrained(base)
    Lineage("mine", "it", "solver", 2, 1, "", "", "abc", files=digests(folder)).write(folder)
    with pytest.raises(DataLoss) as caught:  # which names the right checksum
        whole_model(folder, tmp_path / "refused")
    assert caught.value.field == "base"
    assert "troupe export JOB DIR --merged --base" in str(caught.value.remedy)
    found = caught.value.message.partition("has checksum ")[2].partition(",")[0]
    base.rename(base.with_name(found))
    (folder / "troupe.json").unlink()
    Lineage("mine", "it", "solver", 2, 1, "", "", found, files=digests(folder)).write(folder)
    merged = whole_model(folder, tmp_path / "whole")
    assert merged == tmp_path / "whole"
    assert (merged / "model.safetensors").is_file()
    assert (folder / "adapter_config.json").is_file()
    assert whole_model(merged, tmp_path / "unused") == merged
