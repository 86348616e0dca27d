"""A NCCL communicator of this process (rank 0) and processes that have no torch group with it.

vLLM's workers join by NCCL's own unique id, not at a store of torch.distributed (vLLM 0.32,
distributed/weight_transfer/nccl_common.py). So this calls NCCL itself, the library that torch has
brought, through its C interface (nccl.h), which has been stable since NCCL 2.0.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import torch

from troupe.transfer.flat_buckets import JoinedGroup

ID_BYTES: Final = 128
# Of nccl.h: ncclDataType_t and ncclRedOp_t.
_UINT8: Final = 1
_FLOAT32: Final = 7
_SUM: Final = 0


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Nccl:
    """NCCL's C interface: what a broadcast from rank 0 needs. Methods raise RuntimeError."""

    def __init__(self, library: Any = None) -> None:
        """`library`: NCCL as ctypes has loaded it; None: torch's."""
        try:
            self._library = ctypes.CDLL("libnccl.so.2") if library is None else library
        except OSError as error:
            raise RuntimeError(f"torch has no NCCL: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def unique_id(self) -> bytes:
        """Make the id of a new communicator."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, size: int) -> ctypes.c_void_p:
        """Join the communicator as rank 0, on the current device. Blocks until all `size` ranks
        have."""
        comm = ctypes.c_void_p()
        one = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(comm), ctypes.c_int(size), one, ctypes.c_int(0))
        return comm

    def all_reduce(self, tensor: torch.Tensor, comm: ctypes.c_void_p, stream: int) -> None:
        """Sum a float32 tensor over the ranks, in place, on `stream`."""
        at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        kind = ctypes.c_int(_FLOAT32), ctypes.c_int(_SUM)
        self._call("ncclAllReduce", at, at, count, *kind, comm, ctypes.c_void_p(stream))

    def broadcast(self, tensor: torch.Tensor, comm: ctypes.c_void_p, stream: int) -> None:
        """Send a contiguous tensor's bytes to all ranks, on `stream`."""
        at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        kind = ctypes.c_int(_UINT8), ctypes.c_int(0)
        self._call("ncclBroadcast", at, at, count, *kind, comm, ctypes.c_void_p(stream))

    def abort(self, comm: ctypes.c_void_p) -> None:
        """End a communicator, also in the middle of a broadcast that nobody receives."""
        self._call("ncclCommAbort", comm)

    def _call(self, name: str, *arguments: Any) -> None:
        if result := getattr(self._library, name)(*arguments):
            why = self._library.ncclGetErrorString(ctypes.c_int(result))
            raise RuntimeError(f"{name}: {why.decode()}")


class NcclGroup(JoinedGroup):
    """A communicator of the trainer and the ranks of servers, which `unique_id` was given to."""

    def __init__(
        self, nccl: Nccl, unique_id: bytes, size: int, device: torch.device, seconds: float
    ) -> None:
        """Join it on `device`. Raises RuntimeError, also when the others have not joined within
        `seconds`: the thread that waits for them then stays behind, since NCCL cannot end it."""
        self._nccl, self._device = nccl, device
        self._comm: ctypes.c_void_p | None = None
        self._lock = threading.Lock()
        outcome: list[Exception | None] = []
        given_up = threading.Event()

        def join() -> None:
            try:
                comm = self._joined(unique_id, size)
                with self._lock:
                    if given_up.is_set():
                        nccl.abort(comm)
                    else:
                        self._comm = comm
            except Exception as error:
                outcome.append(error)

        waiting = threading.Thread(target=join, name="join-nccl", daemon=True)
        waiting.start()
        waiting.join(seconds)
        with self._lock:
            if self._comm is None:
                given_up.set()
        if self._comm is None:
            raise RuntimeError(
                str(outcome[0]) if outcome else f"not all servers joined within {seconds:g} s"
            )

    def _joined(self, unique_id: bytes, size: int) -> ctypes.c_void_p:
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            comm = self._nccl.join(unique_id, size)
            # The others send a first element at once, to connect, and wait for this rank's.
            with torch.cuda.stream(self._stream):
                first = torch.zeros(1, device=self._device)
                self._nccl.all_reduce(first, comm, self._stream.cuda_stream)
            self._stream.synchronize()
        return comm

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """See `JoinedGroup.broadcast`. Raises RuntimeError once the group has ended."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._lock:
            if self._comm is None:
                raise RuntimeError("it was ended")
            self._nccl.broadcast(tensor, self._comm, self._stream.cuda_stream)
        tensor.record_stream(self._stream)
        return _Sent(self, self._stream.record_event())

    @property
    def ended(self) -> bool:
        """Whether the group has ended, perhaps in the middle of a broadcast."""
        return self._comm is None

    def end(self) -> None:
        """See `JoinedGroup.end`."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            self._nccl.abort(comm)


class _Sent:
    """A broadcast under way."""

    def __init__(self, group: NcclGroup, event: Any) -> None:
        self._group, self._event = group, event

    def wait(self) -> None:
        """Wait until all have received. Raises RuntimeError if the group was ended before."""
        self._event.synchronize()
        if self._group.ended:
            raise RuntimeError("it was ended in the middle of a broadcast")
