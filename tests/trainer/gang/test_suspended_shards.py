"""Suspended states in parts: any boxes of them, from and to any number of ranks, past rank 0."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.chassis.transfer import HostTransfer
from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_model
from services.trainer.state.parts import PARTS, Box, PartsReader, StoredParts, store_part
from services.trainer.state.suspension import (
    ParameterPool,
    SuspendedTensors,
    Suspension,
    state_keys,
)
from tests.support.training import tiny_config
from tests.trainer.batches import random_rows
from tests.trainer.gang.shard_ranks import SHAPE
from tests.trainer.gang.test_gang import assert_equal, gang_spec
from tests.trainer.gang.test_gang_memory import output_of_ranks
from troupe.rpc import DataLoss, NotFound
from troupe.transfer import Corrupt, KeyNotFound, StorageFull

KEYS = state_keys("job/solver")
CPU = torch.device("cpu")


def transfer_of(directory: Path) -> HostTransfer:
    return HostTransfer(ServiceSettings(transfer_dir=directory / "transfer"), Telemetry())


@given(data=st.data())
def test_any_box_is_read_from_the_parts_that_have_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Parts are slabs of one dimension; boxes reach anywhere."""
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    tensor = torch.randn(shape)
    transfer = transfer_of(tmp_path_factory.mktemp("boxes"))
    boxes = [Box.whole(shape)]
    if shape:
        along = data.draw(st.integers(0, len(shape) - 1))
        cuts = data.draw(st.lists(st.integers(0, shape[along]), max_size=3).map(sorted))
        ends = [0, *cuts, shape[along]]
        boxes = [
            Box(
                tuple(a if n == along else 0 for n in range(len(shape))),
                tuple(b - a if n == along else size for n, size in enumerate(shape)),
            )
            for a, b in itertools.pairwise(ends)
        ]
    everything = Box.whole(shape)
    replicas = data.draw(st.integers(1, 2))  # hosts that have all of the state
    parts = [
        store_part(transfer, f"job/{n}", {"t": tensor[box.within(everything)]}, {"t": box})
        for n, box in enumerate(boxes * replicas)
    ]
    stored = StoredParts.decode(StoredParts.of({"t": tensor}, parts).encode())
    begins = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, n - at)) for n, at in zip(shape, begins, strict=True)]
    wanted = Box(tuple(begins), tuple(sizes))
    found = PartsReader(transfer, stored).read("t", wanted)
    assert torch.equal(found, tensor[wanted.within(everything)])


def test_parts_that_differ_from_the_stored_ones_are_refused(tmp_path: Path) -> None:
    transfer, tensor = transfer_of(tmp_path), torch.arange(6.0)
    halves = [Box((0,), (3,)), Box((3,), (3,))]
    parts = [
        store_part(transfer, f"job/{n}", {"t": tensor[box.within(Box.whole((6,)))]}, {"t": box})
        for n, box in enumerate(halves)
    ]
    everything = Box.whole((6,))
    with pytest.raises(ValueError, match="lack 3 of 6 elements of 't'"):
        PartsReader(transfer, StoredParts.of({"t": tensor}, parts[:1])).read("t", everything)
    store_part(transfer, "job/1", {"t": tensor[:3]}, {"t": halves[1]})
    with pytest.raises(Corrupt):
        PartsReader(transfer, StoredParts.of({"t": tensor}, parts)).read("t", everything)
    transfer.delete("job/1")
    with pytest.raises(KeyNotFound):
        PartsReader(transfer, StoredParts.of({"t": tensor}, parts)).read("t", everything)


def in_halves(transfer: HostTransfer) -> tuple[torch.Tensor, StoredParts]:
    """Return a tensor that two ranks have stored."""
    tensor = torch.arange(6.0)
    parts = [
        store_part(transfer, f"{KEYS}parts.{n}", {"weights/t": half}, {"weights/t": box})
        for n, (half, box) in enumerate(
            [(tensor[:4], Box((0,), (4,))), (tensor[4:], Box((4,), (2,)))]
        )
    ]
    return tensor, StoredParts.of({"weights/t": tensor}, parts)


def test_a_state_in_parts_is_joined_on_one_device_and_kept_in_a_gang(tmp_path: Path) -> None:
    transfer = transfer_of(tmp_path)
    tensor, stored = in_halves(transfer)
    gang = Suspension(transfer, ParameterPool(CPU), "job", "solver", gang=True)
    alone = Suspension(transfer, ParameterPool(CPU), "job", "solver")
    drawn = {"drawn/cpu": torch.arange(3)}
    document = {"learner": {"steps": 1}}
    state = gang.store(
        4, SuspendedTensors({PARTS: stored.as_tensor(), **drawn}, document), None, 30.0
    )
    assert state.num_bytes > stored.num_bytes == tensor.nbytes
    found = alone.fetch(state)
    assert_equal(found.tensors, {"weights/t": tensor, **drawn})
    assert found.document["learner"] == document["learner"]
    found = gang.fetch(state, bring_parts=True)
    assert StoredParts.in_state(found.tensors) == stored
    alone.take(state)
    alone.drop(found.parts)
    assert transfer.keys() == []
    with pytest.raises(NotFound) as gone:
        alone.fetch(state)
    assert gone.value.kind == "suspended_state_gone"


