"""Codecs of stored tensors: one per tensor, named in the manifest, refused if unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.transfer import Corrupt, Manifest, Transfer, UnknownCodec, blob, segments

KEY = "job/solver/weights@3"
TENSORS = {
    "half": torch.arange(6.0).reshape(2, 3).bfloat16(),
    "eighth": torch.arange(5.0).to(torch.float8_e4m3fn),
    "whole": torch.arange(4.0),
    "none": torch.empty(0, 3),
}


class Widened(blob.Codec):
    """Stores float32 tensors whose values fit bfloat16 as bfloat16."""

    def nbytes(self, dtype: torch.dtype, shape: Sequence[int]) -> int:
        return blob.CODECS[blob.RAW].nbytes(torch.bfloat16, shape)

    def decode(
        self, data: Any, offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        return blob.CODECS[blob.RAW].decode(data, offset, torch.bfloat16, shape).to(dtype)


def store_by(codec: str, root: Path) -> Manifest:
    """Store a float32 tensor `w` of 0, 1, 2, ... by a codec, as a newer release might."""
    draft, views = blob.draft(KEY, {"w": torch.arange(64.0).bfloat16()}, {})
    entries = tuple(replace(one, dtype="float32", codec=codec) for one in draft.entries)
    path = root / KEY
    path.parent.mkdir(parents=True)
    return segments.write(path, replace(draft, entries=entries), views)


def test_each_tensor_of_a_state_has_its_own_dtype_and_is_raw(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path)
    transfer.set(KEY, TENSORS)
    found, manifest = Transfer(tmp_path).get(KEY)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())
    assert {entry.codec for entry in manifest.entries} == {blob.RAW}


def test_a_manifest_of_raw_tensors_is_the_one_that_releases_before_codecs_wrote(
    tmp_path: Path,
) -> None:
    written = Transfer(tmp_path).set(KEY, TENSORS).to_json()
    assert b"codec" not in written
    assert Manifest.from_json(written).to_json() == written


def test_an_unknown_codec_is_refused_by_name_and_the_state_is_not_damaged(tmp_path: Path) -> None:
    manifest = store_by("delta", tmp_path)
    transfer = Transfer(tmp_path)
    reads = (
        lambda: Manifest.from_json(manifest.to_json()),
        lambda: transfer.manifest(KEY),
        lambda: transfer.get(KEY),
        lambda: transfer.get(KEY, lasting=True),
        lambda: transfer.fetch(KEY),
    )
    for read in reads:
        with pytest.raises(UnknownCodec, match="'w' has the codec 'delta'; known: raw") as caught:
            read()
        assert caught.value.kind == "transfer_unknown_codec"
        assert caught.value.value == KEY
    assert not list(tmp_path.rglob("*damaged*"))


@pytest.mark.parametrize("lasting", [False, True])
def test_a_known_codec_decodes_what_was_verified_as_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    monkeypatch.setitem(blob.CODECS, "widened", Widened())
    manifest = store_by("widened", tmp_path)
    found, read = Transfer(tmp_path).get(KEY, lasting=lasting)
    assert read == manifest
    assert torch.equal(found["w"], torch.arange(64.0))
    path = tmp_path / KEY
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(Corrupt, match="do not match their checksum"):
        Transfer(tmp_path).get(KEY, lasting=lasting)


def test_other_programs_get_no_directory_with_a_codec_that_they_do_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blob.CODECS, "widened", Widened())
    manifest = store_by("widened", tmp_path)
    with pytest.raises(OSError, match="Troupe's own codec"):
        Transfer(tmp_path).model_directory(KEY, {}, expected_checksum=manifest.checksum)
