"""What careless callers do: odd keys, trees, tensors and targets; directories that come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.rpc import InvalidArgument
from troupe.transfer import InvalidKey, LayoutMismatch, Shard, Transfer, checksum_of
from troupe.transfer.blob import flatten, unflatten

W = {"w": torch.ones(3)}


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return Transfer(tmp_path / "root")


@pytest.mark.parametrize("key", ["a\n", "job/a@1\n", "a" * 201, "a/" * 600 + "b", 3, None])
def test_keys_that_no_file_can_have(transfer: Transfer, key: Any) -> None:
    for call in (lambda: transfer.set(key, W), lambda: transfer.get(key)):
        with pytest.raises(InvalidKey):
            call()


def test_the_longest_key_has_room_for_everything_beside_it(transfer: Transfer) -> None:
    key = "a" * 181 + "@123456789"
    big = {"w": torch.ones(1 << 19)}
    transfer.set(key, big)
    other = Transfer(transfer.roots[0])
    assert other.get(key, cast=torch.bfloat16)[0]["w"].sum() == 1 << 19
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
def test_a_prefix_never_leads_outside(transfer: Transfer, prefix: str) -> None:
    transfer.set("a/b", W)
    assert transfer.keys(prefix) == []
    assert list(transfer.watch(prefix, timeout=0)) == []


def test_what_is_damaged_ends_no_watch(transfer: Transfer) -> None:
    transfer.set("job/a", W)
    (transfer.roots[0] / "job" / "b").write_bytes(b"of somebody else")
    transfer.set("job/c", W)
    assert [m.key for m in transfer.watch("job/", timeout=0)] == ["job/a", "job/c"]


def test_the_newest_version_however_its_number_is_written(transfer: Transfer) -> None:
    for version in ("3", "007", "5"):
        transfer.set(f"job/p/weights@{version}", W)
    assert transfer.newest("job/p/weights").key == "job/p/weights@007"


def test_names_that_read_alike_stay_apart(transfer: Transfer) -> None:
    tree = {"a.b#2": torch.tensor(0), "a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    transfer.set("k", tree)
    found, _ = transfer.get("k")
    assert found["a.b#2"] == 0
    assert (found["a.b"], found["a"]["b"]) == (1, 2)


def test_no_name_makes_two_contents_look_alike(transfer: Transfer) -> None:
    one = {"a": torch.zeros(1), "b": torch.ones(1)}
    inside = transfer.set("one", one).entries[0].checksum
    other = {f"a\0float32\x001\0{inside}\nb": torch.ones(1)}
    assert checksum_of(one) != checksum_of(other)
    # Any text is a name.
    odd = {"\ud800": torch.zeros(1), "\x1b[31m\n": torch.ones(1), "": torch.ones(2), "\\n": W["w"]}
    transfer.set("odd", odd)
    found, _ = Transfer(transfer.roots[0]).get("odd")
    assert found.keys() == odd.keys()


def _deep(levels: int) -> Any:
    tree: Any = torch.ones(1)
    for _ in range(levels):
        tree = [tree]
    return tree


def test_trees_without_an_end_are_refused(transfer: Transfer) -> None:
    circle: list[Any] = []
    circle.append(circle)
    for tree in ({"a": circle}, _deep(101), _deep(3000), {"a": 10**5000}):
        with pytest.raises(InvalidArgument) as caught:
            transfer.set("k", tree)
        assert caught.value.kind == "transfer_not_a_tree"
    assert unflatten(*flatten(_deep(100)))
    assert transfer.keys() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("wrap", [lambda t: {"x": t}, lambda t: [{"x": t}]])
def test_tensors_that_are_more_than_their_elements_are_refused(
    transfer: Transfer, make: Callable[[], torch.Tensor], wrap: Callable[[torch.Tensor], Any]
) -> None:
    with pytest.raises(InvalidArgument, match="tensor"):
        transfer.set("k", wrap(make()))


def test_views_hold_what_they_show(transfer: Transfer) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    views = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    transfer.set("k", views)
    found, _ = transfer.get("k")
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negative"].tolist() == [-2, 4]


def _of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    "target", [lambda: torch.zeros(1).expand(3), _of_inference], ids=["expanded", "inference"]
)
def test_what_cannot_be_filled_leaves_all_as_it_was(
    transfer: Transfer, target: Callable[[], torch.Tensor]
) -> None:
    transfer.set("k", {"a": torch.ones(3), "b": torch.ones(3)})
    into = {"a": torch.zeros(3), "b": target()}
    with pytest.raises(LayoutMismatch, match="'b' cannot be filled"):
        transfer.get("k", into)
    assert not into["a"].any()


def test_numbers_of_a_tree_are_those_that_are_stored(transfer: Transfer) -> None:
    transfer.set("k", {"w": torch.ones(2), "step": 7})
    into = {"w": torch.zeros(2), "step": 0}
    found, _ = transfer.get("k", into)
    assert found["step"] == 7
    assert found["w"] is into["w"]
    assert into["w"].all()


def test_a_cast_keeps_where_its_parts_lie(transfer: Transfer) -> None:
    shard = Shard((6,), (3,))
    transfer.set("k@1", W, shards={"w": shard}, base="k@0")
    _, manifest = transfer.get("k@1", cast=torch.bfloat16)
    assert manifest.entries[0].shard == shard
    assert manifest.base == "k=bfloat16@0"


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("v", Shard((6,), (0,))),
        ("w", Shard((4,), (2,))),
        ("w", Shard((6, 1), (0, 0))),
        ("w", Shard((6,), (-1,))),
    ],
)
def test_parts_of_nothing_are_refused(transfer: Transfer, name: str, shard: Shard) -> None:
    with pytest.raises(InvalidArgument, match=f"'{name}' is"):
        transfer.set("k", W, shards={name: shard})


def test_directories_go_with_their_last_state_and_come_again(transfer: Transfer) -> None:
    """A publishing trainer, one that frees old versions, and one that looks, all at once."""
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
        thread.join(60)
    done.set()
    reader.join(60)
    assert not failures
