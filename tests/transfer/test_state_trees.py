"""Trees of tensors, casts, pieces, shards: what a state may be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.rpc import InvalidArgument
from troupe.transfer import Corrupt, Manifest, Shard, TensorEntry, Transfer, blob, checksum_of
from troupe.transfer.blob import chunks_of, flatten, unflatten
from troupe.transfer.cast import CAST_OF, cast_key
from troupe.transfer.checksum import PIECE_BYTES, bytes_checksum

KEY = "job/solver/training@3"
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.builds(lambda n: torch.full((n,), n), st.integers(0, 3)),
)
TREES = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inside, max_size=3),
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        # The order of an optimizer's parameters is part of its state.
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_any_tree_comes_back(tree: Any) -> None:
    assert same(unflatten(*flatten(tree)), tree)


def test_an_optimizers_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "rng": [torch.get_rng_state(), None],
        "best": -math.inf,
    }
    transfer = Transfer(tmp_path)
    manifest = transfer.set(KEY, {**state, "model": dict(state["model"])})
    got, read = transfer.get(KEY)
    assert read == manifest
    assert (got["step"], got["best"], got["rng"][1]) == (7, -math.inf, None)
    optimizer.load_state_dict(got["optimizer"])
    assert got["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    # Into the same tree: names of tensors have to be the same.
    into = {"model": {n: torch.zeros_like(t) for n, t in model.state_dict().items()}}
    rest = {name: got[name] for name in ("optimizer", "step", "rng", "best")}
    transfer.get(KEY, {**into, **rest})
    assert torch.equal(into["model"]["weight"], model.weight)


def test_other_plain_values_are_another_content(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path)
    one = transfer.set(KEY, {"w": torch.ones(2), "step": 1}).checksum
    assert transfer.set(KEY, {"w": torch.ones(2), "step": 2}).checksum != one
    assert transfer.set(KEY, {"w": torch.ones(2)}).checksum == checksum_of({"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("state", "value"),
    [({"a": {"f": len}}, "a.f"), ({"a": {1.5: 1}}, "a"), ({"a": [{1, 2}]}, "a.0"), (object(), "")],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, state: Any, value: str) -> None:
    transfer = Transfer(tmp_path)
    with pytest.raises(InvalidArgument) as caught:
        transfer.set(KEY, state)
    assert (caught.value.kind, caught.value.value) == ("transfer_not_a_tree", value)
    assert caught.value.remedy
    assert not transfer.keys()


def test_a_cast_is_another_state_that_names_its_source(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path)
    tensors = {"w": torch.randn(5, 3), "ids": torch.arange(4)}
    source = transfer.set(KEY, tensors)
    got, manifest = transfer.get(KEY, cast=torch.bfloat16, expected_checksum=source.checksum)
    assert torch.equal(got["w"], tensors["w"].to(torch.bfloat16))
    assert got["ids"].dtype is torch.int64
    # Verified against a checksum of the cast content.
    assert manifest.checksum == checksum_of(got)
    assert manifest.key == cast_key(KEY, torch.bfloat16) == "job/solver/training=bfloat16@3"
    assert (manifest.version, manifest.metadata[CAST_OF]) == (3, source.checksum)
    # Cast again once what it was made of has changed, and only then.
    changed = transfer.set(KEY, {"w": torch.zeros(5, 3)})
    again, _ = transfer.get(KEY, cast=torch.bfloat16, expected_checksum=changed.checksum)
    assert not again["w"].any()
    with pytest.raises(InvalidArgument, match="floating-point"):
        transfer.get(KEY, cast=torch.int8)


def test_pieces_of_large_tensors_are_verified_alone() -> None:
    data = torch.arange(PIECE_BYTES // 4 * 2 + 5, dtype=torch.int32)
    tensors = {"large": data, "small": torch.ones(3), "other": torch.zeros(7)}
    assert bytes_checksum(memoryview(data.numpy()).cast("B")) == bytes_checksum(
        memoryview(data.clone().numpy()).cast("B")
    )
    draft, views = blob.draft(KEY, tensors, {})
    assert len(draft.entries[0].pieces) == 3
    # A draft is as long as what it becomes: its file's size is known before the bytes are hashed.
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


def test_where_shards_lie_is_kept(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path)
    shard = Shard((8, 4), (2, 0))
    transfer.set(KEY, {"w": torch.ones(2, 4)}, shards={"w": shard})
    entry: TensorEntry = transfer.manifest(KEY).entries[0]
    assert entry.shard == shard
