"""The trainer's side of a NCCL communicator, over a double of NCCL's C interface and of streams."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.waiting import PATIENCE
from troupe.transfer.nccl import ID_BYTES, Nccl, NcclGroup

CPU = torch.device("cpu")


class Call:
    """A function of the double, which notes the values of its arguments."""

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        values = [getattr(one, "value", one) for one in arguments]
        self._library.calls.append((self._name, values))
        return self._library.result(self._name, arguments)


class Library:
    """NCCL's C interface. `fails`: the call that answers an error. `joined`: when ranks have."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.fails = fails
        self.joined = threading.Event()
        self.joined.set()
        self.ncclGetErrorString = Call(self, "ncclGetErrorString")
        for name in ("GetUniqueId", "CommInitRank", "AllReduce", "Broadcast", "CommAbort"):
            setattr(self, f"nccl{name}", Call(self, f"nccl{name}"))

    def result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "ncclGetErrorString":
            return b"unhandled system error"
        if name == self.fails:
            return 2
        if name == "ncclGetUniqueId":
            ctypes.memset(arguments[0]._obj.internal, 7, ID_BYTES)
        if name == "ncclCommInitRank":
            assert self.joined.wait(PATIENCE)
            arguments[0]._obj.value = 0xC0
        return 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Streams without a GPU; the event is set once what was broadcast has arrived, or not."""
    arrived = threading.Event()
    arrived.set()
    event = SimpleNamespace(synchronize=lambda: arrived.wait(PATIENCE))
    stream = SimpleNamespace(
        cuda_stream=0x5,
        synchronize=lambda: None,
        wait_stream=lambda other: None,
        record_event=lambda: event,
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return arrived


@pytest.mark.usefixtures("streams")
def test_bytes_are_broadcast_by_rank_0_after_the_first_element_of_all() -> None:
    library = Library()
    nccl = Nccl(library)
    unique_id = nccl.unique_id()
    assert unique_id == bytes([7]) * ID_BYTES
    group = NcclGroup(nccl, unique_id, 5, CPU, PATIENCE)
    flat = torch.arange(6, dtype=torch.bfloat16)
    group.broadcast(flat).wait()
    group.end()
    group.end()
    (_, join), (_, first), (_, sent), (_, aborted) = library.calls[1:]
    assert (join[1], bytes(join[2]), join[3]) == (5, unique_id, 0)
    # ncclFloat32 is 7, ncclUint8 is 1 (nccl.h): one element by sum, then 12 bytes from rank 0.
    assert first[2:] == [1, 7, 0, 0xC0, 0x5]
    assert sent == [flat.data_ptr(), flat.data_ptr(), 12, 1, 0, 0xC0, 0x5]
    assert aborted == [0xC0]
    with pytest.raises(RuntimeError, match="ended"):
        group.broadcast(flat)


def test_a_broadcast_that_is_cut_short_is_an_error(streams: threading.Event) -> None:
    library = Library()
    group = NcclGroup(Nccl(library), bytes(ID_BYTES), 2, CPU, PATIENCE)
    streams.clear()
    sent = group.broadcast(torch.zeros(2))
    group.end()  # NCCL then ends what is under way
    streams.set()
    with pytest.raises(RuntimeError, match="middle of a broadcast"):
        sent.wait()


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("fails", ["ncclCommInitRank", "ncclAllReduce"])
def test_a_group_that_cannot_be_joined_says_why(fails: str) -> None:
    with pytest.raises(RuntimeError, match=f"{fails}: unhandled system error"):
        NcclGroup(Nccl(Library(fails)), bytes(ID_BYTES), 2, CPU, PATIENCE)


@pytest.mark.usefixtures("streams")
def test_servers_that_do_not_join_are_waited_for_until_a_deadline_and_left_later() -> None:
    library = Library()
    library.joined.clear()
    with pytest.raises(RuntimeError, match=r"within 0\.05 s"):
        NcclGroup(Nccl(library), bytes(ID_BYTES), 2, CPU, 0.05)
    library.joined.set()
    thread = next((one for one in threading.enumerate() if one.name == "join-nccl"), None)
    if thread is not None:
        thread.join(PATIENCE)
    assert library.names[-1] == "ncclCommAbort"


def test_a_torch_without_nccl_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has it")
    with pytest.raises(RuntimeError, match="no NCCL"):
        Nccl()
