"""Weights from the devices that train them to inference servers, without a way through host memory.

`send_buckets` runs where the tensors are: in the worker, or in rank 0 of a gang. It talks with the
rollout service, which has the server, through a `Conversation` (over gRPC: weight_sender.py). A
server on this host gets handles of the buckets; one on another host is in a process group with the
trainer (`UpdateGroups`), which broadcasts them.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import structlog
import torch
from torch._C._distributed_c10d import TCPStore

from troupe.contracts import kinds
from troupe.rpc import Aborted
from troupe.transfer.flat_buckets import FlatBucket, JoinedGroup, flat_buckets
from troupe.transfer.formats import format_of
from troupe.v1 import trainer_pb2 as trainer_pb

log = structlog.get_logger("troupe.trainer")

# Bytes of a bucket on the device; two are there at a time.
_BUCKET_BYTES: Final = 512 << 20
# A server that is being paused, or joins a group.
_READY_SECONDS: Final = 45.0
# A server that loads a bucket from its own device does it in a fraction of this.
_SLOWEST_BYTES_PER_SECOND: Final = 50e6
# Groups whose servers are gone are dropped when there are more.
_MOST_GROUPS: Final = 64
# A group's own limit on an operation. `UpdateGroups.within` aborts it before: what NCCL times out
# itself ends the process. gloo cannot be aborted: it waits for this limit, also for a server that
# does not join, and the other ranks of a gang wait meanwhile (TROUPE_GANG_TIMEOUT_SECONDS).
_GROUP_SECONDS: Final = {"nccl": 1800.0, "gloo": 60.0}


class Conversation(Protocol):
    """What the sender of weights has to do with the caller."""

    def tell(self, event: trainer_pb.SendWeightsEvent) -> None:
        """Send an event."""
        ...

    def acknowledged(self, seconds: float) -> None:
        """Wait for the caller's acknowledgement. Raises Aborted when it left, or is too late."""
        ...


@dataclass(frozen=True)
class _OpenGroup:
    group: JoinedGroup
    # Rank 0 serves the keys by which the others find it.
    store: Any


class UpdateGroups:
    """The process groups of this process with inference servers, by name. This is rank 0."""

    def __init__(self, host: str, device: torch.device) -> None:
        """`host`: the address at which servers reach this one."""
        self._host, self._device = host, device
        self._groups: dict[str, _OpenGroup] = {}

    def of(self, wanted: trainer_pb.WantedWeights, conversation: Conversation) -> str:
        """The name of the group with a server, which is told to join unless it has. Blocking.

        Raises Aborted of kind "update_group_failed" when the server does not join.
        """
        if wanted.group in self._groups:
            return wanted.group
        while len(self._groups) >= _MOST_GROUPS:
            self.drop(next(iter(self._groups)))
        name, size = f"troupe-{secrets.token_hex(6)}", 1 + wanted.ranks
        limit = timedelta(seconds=_READY_SECONDS)
        store = TCPStore("0.0.0.0", 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        where = trainer_pb.UpdateGroup(
            name=name, host=self._host, port=store.port, backend=backend, world_size=size
        )
        conversation.tell(trainer_pb.SendWeightsEvent(group=where))
        seconds = _GROUP_SECONDS[backend]
        with self._typed(name):
            group = format_of(wanted.format).join(name, store, backend, size, seconds)
        self._groups[name] = _OpenGroup(group, store)
        log.info("an engine joined a group", group=name, ranks=wanted.ranks, backend=backend)
        return name

    def broadcast(self, name: str, tensor: torch.Tensor) -> Any:
        """Begin to send a tensor to the group; returns what to wait for. Raises RuntimeError."""
        if (found := self._groups.get(name)) is None:
            raise RuntimeError("it was ended")
        return found.group.broadcast(tensor)

    @contextlib.contextmanager
    def within(self, name: str, seconds: float) -> Iterator[None]:
        """Abort a group when the body, which may block in it, lasts longer than `seconds`.

        Raises Aborted of kind "update_group_failed" for an error of the group.
        """
        limit = threading.Timer(seconds, self.drop, (name,))
        limit.daemon = True
        limit.start()
        try:
            with self._typed(name):
                yield
        finally:
            limit.cancel()

    @contextlib.contextmanager
    def _typed(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises: DistBackendError, ...
            raise Aborted(
                f"weights were not sent: the process group {name} with the server failed: {error}",
                kind=kinds.UPDATE_GROUP_FAILED,
                remedy="Another way is taken. Check that the server's NCCL is the trainer's "
                "(`troupe doctor`), and that all ports between the hosts are open.",
            ) from error

    def drop(self, name: str) -> None:
        """End a group, also in the middle of a broadcast that nobody receives, without waiting for
        its end; from any thread. Idempotent."""
        if (left := self._groups.pop(name, None)) is not None:
            # The group is waited for by whoever lets go of it last: that must be the other thread.
            held, left = [left], None
            threading.Thread(target=_end, args=(held,), name=f"end-{name}", daemon=True).start()

    def close(self) -> None:
        """End all groups."""
        for name in list(self._groups):
            self.drop(name)


def _end(held: list[_OpenGroup]) -> None:
    left = held.pop()
    left.group.end()


def send_buckets(
    wanted: trainer_pb.WantedWeights,
    named: Iterable[tuple[str, torch.Tensor]],
    groups: UpdateGroups,
    conversation: Conversation,
) -> None:
    """Send tensors to one server. A bucket is kept until the server has loaded it; the next one is
    made meanwhile.

    Raises Aborted when the caller leaves or acknowledges too late, and, of kind
    "update_group_failed", when the process group with the server fails: the update is lost, neither
    the policy nor its gang.
    """
    group = groups.of(wanted, conversation) if wanted.way == "broadcast" else ""
    conversation.tell(trainer_pb.SendWeightsEvent(ready=trainer_pb.WeightsReady()))
    sent: tuple[FlatBucket, Any] | None = None
    try:
        conversation.acknowledged(_READY_SECONDS)
        for bucket in itertools.chain(flat_buckets(named, _BUCKET_BYTES), (None,)):
            if bucket is not None and wanted.way == "ipc" and bucket.flat.is_cuda:
                # Another process reads it. This stream alone: a broadcast that nobody receives is
                # in another one, and would be waited for without end.
                torch.cuda.current_stream(bucket.flat.device).synchronize()
            if sent is not None:
                seconds = _seconds(sent[0])
                conversation.acknowledged(seconds)
                if sent[1] is not None:
                    with groups.within(group, seconds):
                        sent[1].wait()
            if bucket is None:
                break
            conversation.tell(trainer_pb.SendWeightsEvent(bucket=_described(bucket, wanted)))
            work = None
            if group:
                with groups.within(group, _seconds(bucket)):  # the first one connects: it may block
                    work = groups.broadcast(group, bucket.flat)
            sent = bucket, work
    except BaseException:
        groups.drop(group)
        raise


def _seconds(bucket: FlatBucket) -> float:
    """The limit on one bucket's way to a server."""
    return _READY_SECONDS + bucket.flat.nbytes / _SLOWEST_BYTES_PER_SECOND


def _described(bucket: FlatBucket, wanted: trainer_pb.WantedWeights) -> trainer_pb.WeightBucket:
    found = trainer_pb.WeightBucket(dtype=bucket.dtype)
    for name, shape in bucket.shapes.items():
        found.tensors.add(name=name, shape=shape)
    if wanted.way == "ipc":
        form = format_of(wanted.format)
        found.handles.extend(form.handles(bucket) for _ in range(wanted.ranks))
    return found
