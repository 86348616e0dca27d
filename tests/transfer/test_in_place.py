"""States as safetensors files that other programs read in place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from troupe.transfer import Corrupt, KeyNotFound, Transfer

KEY = "job/solver/weights@1"
MIB = 1 << 20


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    """Return tensors of all dtypes of safetensors, of odd sizes, empty, and of several pieces."""
    made = {
        str(dtype): torch.full((3,), value).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool)
    }
    return made | {
        "large": torch.full((5 * MIB, 2), value, dtype=torch.float16),
        "none": torch.empty(0, 7),
        "one": torch.tensor(value),
        "ünicode.\n": torch.arange(7, dtype=torch.uint8),
    }


@pytest.fixture
def transfer(tmp_path: Path) -> Iterator[Transfer]:
    made = Transfer(tmp_path)
    yield made
    made.close()


def test_a_state_is_a_checkpoint_file(transfer: Transfer, tmp_path: Path) -> None:
    state = tensors() | {"wide": torch.zeros(4, dtype=torch.complex128)}
    transfer.set(KEY, state, metadata={"step": '"7"'})
    found = load_file(tmp_path / KEY)
    assert found.keys() == state.keys()
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    # A dtype that safetensors does not know is bytes there, and keeps its type here.
    assert torch.equal(found["wide"].view(torch.complex128), state["wide"])
    got, manifest = transfer.get(KEY)
    assert torch.equal(got["wide"], state["wide"])
    assert manifest.metadata == {"step": '"7"'}
    with safe_open(tmp_path / KEY, "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert got["large"].data_ptr() % 64 == 0


def test_state_read_in_place_outlives_its_key_and_is_not_reused(
    transfer: Transfer,
) -> None:
    checksum = transfer.set(KEY, tensors(1.0)).checksum
    before = transfer.get(KEY)
    with pytest.raises(Corrupt):
        transfer.model_directory(KEY, {}, expected_checksum="0" * 32)
    linked = transfer.model_directory(KEY, {"config.json": b"{}"}, expected_checksum=checksum)
    assert (linked.path / "config.json").read_bytes() == b"{}"
    del before
    # If its file were free, two more versions would be written into it.
    for version in (2, 3, 4):
        transfer.delete(f"job/solver/weights@{version - 1}")
        transfer.set(f"job/solver/weights@{version}", tensors(float(version)))
    assert float(load_file(linked.path / "model.safetensors")["one"]) == 1.0
    linked.close()
    linked.close()
    assert not linked.path.exists()
    with pytest.raises(KeyNotFound):
        transfer.model_directory(KEY, {}, expected_checksum=checksum)


def test_a_link_does_not_count_as_a_change_of_state(transfer: Transfer, tmp_path: Path) -> None:
    """Its other readers do not verify it again."""
    checksum = transfer.set(KEY, tensors()).checksum
    reader = Transfer(tmp_path)
    reader.get(KEY)
    mark = tmp_path / "job/solver/.weights@1.verified"
    marked = mark.stat()
    linked = transfer.model_directory(KEY, {}, expected_checksum=checksum)
    Transfer(tmp_path).get(KEY)
    linked.close()
    Transfer(tmp_path).get(KEY)
    assert os.path.samestat(mark.stat(), marked), "it was verified again"


def test_directories_of_dead_processes_are_removed(transfer: Transfer, tmp_path: Path) -> None:
    checksum = transfer.set(KEY, tensors()).checksum
    code = (
        "import os, sys; from pathlib import Path; from troupe.transfer import Transfer\n"
        "t = Transfer(Path(sys.argv[1])); t.model_directory(*sys.argv[2:3], {}, "
        "expected_checksum=sys.argv[3]); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), KEY, checksum], check=True)
    (left,) = (tmp_path / ".in-place").iterdir()
    linked = transfer.model_directory(KEY, {}, expected_checksum=checksum)
    assert not left.exists()
    assert linked.path.exists()
    assert transfer.keys() == [KEY]


def test_no_byte_of_the_header_can_change_unseen(transfer: Transfer, tmp_path: Path) -> None:
    """Other programs read the part of it that Troupe does not need."""
    transfer.set(KEY, {"w": torch.ones(3)})
    whole = (tmp_path / KEY).read_bytes()
    start = len(whole) - 12
    for at in range(start):
        (tmp_path / KEY).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(Corrupt):
            transfer.get(KEY)
