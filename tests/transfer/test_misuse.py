"""Careless callers: odd keys and tensors; directories that appear and disappear."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import PATIENCE
from troupe.rpc import InvalidArgument
from troupe.transfer import InvalidKey, Transfer, checksum_of

W = {"w": torch.ones(3)}


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return Transfer(tmp_path / "root")


@pytest.mark.parametrize("key", ["a\n", "job/a@1\n", "a" * 201, "a/" * 600 + "b", 3, None])
def test_keys_that_are_no_file_names_are_refused(transfer: Transfer, key: Any) -> None:
    for call in (lambda: transfer.set(key, W), lambda: transfer.get(key)):
        with pytest.raises(InvalidKey):
            call()


def test_the_longest_key_leaves_room_for_all_suffixes(transfer: Transfer) -> None:
    key = "a" * 181 + "@123456789"
    big = {"w": torch.ones(1 << 19)}
    transfer.set(key, big)
    other = Transfer(transfer.roots[0])
    assert other.get(key)[0]["w"].sum() == 1 << 19
    assert other.delete(key)


def test_a_key_below_or_above_another_is_refused(transfer: Transfer) -> None:
    transfer.set("a/b", W)
    for key in ("a/b/c", "a"):
        with pytest.raises(InvalidKey):
            transfer.set(key, W)
        assert not transfer.delete(key)
        assert not transfer.exists(key)
    assert transfer.keys() == ["a/b"]
    assert torch.equal(transfer.get("a/b")[0]["w"], W["w"])


@pytest.mark.parametrize("prefix", ["/etc/", "../../", "../", "a/../../", ".spare/", "a//"])
def test_a_prefix_never_leads_outside_the_root(transfer: Transfer, prefix: str) -> None:
    transfer.set("a/b", W)
    assert transfer.keys(prefix) == []


def test_no_name_makes_two_contents_look_alike(transfer: Transfer) -> None:
    one = {"a": torch.zeros(1), "b": torch.ones(1)}
    inside = transfer.set("one", one).entries[0].checksum
    other = {f"a\0float32\x001\0{inside}\nb": torch.ones(1)}
    assert checksum_of(one) != checksum_of(other)
    # Any text may be a name.
    odd = {"\ud800": torch.zeros(1), "\x1b[31m\n": torch.ones(1), "": torch.ones(2), "\\n": W["w"]}
    transfer.set("odd", odd)
    found, _ = Transfer(transfer.roots[0]).get("odd")
    assert found.keys() == odd.keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_are_more_than_their_elements_are_refused(
    transfer: Transfer, make: Callable[[], torch.Tensor]
) -> None:
    with pytest.raises(InvalidArgument, match="tensor"):
        transfer.set("k", {"x": make()})


def test_conjugate_and_negative_views_are_stored_as_their_values(transfer: Transfer) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    views = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    transfer.set("k", views)
    found, _ = transfer.get("k")
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negative"].tolist() == [-2, 4]


def test_directories_are_removed_with_their_last_state_and_made_again(transfer: Transfer) -> None:
    """A trainer publishes, another frees old versions, and a third lists them, all at once."""
    failures: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    def publish(name: str) -> None:
        mine = Transfer(transfer.roots[0])
        for _ in range(150):
            mine.set(f"job/p/s/{name}", W)
            assert mine.delete(f"job/p/s/{name}")

    def look() -> None:
        while not done.is_set():
            transfer.keys("job/")

    writers = [
        threading.Thread(target=guarded, args=[lambda name=name: publish(name)]) for name in "abc"
    ]
    reader = threading.Thread(target=guarded, args=[look])
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join(PATIENCE)
    done.set()
    reader.join(PATIENCE)
    assert not failures
