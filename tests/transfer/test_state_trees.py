"""The possible contents of a state: named tensors, and the pieces of large ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.rpc import InvalidArgument
from troupe.transfer import Corrupt, Manifest, Transfer, blob
from troupe.transfer.blob import chunks_of
from troupe.transfer.checksum import PIECE_BYTES, bytes_checksum

KEY = "job/solver/training@3"


@pytest.mark.parametrize(
    ("state", "value"),
    [
        ({"a": {"b": torch.ones(1)}}, "a"),
        ({"a": 1}, "a"),
        ({1: torch.ones(1)}, ""),
        ([torch.ones(1)], ""),
        (object(), ""),
    ],
)
def test_a_state_other_than_named_tensors_is_refused(
    tmp_path: Path, state: Any, value: str
) -> None:
    transfer = Transfer(tmp_path)
    with pytest.raises(InvalidArgument) as caught:
        transfer.set(KEY, state)
    assert (caught.value.kind, caught.value.value) == ("transfer_not_tensors", value)
    assert caught.value.remedy
    assert not transfer.keys()


def test_pieces_of_large_tensors_are_verified_alone() -> None:
    data = torch.arange(PIECE_BYTES // 4 * 2 + 5, dtype=torch.int32)
    tensors = {"large": data, "small": torch.ones(3), "other": torch.zeros(7)}
    assert bytes_checksum(memoryview(data.numpy()).cast("B")) == bytes_checksum(
        memoryview(data.clone().numpy()).cast("B")
    )
    draft, views = blob.draft(KEY, tensors, {})
    assert len(draft.entries[0].pieces) == 3
    # A draft has its final length: the file's size is known before the bytes are hashed.
    signed = blob.signed(draft, [(e.checksum, e.pieces) for e in draft.entries])
    assert len(blob.prefix(signed)) == len(blob.prefix(draft))
    # Every byte is in one chunk, none is longer than a piece, small tensors share one.
    chunks = chunks_of(draft)
    covered = {span.offset + i for c in chunks for span in c.spans for i in (0, span.nbytes - 1)}
    assert all(c.nbytes <= PIECE_BYTES for c in chunks)
    assert {e.offset for e in draft.entries} <= covered
    assert sum(s.nbytes for c in chunks for s in c.spans) == draft.num_bytes
    assert len(chunks) == 3
    assert len(views) == 3


def test_a_manifest_whose_pieces_do_not_fit_is_refused(tmp_path: Path) -> None:
    manifest = Transfer(tmp_path).set(KEY, {"w": torch.zeros(PIECE_BYTES // 4 + 1)})
    assert Manifest.from_json(manifest.to_json()) == manifest
    (entry,) = manifest.entries
    for pieces in ((entry.pieces[0], "0" * 32), entry.pieces[:1]):
        other = replace(manifest, entries=(replace(entry, pieces=pieces),))
        with pytest.raises(ValueError, match="pieces"):
            Manifest.from_json(other.to_json())


def test_a_file_of_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path)
    transfer.set(KEY, {"w": torch.ones(2)})
    with open(tmp_path / KEY, "r+b") as file:
        file.write(b"TROUPE\x00\x01")
    with pytest.raises(Corrupt, match="format 1 by another version of Troupe"):
        transfer.get(KEY)