def test_a_state_that_lost_a_part_is_lost(tmp_path: Path) -> None:
    transfer = transfer_of(tmp_path)
    _, stored = in_halves(transfer)
    alone = Suspension(transfer, ParameterPool(CPU), "job", "solver")
    state = alone.store(0, SuspendedTensors({PARTS: stored.as_tensor()}, {}), None, 30.0)
    transfer.delete(stored.keys[1])
    with pytest.raises(NotFound) as gone:
        alone.fetch(state)
    assert gone.value.kind == "suspended_state_gone"
    store_part(transfer, stored.keys[1], {"weights/t": torch.zeros(2)}, {})
    with pytest.raises(DataLoss) as changed:
        alone.fetch(state)
    assert changed.value.kind == "suspended_state_changed"


def test_parts_of_a_state_that_has_no_room_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = transfer_of(tmp_path)
    _, stored = in_halves(transfer)
    gang = Suspension(transfer, ParameterPool(CPU), "job", "solver", gang=True)

    def full(key: str, *_: Any, **__: Any) -> Any:
        raise StorageFull(key, "no room")

    monkeypatch.setattr(transfer, "set", full)
    with pytest.raises(StorageFull):
        gang.store(0, SuspendedTensors({PARTS: stored.as_tensor()}, {}), None, 30.0)
    assert transfer.keys() == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_step_moves_between_any_numbers_of_ranks_bit_for_bit(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Four ranks suspend; two resume that, and the state of one device; they suspend, and one
    device and two other ranks resume. Nothing larger than its shard comes to rank 0."""
    model = {"config": tiny_config(hidden_size=64, vocab_size=8000), "tokenizer": str(tokenizer)}
    spec = gang_spec(tokenizer, model=model)
    own = spec.policies["solver"]
    path, transfer = tmp_path / "spec.json", transfer_of(tmp_path)
    path.write_text(spec.model_dump_json())

    def alone() -> Learner:
        return Learner(load_model("solver", own, spec.seed), spec, "solver")

    def written(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / f"{name}.safetensors")

    def read(name: str) -> tuple[StoredParts, Any]:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        return StoredParts.decode(json.dumps(found["stored"]).encode()), found["values"]

    def ranks(size: int, name: str, *stored: str) -> list[list[int]]:
        output = output_of_ranks(size, "shard_ranks", path, tmp_path, name, *stored)
        return [json.loads(line) for line in output.splitlines() if line.startswith("[")]

    one = alone()
    rows = random_rows(load_model("solver", own, spec.seed), 1, SHAPE)
    one.accumulate(rows)
    assert one.apply(0).applied
    one.accumulate(rows[:5])
    whole, values = one.suspended()
    boxes = {name: Box.whole(tensor.shape) for name, tensor in whole.items()}
    part = store_part(transfer, "job/one/training@0", whole, boxes)
    stored = json.loads(StoredParts.of(whole, [part]).encode())
    (tmp_path / "one.json").write_text(json.dumps({"stored": stored, "values": values}))

    came = ranks(4, "four")
    four, _ = read("four")
    total = four.num_bytes
    assert [part.key.rpartition(".")[2] for part in four.parts] == ["0", "rest", "1", "2", "3"]
    shards = [part.num_bytes for part in four.parts if not part.key.endswith("rest")]
    assert max(shards) < 1.1 * total / 4
    # Ranks exchange only descriptions.
    assert came[0][0] == 0
    assert came[0][1] < total / 20

    # A rank maps the file of one device's state, and reads its own rows.
    came = ranks(2, "two", "one", "four")
    assert_equal(written("one-resumed"), whole)
    assert_equal(written("four-resumed"), written("four"))
    assert_equal(written("two"), written("four"))
    assert came[1][0] < 0.6 * total
    assert all(exchanged < total / 20 for _, exchanged in came)

    came = ranks(2, "again", "two")
    assert_equal(written("two-resumed"), written("four"))
    assert came[0][0] < 0.6 * total
    again, values = read("again")
    two = alone()
    two.adopt({n: t.clone() for n, t in PartsReader(transfer, again).whole().items()}, values)
    assert_equal(dict(two.suspended()[0]), written("four"))
