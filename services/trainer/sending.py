"""Weights from a trainer's device to inference servers, without a way through their host's memory.

A `SendingRound` sends one version to all servers of a wave, and makes each bucket once. A server on
this host gets handles of the buckets; all others are in one process group with the trainer
(`UpdateGroups`), which broadcasts them. The rollout services, which have the servers, talk with the
trainer over gRPC (weight_sender.py).
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import structlog
import torch
from torch._C._distributed_c10d import TCPStore

from troupe.contracts import kinds
from troupe.rpc import Aborted, TroupeError
from troupe.transfer.flat_buckets import FlatBucket, JoinedGroup, Meeting, flat_buckets
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
# does not join.
_GROUP_SECONDS: Final = {"nccl": 1800.0, "gloo": 60.0}
# The group breaks for all servers at once; the callers of those that are gone say so a little
# later. All of them wait meanwhile, paused.
_BLAME_SECONDS: Final = 1.0


@dataclass(frozen=True)
class _OpenGroup:
    group: JoinedGroup
    # Rank 0 serves the keys by which the others find it.
    store: Any
    # Ranks of each server, in their order.
    ranks: tuple[int, ...]


class UpdateGroups:
    """The process groups of this process with inference servers, by name. This is rank 0."""

    def __init__(self, host: str, device: torch.device) -> None:
        """`host`: the address at which servers reach this one."""
        self._host, self._device = host, device
        self._groups: dict[str, _OpenGroup] = {}

    def holds(self, name: str, ranks: Sequence[int]) -> bool:
        """Return whether the servers of the group `name` have these ranks."""
        found = self._groups.get(name)
        return found is not None and found.ranks == tuple(ranks)

    def make(self, name: str, receivers: Sequence[Receiver]) -> None:
        """Make a group with the servers of `receivers`, which are told to join. Blocking.

        Raises Aborted of kind "update_group_failed" when a server does not join.
        """
        while len(self._groups) >= _MOST_GROUPS:
            self.drop(next(iter(self._groups)))
        ranks = tuple(one.wanted.ranks for one in receivers)
        size = 1 + sum(ranks)
        limit = timedelta(seconds=_READY_SECONDS)
        store = TCPStore("0.0.0.0", 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        form = format_of(receivers[0].wanted.format)
        with self._typed(name):
            unique_id = form.unique_id()
        where = trainer_pb.UpdateGroup(
            name=name,
            host=self._host,
            port=store.port,
            backend=backend,
            world_size=size,
            unique_id=unique_id,
        )
        for one, offset in zip(receivers, itertools.accumulate(ranks, initial=1), strict=False):
            where.rank_offset = offset
            one.tell(trainer_pb.SendWeightsEvent(group=where))
        meeting = Meeting(
            name,
            store,
            backend,
            size,
            self._device,
            seconds=_GROUP_SECONDS[backend],
            join_seconds=_READY_SECONDS,
            unique_id=unique_id,
        )
        with self._typed(name):
            group = form.join(meeting)
        self._groups[name] = _OpenGroup(group, store, ranks)
        log.info("engines joined a group", group=name, ranks=ranks, backend=backend)

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
        except (RuntimeError, ValueError) as error:
            # What torch.distributed raises: DistBackendError, ...; ValueError for an ended group.
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


class Receiver:
    """An inference server that a version is sent to, as its rollout service speaks for it."""

    def __init__(
        self,
        wanted: trainer_pb.WantedWeights,
        tell: Callable[[trainer_pb.SendWeightsEvent | None], None],
    ) -> None:
        """`tell`: sends an event to the rollout service, or, for None, that there is an `error`;
        called in any thread."""
        self.wanted, self.tell = wanted, tell
        # Number of events that were acknowledged: `ready`, then each bucket.
        self.acknowledged = 0
        # What the server said when it did not load a bucket; empty if it loads.
        self.failure = ""
        # Whether the caller has left, or was too late.
        self.gone = ""
        # Why the version was not sent; None while it is sent, and when all was sent.
        self.error: TroupeError | None = None

    def refuse(self, error: TroupeError) -> None:
        """Send nothing more, because of `error`."""
        self.error = error
        self.tell(None)

    @property
    def grouped(self) -> bool:
        """Whether the server is in a process group with the trainer."""
        return self.wanted.way == "broadcast"

    @property
    def takes(self) -> bool:
        """Whether the server still loads what it is sent."""
        return not (self.failure or self.gone or self.error)


class SendingRound:
    """The transfer of one version to all servers of a wave; each bucket is made once.

    `send` blocks, in one thread; the other methods are called in any thread, whenever a rollout
    service has said something.
    """

    def __init__(self, groups: UpdateGroups) -> None:
        self.receivers: list[Receiver] = []
        self._groups = groups
        self._group = ""
        self._changed = threading.Condition()
        self._over = False

    def acknowledged(self, receiver: Receiver) -> None:
        """Note that a server is paused, or has loaded a bucket."""
        with self._changed:
            receiver.acknowledged += 1
            self._changed.notify_all()

    def failed(self, receiver: Receiver, reason: str) -> None:
        """Note that a server did not load a bucket."""
        self._out(receiver, failure=reason or "the server failed")

    def left(self, receiver: Receiver) -> None:
        """Note that a rollout service has left. Repeatable; of no effect once all was sent."""
        self._out(receiver, gone="the rollout service gave the update up")

    def _out(self, receiver: Receiver, *, failure: str = "", gone: str = "") -> None:
        with self._changed:
            if self._over:
                return
            receiver.failure, receiver.gone = receiver.failure or failure, receiver.gone or gone
            self._changed.notify_all()
        if receiver.grouped and receiver in self.receivers:
            # It no longer receives, so that the broadcast under way may never end.
            self._groups.drop(self._group)

    def send(self, named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
        """Send `named` to all servers. A bucket is kept on the device until they have loaded it;
        the next one is made meanwhile.

        A server that leaves, fails or is too late gets an `error`, as do, if it was in the process
        group, all others there: that group is lost, and no bucket would reach them. The rest gets
        everything. `named` is read only as long as there is a server that takes it.
        """
        try:
            self._send(named, device)
        finally:
            with self._changed:
                self._over = True

    def _send(self, named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
        self._form_group()
        for receiver in self._taking():
            receiver.tell(trainer_pb.SendWeightsEvent(ready=trainer_pb.WeightsReady()))
        self._settle(1, _READY_SECONDS)
        sent: tuple[FlatBucket, Any] | None = None
        buckets = flat_buckets(named, _BUCKET_BYTES, device) if self._taking() else iter(())
        for number, bucket in enumerate(itertools.chain(buckets, (None,)), start=1):
            if sent is not None:
                self._settle(number, _seconds(sent[0]))
                if sent[1] is not None:
                    self._in_group(sent[0], sent[1].wait)
            if bucket is None or not self._taking():
                break
            sent = bucket, self._hand_out(bucket)

    def _taking(self, *, grouped: bool | None = None) -> list[Receiver]:
        return [one for one in self.receivers if one.takes and (grouped in (None, one.grouped))]

    def _form_group(self) -> None:
        """Have the servers that need a process group with this process in the same one."""
        joining = self._taking(grouped=True)
        if not joining:
            return
        known = {one.wanted.group for one in joining}
        if len(known) == 1 and self._groups.holds(
            name := known.pop(), [one.wanted.ranks for one in joining]
        ):
            self._group = name
            return
        for name in known:  # its servers leave it
            self._groups.drop(name)
        try:
            self._group = f"troupe-{secrets.token_hex(6)}"
            self._groups.make(self._group, joining)
        except Aborted as error:
            self._lose_group(error)

    def _hand_out(self, bucket: FlatBucket) -> Any:
        """Tell all servers of a bucket, and begin to broadcast it; return what to wait for."""
        described = trainer_pb.WeightBucket(dtype=bucket.dtype)
        for name, shape in bucket.shapes.items():
            described.tensors.add(name=name, shape=shape)
        near = self._taking(grouped=False)
        if near and bucket.flat.is_cuda:
            # Other processes read it. This stream alone: a broadcast that nobody receives is in
            # another one, and would be waited for without end.
            torch.cuda.current_stream(bucket.flat.device).synchronize()
        for receiver in near:
            own = trainer_pb.WeightBucket()
            own.CopyFrom(described)
            form = format_of(receiver.wanted.format)
            own.handles.extend(form.handles(bucket) for _ in range(receiver.wanted.ranks))
            receiver.tell(trainer_pb.SendWeightsEvent(bucket=own))
        if not (far := self._taking(grouped=True)):
            return None
        for receiver in far:
            receiver.tell(trainer_pb.SendWeightsEvent(bucket=described))
        # The first one connects: it may block.
        return self._in_group(bucket, lambda: self._groups.broadcast(self._group, bucket.flat))

    def _in_group(self, bucket: FlatBucket, call: Callable[[], Any]) -> Any:
        """Return the result of a call that may block in the group; None if the group is lost."""
        if not self._taking(grouped=True):
            return None
        try:
            with self._groups.within(self._group, _seconds(bucket)):
                return call()
        except Aborted as error:
            self._lose_group(error)
            return None

    def _settle(self, number: int, seconds: float) -> None:
        """Wait until every server has acknowledged `number` events; later ones are out."""

        def missing() -> list[Receiver]:
            return [one for one in self._taking() if one.acknowledged < number]

        def settled() -> bool:
            grouped = [one for one in self.receivers if one.grouped and one.error is None]
            broken = not all(one.takes for one in grouped)
            return not [one for one in missing() if not (broken and one.grouped)]

        with self._changed:
            self._changed.wait_for(settled, seconds)
            if not settled():
                for receiver in missing():
                    receiver.gone = f"nothing was acknowledged within {seconds:.0f} s"
        self._judge()

    def _judge(self) -> None:
        """Give those that are out their errors."""
        if any(one.grouped and not one.takes and one.error is None for one in self.receivers):
            self._lose_group(None)
        for one in self.receivers:
            if not one.takes and one.error is None:
                why = one.gone or one.failure
                one.refuse(Aborted(f"weights were not sent: {why}", kind="update_given_up"))

    def _lose_group(self, error: Aborted | None) -> None:
        """End the group. Servers at fault get its error; the others get one that names them.

        Servers that are gone are at fault; else the ones that failed to load; else all, since the
        group never worked.
        """
        self._groups.drop(self._group)
        grouped = [one for one in self.receivers if one.grouped and one.error is None]
        with self._changed:
            self._changed.wait_for(lambda: any(one.gone for one in grouped), _BLAME_SECONDS)
            guilty = [one for one in grouped if one.gone]
            guilty = guilty or [one for one in grouped if one.failure] or grouped
            why = "; ".join(filter(None, (one.gone or one.failure for one in guilty)))
        if error is None or why:
            error = Aborted(
                f"weights were not sent in the process group {self._group}: {why}",
                kind=kinds.UPDATE_GROUP_FAILED,
                remedy="Another way is taken.",
            )
        innocent = Aborted(
            f"weights were not sent: another server of the process group failed: {why}",
            kind=kinds.UPDATE_PEER_FAILED,
            remedy="Another way is taken this once.",
        )
        for one in grouped:
            one.refuse(error if one in guilty else innocent)
        log.warning("a process group with engines was lost", group=self._group, reason=why)


def _seconds(bucket: FlatBucket) -> float:
    """The limit on one bucket's way to a server."""
    return _READY_SECONDS + bucket.flat.nbytes / _SLOWEST_BYTES_PER_SECOND
