"""Arguments and tensors that make no sense: refused by name, before anything is read or changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from troupe.rpc import InvalidArgument
from troupe.transfer import InvalidKey, LayoutMismatch, Shard, Transfer, TransferTimeout, shelf
from troupe.transfer.cast import cast_key
from troupe.transfer.remote import Peer

W = {"w": torch.ones(3)}
NAN = float("nan")


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return Transfer(tmp_path / "root")


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}, "abc", ["a"], 5, {"a": NAN}]
)
def test_metadata_that_is_not_text_is_refused(transfer: Transfer, metadata: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        transfer.set("k", W, metadata=metadata)
    assert caught.value.field == "metadata"
    assert not transfer.keys()


@pytest.mark.parametrize(
    "shards",
    [
        5,
        {"w": 5},
        {"w": None},
        [("w", Shard((6,), (0,)))],
        {"w": Shard(("a",), ("b",))},  # type: ignore[arg-type]
        {"w": Shard((6,), (0.5,))},  # type: ignore[arg-type]
        {"w": Shard((float("inf"),), (0,))},  # type: ignore[arg-type]
    ],
)
def test_shards_that_are_none_are_refused(transfer: Transfer, shards: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        transfer.set("k", W, shards=shards)
    assert caught.value.field == "shards"


@pytest.mark.parametrize("timeout", ["a", NAN, float("inf"), -float("inf"), [1]])
def test_a_time_that_never_ends_is_refused(transfer: Transfer, timeout: Any) -> None:
    for call in (
        lambda: transfer.get("k", timeout=timeout),
        lambda: transfer.fetch("k", timeout=timeout),
        lambda: list(transfer.watch("k", timeout=timeout)),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == "timeout"


@pytest.mark.parametrize(
    "cast", ["nonsense", 5, torch.int8, torch.complex64, torch.float4_e2m1fn_x2]
)
def test_a_cast_to_what_numbers_cannot_be_cast_to(transfer: Transfer, cast: Any) -> None:
    transfer.set("k", W)
    for key in ("k", "missing"):
        with pytest.raises(InvalidArgument, match="no floating-point dtype"):
            transfer.get(key, cast=cast)
    # Its name is as good.
    named: Any = "bfloat16"
    assert transfer.get("k", cast=named)[0]["w"].dtype is torch.bfloat16


def test_other_arguments_of_another_type(transfer: Transfer) -> None:
    transfer.set("k", W)
    with pytest.raises(InvalidArgument, match="expected_checksum"):
        transfer.get("k", expected_checksum=5)  # type: ignore[arg-type]
    for call in (
        lambda: transfer.get("k", base="../x"),
        lambda: transfer.keys(None),  # type: ignore[arg-type]
        lambda: transfer.forget_fetched(b"x"),  # type: ignore[arg-type]
        lambda: transfer.set(f"k@{2**63}", W),
        lambda: transfer.set("k@" + "9" * 100, W),
        lambda: transfer.set("k@" + "9" * 5000, W),
    ):
        with pytest.raises(InvalidKey):
            call()
    transfer.set(f"k@{2**63 - 1}", W)


@pytest.mark.parametrize("known", [5, None, "k", b"k", [5], {"k": 1, 2: 1}])
def test_known_keys_that_are_none(transfer: Transfer, known: Any) -> None:
    transfer.set("k", W)
    # (Nobody is there: it is refused before it is sent.)
    for watcher in (transfer, Peer("127.0.0.1:1")):
        with pytest.raises(InvalidArgument, match="collection of keys") as caught:
            list(watcher.watch("", timeout=1, known=known))
        assert caught.value.field == "known"
    assert [m.key for m in transfer.watch("", timeout=0, known={"j"})] == ["k"]


@pytest.mark.parametrize("given", [5, b"x", [Path("x")]])
def test_a_root_that_names_no_place(tmp_path: Path, given: Any) -> None:
    with pytest.raises(InvalidArgument, match="names no directory") as caught:
        Transfer(given)
    assert caught.value.field == "root"
    with pytest.raises(InvalidArgument, match="names no directory") as caught:
        Transfer(tmp_path, fallback=given)
    assert caught.value.field == "fallback"


@pytest.mark.parametrize("peers", [5, None, [5], ["host:1"], "host:1", {"host:1": 1}])
def test_peers_that_nothing_can_be_fetched_from(tmp_path: Path, peers: Any) -> None:
    with pytest.raises(InvalidArgument, match="nobody to fetch from") as caught:
        Transfer(tmp_path, peers=peers)
    assert caught.value.field == "peers"
    assert "Peer" in caught.value.remedy


def test_a_root_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="TROUPE_TRANSFER_DIR"):
        Transfer(tmp_path / "file")


def test_files_of_others_between_states_are_passed_over(transfer: Transfer) -> None:
    transfer.set("job/p/weights@1", W)
    for name in ("a b", "weights@2~", "x" * 220, f"weights@{2**70}", "#w#"):
        (transfer.roots[0] / "job" / "p" / name).write_bytes(b"of an editor")
    assert transfer.keys() == ["job/p/weights@1"]
    assert [m.key for m in transfer.watch("job/", timeout=0)] == ["job/p/weights@1"]
    assert transfer.newest("job/p/weights").version == 1
    assert transfer.forget_fetched("job/") == 0


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _freed() -> torch.Tensor:
    """As a sharded model's parameters are between two passes."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapper(torch.Tensor):
    """As DTensor is: a tensor around others."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "make", [_fake, _freed, Wrapper, lambda: torch._to_functional_tensor(torch.ones(3))]
)
def test_tensors_without_memory_are_refused(
    transfer: Transfer, make: Callable[[], torch.Tensor]
) -> None:
    """Some of them would be read as memory of somebody else."""
    with pytest.raises(InvalidArgument, match=r"'x' (is a .* without memory|has lost its memory)"):
        transfer.set("k", {"x": make()})
    transfer.set("k", {"a": torch.ones(3), "x": torch.ones(3)})
    into = {"a": torch.zeros(3), "x": make()}
    with pytest.raises(InvalidArgument, match="memory"):
        transfer.get("k", into)
    assert not into["a"].any()


def test_a_function_that_is_transformed_stores_nothing(transfer: Transfer) -> None:
    def store(x: torch.Tensor) -> torch.Tensor:
        transfer.set("k", {"x": x})
        return x

    with pytest.raises(InvalidArgument, match="without memory"):
        torch.func.vmap(store)(torch.ones(3, 2))


@pytest.mark.parametrize(
    "into",
    [
        lambda q: {"a": q[:3], "b": q[2:]},
        lambda q: {"a": q[:3], "b": q[:3]},
        lambda q: {"a": torch.zeros(3), "b": q.as_strided((3,), (0,))},
    ],
    ids=["overlapping", "tied", "in itself"],
)
def test_targets_that_would_overwrite_each_other(transfer: Transfer, into: Any) -> None:
    transfer.set("k", {"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    memory = torch.zeros(5)
    with pytest.raises(LayoutMismatch, match="share memory"):
        transfer.get("k", into(memory))
    assert not memory.any()


def test_windows_of_one_tensor_are_no_target(transfer: Transfer) -> None:
    transfer.set("k", {"x": torch.arange(9.0).reshape(3, 3)})
    with pytest.raises(LayoutMismatch, match="share memory"):
        transfer.get("k", {"x": torch.zeros(5).as_strided((3, 3), (1, 1))})


def test_tied_and_neighbouring_targets_are_filled(transfer: Transfer) -> None:
    tied = torch.randn(4, 4)
    transfer.set("k", {"embed": tied, "head": tied, "q": torch.ones(4, 2), "v": torch.zeros(4, 2)})
    weight, packed = torch.zeros(4, 4), torch.full((4, 4), 9.0)
    into = {"embed": weight, "head": weight, "q": packed[:, :2], "v": packed[:, 2:]}
    transfer.get("k", into)
    assert torch.equal(weight, tied)
    assert packed.tolist() == [[1, 1, 0, 0]] * 4


def test_a_dtype_that_torch_does_not_copy_fills_nothing(transfer: Transfer) -> None:
    transfer.set("k", {"a": torch.ones(3), "b": torch.empty(3, dtype=torch.int4)})
    assert transfer.get("k")[0]["b"].dtype is torch.int4
    into = {"a": torch.zeros(3), "b": torch.empty(3, dtype=torch.int4)}
    with pytest.raises(LayoutMismatch, match="copies no int4"):
        transfer.get("k", into)
    assert not into["a"].any()


def test_who_waits_for_a_cast_waits_no_longer_than_asked(transfer: Transfer) -> None:
    transfer.set("k@1", W)
    path = transfer.roots[0] / cast_key("k@1", torch.bfloat16)
    entered, over = threading.Event(), threading.Event()

    def hold() -> None:
        with shelf.alone(path, time.monotonic() + 10):
            entered.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    began = time.monotonic()
    try:
        for call in (
            lambda: transfer.get("k@1", cast=torch.bfloat16, timeout=0.2),
            lambda: transfer.cast("k@1", torch.bfloat16, deadline=time.monotonic() + 0.2),
        ):
            with pytest.raises(TransferTimeout, match="still casts it"):
                call()
        assert time.monotonic() - began < 10
    finally:
        over.set()
        thread.join()
