"""Checkpoints are read and written one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.state.checkpoint import save_checkpoint
from tests.checkpoints.test_format import EVERY, assert_same
from tests.support.architectures import LARGE, make
from tests.support.peaks import growth
from tests.support.tiny_team import make_model
from troupe.checkpoints import reading, writing
from troupe.checkpoints.adapters import distinct_tensors
from troupe.checkpoints.format import CheckpointFormat
from troupe.checkpoints.reading import StoredTensors
from troupe.checkpoints.tensors import load_causal_lm
from troupe.checkpoints.writing import write_checkpoint
from troupe.transfer import checksum_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def write_parts(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: int) -> None:
    """The files of ranks from torch.distributed.checkpoint: the rows of each tensor,
    distributed."""
    for rank in range(ranks):
        mine: dict[str, torch.Tensor] = {}
        where: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if not tensor.ndim:
                if rank == 0:
                    mine[name], where[name] = tensor, {"saved_offsets": []}
                continue
            start, end = (len(tensor) * at // ranks for at in (rank, rank + 1))
            mine[name] = tensor[start:end].contiguous()
            where[name] = {"saved_offsets": [start] + [0] * (tensor.ndim - 1)}
        about = {"DCP_SHARDING_INFO": json.dumps(where)}
        save_file(mine, folder / f"shard-{rank + 1:05d}.safetensors", metadata=about)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    cast=st.sampled_from([None, torch.float32, torch.bfloat16]),
    ranks=st.integers(1, 3),
    piece=st.sampled_from([16, 64, 1 << 20]),
)
def test_parts_of_ranks_are_read_as_whole_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[list[int]],
    dtype: torch.dtype,
    cast: torch.dtype | None,
    ranks: int,
    piece: int,
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    folder = tmp_path_factory.mktemp("parts")
    tensors = {
        f"t{at}": (torch.arange(math.prod(shape)) * 1.1).reshape(shape).to(dtype)
        for at, shape in enumerate(shapes)
    }
    write_parts(folder, tensors, ranks)
    stored = StoredTensors(sorted(folder.iterdir()))
    assert {n: (t.shape, t.dtype) for n, t in stored.layout.items()} == {
        n: (t.shape, t.dtype) for n, t in tensors.items()
    }
    for name, tensor in tensors.items():
        found = stored.read(name, cast)
        assert torch.equal(found, tensor.to(cast or dtype))
        assert found.dtype == (cast or dtype)


def test_columns_of_ranks_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for at in range(2):
        about = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 3 * at]}})}
        part = whole[:, 3 * at : 3 * at + 3].contiguous()
        save_file({"w": part}, tmp_path / f"{at}.safetensors", metadata=about)
    files = sorted(tmp_path.iterdir())
    assert torch.equal(StoredTensors(files)["w"], whole)
    with pytest.raises(ValueError, match="'w' is incomplete"):
        StoredTensors(files[1:])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        ((4).to_bytes(8, "little") + b"{}[]", "is not a safetensors file"),
        ((3).to_bytes(8, "little") + b"[1]", "is not a safetensors file"),
    ],
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        StoredTensors([path])


def header(**tensors: Any) -> str:
    return json.dumps(tensors)


def entry(shape: list[Any], start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ONE = json.dumps(entry([4], 0, 16))
MALFORMED = {
    "name twice": (
        f'{{"w": {ONE}, "w": {json.dumps(entry([16], 0, 64))}}}',
        "'w' appears twice",
    ),
    "field twice": ('{"w": {"dtype": "F32", ' + ONE[1:] + "}", "'dtype' appears twice"),
    "overlap": (header(v=entry([4], 0, 16), w=entry([16], 0, 64)), "'w' leaves a gap, or overlaps"),
    "overlap in part": (header(v=entry([8], 0, 32), w=entry([12], 16, 64)), "'w' leaves a gap"),
    "gap": (header(v=entry([4], 0, 16), w=entry([8], 32, 64)), "'w' leaves a gap"),
    "gap before": (header(w=entry([12], 16, 64)), "'w' leaves a gap"),
    "gap after": (header(w=entry([12], 0, 48)), "16 bytes at its end do not belong to a tensor"),
    "nothing described": (header(), "64 bytes at its end do not belong to a tensor"),
    "unknown dtype": (header(w=entry([16], 0, 64, "F33")), "'w' has the unknown dtype 'F33'"),
    "other dtype": (header(w=entry([16], 0, 64, "F64")), "'w' has 64 bytes, which do not match"),
    "dtype of another kind": (header(w=entry([16], 0, 64, ["F32"])), "is not a safetensors file"),
    "beyond the file": (header(w=entry([32], 0, 128)), "'w' is not within the file"),
    "begin after end": (header(w=entry([16], 64, 0)), "'w' has -64 bytes"),
    "negative sizes": (header(w=entry([-4, -4], 0, 64)), "'w' has a shape or offset that is no"),
    "negative start": (header(w=entry([20], -16, 64)), "'w' has a shape or offset that is no"),
    "half a size": (header(w=entry([16.0], 0, 64)), "'w' has a shape or offset that is no"),
    "size of truth": (header(w=entry([True, 16], 0, 64)), "'w' has a shape or offset that is no"),
    "text for a size": (header(w=entry(["16"], 0, 64)), "'w' has a shape or offset that is no"),
    "overflow": (header(w=entry([2**33, 2**33], 0, 64)), "'w' has a shape of too many values"),
    "overflow of nothing": (header(w=entry([0, 2**62, 4], 0, 0)), "'w' has a shape of too many"),
    "shape missing": ('{"w": {"dtype": "F32", "data_offsets": [0, 64]}}', "KeyError"),
    "three offsets": (header(w={**entry([16], 0, 64), "data_offsets": [0, 32, 64]}), "too many"),
    "text for a tensor": (header(w="F32"), "is not a safetensors file"),
    "metadata of another kind": ('{"__metadata__": [1], "w": ' + ONE + "}", "AttributeError"),
    "deep": ('{"w": ' + "[" * 100_000, "RecursionError"),
    "number": ("1", "is not a safetensors file"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_header_that_breaks_the_rules_of_the_format_is_refused(
    tmp_path: Path, fault: str
) -> None:
    text, told = MALFORMED[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(64))
    with pytest.raises(ValueError, match=told) as caught:
        StoredTensors([path])
    assert "model.safetensors is not a safetensors file" in str(caught.value)


@pytest.mark.parametrize("length", [0, 65, 10**6, 10**8 + 1, 2**63, 2**64 - 1])
def test_a_header_that_ends_outside_of_its_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(62))
    with pytest.raises(ValueError, match="its header ends outside the file"):
        StoredTensors([path])


@pytest.mark.parametrize(
    "index",
    [
        *("{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"w": 1}}'),
        *('{"weight_map": {"w": null}}', '{"weight_map": {"w": ["a"]}}', "[" * 100_000),
        '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
        *(
            json.dumps({"weight_map": {"w": name}})
            for name in (
                *("../model.safetensors", "/etc/passwd", "/tmp/a.safetensors", "a/b.safetensors"),
                *("", ".", "..", "pytorch_model.bin", "config.json", "..\\..\\a.safetensors/"),
            )
        ),
    ],
)
def test_an_index_must_name_files_of_its_own_folder(tmp_path: Path, index: str) -> None:
    (tmp_path / reading.INDEX).write_text(index)
    with pytest.raises(ValueError, match="is not an index of a checkpoint"):
        StoredTensors.of_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_file_says_which(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "one.safetensors")
    names = {"w": "one.safetensors", "v": "two.safetensors"}
    (tmp_path / reading.INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FileNotFoundError, match=r"two\.safetensors"):
        StoredTensors.of_checkpoint(tmp_path)


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(4)}, tmp_path / "one.safetensors")
    (tmp_path / reading.INDEX).write_text('{"weight_map": {"w": "one.safetensors"}}')
    assert torch.equal(StoredTensors.of_checkpoint(tmp_path)["w"], torch.ones(4))


def test_a_model_with_a_tensor_described_twice_is_not_loaded(tmp_path: Path) -> None:
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    name = next(name for name in json.loads(data[8:end]) if name != "__metadata__")
    described = json.dumps(json.loads(data[8:end])[name])
    text = data[8:end].rstrip()[:-1] + f', "{name}": {described}}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(ValueError, match=f"'{name}' appears twice"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, path)
    stored = StoredTensors([path])
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="ends early"):
        stored["w"]
    with pytest.raises(ValueError, match="'w' is not within the file"):
        StoredTensors([path])


def test_values_are_aligned_and_the_checksum_is_of_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5), "c": torch.arange(3)}
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    monkeypatch.setattr(writing, "_MOST_FILE_BYTES", 30)
    done: list[int] = []
    found = write_checkpoint(
        tmp_path, CheckpointFormat(module, torch.float32).of(tensors), done.append
    )
    files = reading.weight_files(tmp_path)
    assert len(files) == 2
    assert_same({n: t for file in files for n, t in load_file(file).items()}, tensors)
    assert found == checksum_of(tensors) == checksum_of(StoredTensors.of_checkpoint(tmp_path))
    assert sum(done) == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("ranks", [0, 3])
def test_a_checkpoint_of_kept_weights_has_the_logits_of_the_model(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the file of one device, and from the files of ranks; in several files."""
    monkeypatch.setattr(writing, "_MOST_FILE_BYTES", 40_000)
    model = make(name)
    kept = tmp_path / "kept"
    kept.mkdir()
    weights = {n: t.contiguous() for n, t in distinct_tensors(model).items()}
    if ranks:
        write_parts(kept, weights, ranks)
    else:
        save_file(weights, kept / "weights.safetensors")
    with torch.device("meta"):
        outline: Any = AutoModelForCausalLM.from_config(model.config)
    path = tmp_path / "solver" / "v1"
    stored = StoredTensors(sorted(kept.iterdir()))
    save_checkpoint(path, outline, stored, None, keep=1)
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=[pytest.mark.slow]), 4])
def test_a_checkpoint_is_written_in_the_memory_of_one_tensor(tmp_path: Path, ranks: int) -> None:
    """From float32 on disk to bfloat16, measured as the process' resident memory."""
    config = AutoConfig.for_model(**LARGE)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    kept = tmp_path / "kept"
    kept.mkdir()
    weights = {n: torch.ones(t.shape) for n, t in outline.named_parameters()}
    largest, size = (f(t.nbytes for t in weights.values()) for f in (max, sum))
    write_parts(kept, weights, ranks)
    del weights
    stored = StoredTensors(sorted(kept.iterdir()))
    path = tmp_path / "solver" / "v1"
    grown = growth(
        lambda: save_checkpoint(path, outline, stored, None, keep=1, dtype=torch.bfloat16)
    )
    # A half of it in bfloat16, and the pieces in which it is cast.
    assert grown <= 1.2 * largest < size / 2
    assert StoredTensors.of_checkpoint(path).layout["lm_head.weight"].dtype == torch.bfloat16
