"""Checkpoints whose files changed after they were written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from troupe.checkpoints.retention import copy_checkpoint
from troupe.checkpoints.verifying import Lineage, digests, verify
from troupe.rpc.errors import DataLoss, FailedPrecondition

FILES = {"model.safetensors": b"weights" * 100, "config.json": b"{}", "tokenizer.json": b"[1]"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "v3"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    about = Lineage("job", "it", "solver", 3, 2, "ab", "")
    replace(about, files=digests(folder)).write(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_exported(
    checkpoint: Path, tmp_path: Path, name: str, damage: str
) -> None:
    path = checkpoint / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:1])
    else:
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(DataLoss, match=name) as caught:
        copy_checkpoint(checkpoint, tmp_path / "exported")
    assert (caught.value.kind, caught.value.field) == ("checkpoint_corrupt", "file")
    assert [one.name for one in tmp_path.iterdir()] == ["v3"]
    if name.endswith(".json"):
        verify(checkpoint, ".safetensors")  # a request for weights succeeds


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', "\0"])
def test_a_damaged_description_is_not_taken_for_an_older_release(
    checkpoint: Path, tmp_path: Path, text: str
) -> None:
    (checkpoint / "troupe.json").write_text(text)
    with pytest.raises(DataLoss, match=r"troupe\.json") as caught:
        copy_checkpoint(checkpoint, tmp_path / "exported")
    assert (caught.value.kind, caught.value.value) == ("checkpoint_corrupt", "troupe.json")
    assert str(checkpoint) in caught.value.message, "where it is, not where it was copied to"
    assert [one.name for one in tmp_path.iterdir()] == ["v3"]


def test_a_target_that_cannot_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "sub", Path("/proc/exported")):
        with pytest.raises(FailedPrecondition) as caught:
            copy_checkpoint(checkpoint, target)
        assert (caught.value.field, caught.value.value) == ("to", str(target))


def test_a_checkpoint_without_damage_or_without_checksums_passes(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "README.md").write_text("added")
    assert verify(copy_checkpoint(checkpoint, tmp_path / "exported")) is None
    known = Lineage.read(checkpoint)
    assert known is not None
    replace(known, files={}).write(checkpoint)  # as older releases wrote it
    (checkpoint / "model.safetensors").write_bytes(b"other")
    verify(checkpoint)
    (checkpoint / "troupe.json").unlink()
    verify(checkpoint)
