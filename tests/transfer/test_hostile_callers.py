"""Invalid arguments and tensors: refused by name, before anything is read or changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from troupe.rpc import InvalidArgument
from troupe.transfer import InvalidKey, Transfer

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


@pytest.mark.parametrize("timeout", ["a", NAN, float("inf"), -float("inf"), [1]])
def test_an_infinite_timeout_is_refused(transfer: Transfer, timeout: Any) -> None:
    for call in (
        lambda: transfer.get("k", timeout=timeout),
        lambda: transfer.fetch("k", timeout=timeout),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == "timeout"


def test_arguments_of_the_wrong_type_are_refused_by_name(transfer: Transfer) -> None:
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


@pytest.mark.parametrize("given", [5, b"x", [Path("x")]])
def test_a_root_that_names_no_directory_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(InvalidArgument, match="does not name a directory") as caught:
        Transfer(given)
    assert caught.value.field == "root"
    with pytest.raises(InvalidArgument, match="does not name a directory") as caught:
        Transfer(tmp_path, fallback=given)
    assert caught.value.field == "fallback"


@pytest.mark.parametrize("peers", [5, None, [5], ["host:1"], "host:1", {"host:1": 1}])
def test_invalid_peers_are_refused(tmp_path: Path, peers: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a source to fetch from") as caught:
        Transfer(tmp_path, peers=peers)
    assert caught.value.field == "peers"
    assert "Peer" in caught.value.remedy


def test_a_root_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="TROUPE_TRANSFER_DIR"):
        Transfer(tmp_path / "file")


def test_foreign_files_between_states_are_ignored(transfer: Transfer) -> None:
    transfer.set("job/p/weights@1", W)
    for name in ("a b", "weights@2~", "x" * 220, f"weights@{2**70}", "#w#"):
        (transfer.roots[0] / "job" / "p" / name).write_bytes(b"of an editor")
    assert transfer.keys() == ["job/p/weights@1"]
    assert transfer.forget_fetched("job/") == 0


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _freed() -> torch.Tensor:
    """Return a parameter without storage, as a sharded model has between two passes."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapper(torch.Tensor):
    """A tensor around others, like DTensor."""

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
    """Some of them would be read as other memory."""
    with pytest.raises(InvalidArgument, match=r"'x' (is a .* without memory|has lost its memory)"):
        transfer.set("k", {"x": make()})
    assert not transfer.keys()


def test_tensors_inside_torch_func_transforms_are_refused(transfer: Transfer) -> None:
    def store(x: torch.Tensor) -> torch.Tensor:
        transfer.set("k", {"x": x})
        return x

    with pytest.raises(InvalidArgument, match="without memory"):
        torch.func.vmap(store)(torch.ones(3, 2))
