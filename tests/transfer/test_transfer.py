"""Set, get, corruption, replacement."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from troupe.transfer import (
    Choice,
    Corrupt,
    InvalidKey,
    KeyNotFound,
    Manifest,
    StorageFull,
    Transfer,
    TransferTimeout,
    checksum_of,
    segments,
)
from troupe.transfer.checksum import PIECE_BYTES, bytes_checksum

KEY = "job/solver/weights@3"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return Transfer(tmp_path)


def state() -> dict[str, torch.Tensor]:
    return {
        "b": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "a": torch.randn(5, 2).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


def test_a_missing_key_keeps_no_reference_to_its_caller(transfer: Transfer) -> None:
    """A trainer asks whether its base is there: its model shall leave memory when it is released,
    not when circles are looked for."""

    class Model:
        pass

    def ask() -> weakref.ref[Model]:
        model = Model()
        with pytest.raises(KeyNotFound):
            transfer.get("job/nothing/weights@0")
        return weakref.ref(model)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_a_state_makes_a_round_trip(transfer: Transfer) -> None:
    tensors = state()
    manifest = transfer.set(KEY, tensors, metadata={"step": "9"})
    got, read = transfer.get(KEY)
    assert same(got, tensors)
    assert read == manifest == transfer.manifest(KEY)
    assert (read.version, read.metadata, read.checksum) == (
        3,
        {"step": "9"},
        checksum_of(tensors),
    )
    assert read.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
def test_any_tensors_round_trip(
    transfer: Transfer, tree: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    tensors = {n: torch.randint(0, 2, shape).to(dtype) for n, (dtype, shape) in tree.items()}
    manifest = transfer.set(KEY, tensors)
    got, _ = transfer.get(KEY)
    assert same(got, tensors)
    assert manifest.checksum == checksum_of(got)


def test_a_checksum_identifies_the_content() -> None:
    tensors = state()
    backwards = dict(reversed(tensors.items()))
    assert checksum_of(backwards) == checksum_of(tensors)
    for name in ("a", "b", "scalar"):
        changed = {**tensors, name: tensors[name] + 1}
        assert checksum_of(changed) != checksum_of(tensors)
    assert checksum_of({**tensors, "empty": torch.empty(3, 0)}) != checksum_of(tensors)
    assert checksum_of({"x": torch.zeros(1)}) != checksum_of({"y": torch.zeros(1)})
    assert checksum_of({"x": torch.zeros(1)}) != checksum_of({"x": torch.zeros(1).int()})


def test_stored_tensors_are_a_copy(transfer: Transfer) -> None:
    tensors = state()
    transfer.set(KEY, tensors)
    first, _ = transfer.get(KEY)
    tensors["b"].zero_()
    first["b"].fill_(-1)
    assert torch.equal(transfer.get(KEY)[0]["b"], torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("where", ["magic", "length", "manifest", "first tensor", "last byte"])
def test_a_corrupt_byte_is_refused(transfer: Transfer, tmp_path: Path, where: str) -> None:
    tensors = {"a": torch.randn(100), "b": torch.randn(100)}
    manifest = transfer.set(KEY, tensors)
    path = tmp_path / KEY
    data = bytearray(path.read_bytes())
    start = len(data) - manifest.end
    place = {"magic": 2, "length": 9, "manifest": 60, "first tensor": start + 5, "last byte": -1}
    data[place[where]] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(Corrupt):
        transfer.get(KEY)


def test_a_truncated_file_is_refused(transfer: Transfer, tmp_path: Path) -> None:
    transfer.set(KEY, state())
    path = tmp_path / KEY
    for size in (0, 10, 40, path.stat().st_size - 1):
        os.truncate(path, size) if size < path.stat().st_size else None
        with pytest.raises(Corrupt):
            transfer.get(KEY)


def test_state_with_another_checksum_than_expected_is_refused(transfer: Transfer) -> None:
    manifest = transfer.set(KEY, state())
    transfer.get(KEY, expected_checksum=manifest.checksum)
    with pytest.raises(Corrupt, match="expected"):
        transfer.get(KEY, expected_checksum="0" * 32)


def test_replaced_and_deleted_content_stays_with_its_readers(transfer: Transfer) -> None:
    transfer.set(KEY, {"x": torch.zeros(1000)})
    old, _ = transfer.get(KEY)
    transfer.set(KEY, {"x": torch.ones(1000)})
    assert transfer.get(KEY)[0]["x"].sum() == 1000
    assert transfer.delete(KEY)
    assert old["x"].sum() == 0
    assert not transfer.exists(KEY)
    assert not transfer.delete(KEY)
    assert transfer.keys() == []


def test_a_missing_key_raises_at_once_or_at_the_deadline(transfer: Transfer) -> None:
    with pytest.raises(KeyNotFound, match="weights@3") as caught:
        transfer.get(KEY)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.key, copy.kind) == (KeyNotFound, KEY, "transfer_key_not_found")
    with pytest.raises(KeyNotFound):
        transfer.manifest(KEY)
    with pytest.raises(TransferTimeout, match=r"0\.05 s"):
        transfer.get(KEY, timeout=0.05)


def test_get_waits_for_a_key(transfer: Transfer) -> None:
    timer = threading.Timer(0.1, transfer.set, (KEY, {"x": torch.ones(3)}))
    timer.start()
    got, _ = transfer.get(KEY, timeout=PATIENCE)
    timer.join()
    assert got["x"].sum() == 3


@pytest.mark.parametrize("key", ["", "/abs", "a/../b", "a//b", "a/.hidden", "a b", "a/", "a\0b"])
def test_bad_keys_are_refused(transfer: Transfer, key: str) -> None:
    with pytest.raises(InvalidKey):
        transfer.set(key, {})


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_full_storage_keeps_the_former_content(
    transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.set(KEY, {"x": torch.zeros(4)})
    monkeypatch.setattr(segments, "_write_all", _full)
    with pytest.raises(StorageFull, match="no room"):
        transfer.set(KEY, {"x": torch.ones(4)})
    monkeypatch.undo()
    assert transfer.get(KEY)[0]["x"].sum() == 0
    assert [p.name for p in (tmp_path / KEY).parent.iterdir()] == ["weights@3"]


def test_full_shared_memory_falls_back_to_files_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small, big = tmp_path / "small", tmp_path / "big"
    transfer = Transfer(small, fallback=big)
    transfer.set(KEY, {"x": torch.zeros(4)})
    real = segments.write

    def write(path: Path, *rest: Any) -> Manifest:
        if path.is_relative_to(small):
            _full()
        return real(path, *rest)

    monkeypatch.setattr(segments, "write", write)
    with caplog.at_level(logging.WARNING):
        transfer.set(KEY, {"x": torch.ones(4)})
    assert "no room" in caplog.text
    # Readers find the new content, not the rest in shared memory.
    assert Transfer(small, fallback=big).get(KEY)[0]["x"].sum() == 4
    assert transfer.delete(KEY)
    assert not transfer.exists(KEY)


def test_a_root_on_disk_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Transfer(Path("/proc/self/cwd"))
    assert "not in shared memory" in caplog.text


def test_state_set_under_another_key_is_refused(transfer: Transfer, tmp_path: Path) -> None:
    transfer.set(KEY, state())
    (tmp_path / KEY).rename(tmp_path / "job/solver/weights@4")
    with pytest.raises(Corrupt, match=r"the state 'job/solver/weights@3'"):
        transfer.get("job/solver/weights@4")


def test_choices_are_counted_with_their_reason(tmp_path: Path) -> None:
    writer, reader = Transfer(tmp_path), Transfer(tmp_path)
    size = writer.set(KEY, {"w": torch.zeros(8)}).num_bytes
    writer.get(KEY)
    reader.get(KEY)
    transport = writer.last_transport
    # On any file system, a process reads its own content within the process.
    assert writer.counters.moves()[Choice("get", "in_process", "written_here")] == 1
    (choice,) = reader.counters.moves()
    assert (choice.transport, choice.reason) in {
        ("file", "root_on_disk"),
        ("shared_memory", "same_host"),
    }
    assert transport == "in_process"
    moves, sizes, _ = reader.counters.collect()
    assert [sample.value for sample in moves.samples] == [1]
    assert [sample.value for sample in sizes.samples] == [size]


def test_hashing_releases_the_interpreter_lock() -> None:
    data = memoryview(bytearray(PIECE_BYTES))
    begun, over = threading.Event(), threading.Event()

    def hash_on() -> None:
        begun.set()
        for _ in range(100):
            bytes_checksum(data)
        over.set()

    interval = sys.getswitchinterval()
    # Nobody is made to let go of the interpreter's lock: who has it must do so itself.
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=hash_on)
        thread.start()
        begun.wait(PATIENCE)
        assert not over.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
