"""Sending weights from a worker's devices over gRPC: one server at a time, between passes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from services.trainer.binding import PolicyBinding
from services.trainer.compute import Compute
from services.trainer.sending import UpdateGroups
from troupe.rpc import Aborted, FailedPrecondition, InvalidArgument
from troupe.transfer.formats import FORMATS
from troupe.v1 import trainer_pb2 as trainer_pb

WAYS: Final = ("ipc", "broadcast")


class WeightSender:
    """Sends weights of this worker's policies to inference servers."""

    def __init__(self, compute: Compute, host: str) -> None:
        """`host`: the address at which servers reach this one."""
        self._compute = compute
        self._groups = UpdateGroups(host, compute.device)

    async def serve(
        self,
        binding: PolicyBinding,
        wanted: trainer_pb.WantedWeights,
        messages: AsyncIterator[trainer_pb.SendWeightsRequest],
    ) -> AsyncGenerator[trainer_pb.SendWeightsEvent, None]:
        """The events of one update. Raises as `send_buckets`, and FailedPrecondition of kind
        "weights_moved_on"."""
        if wanted.way not in WAYS or wanted.ranks < 1:
            field = "ranks" if wanted.way in WAYS else "way"
            raise InvalidArgument(
                f"there is none of {WAYS} to at least one rank",
                field=field,
                value=getattr(wanted, field),
            )
        if wanted.format not in FORMATS:
            raise InvalidArgument(
                "this trainer cannot encode tensors in that format",
                field="format",
                value=wanted.format,
                remedy=f"Known: {', '.join(FORMATS)}. Run the same release of Troupe everywhere.",
            )
        talk = _Stream()
        reading = asyncio.create_task(talk.read(messages))
        work = asyncio.create_task(self._compute.hold(self._send, binding, wanted, talk))
        work.add_done_callback(lambda _: talk.events.put_nowait(None))
        try:
            while (event := await talk.events.get()) is not None:
                yield event
            await work
        finally:
            talk.left.set()
            for task in (reading, work):
                task.cancel()

    def close(self) -> None:
        """End all groups with servers, without waiting for their end."""
        self._groups.close()

    def _send(
        self, binding: PolicyBinding, wanted: trainer_pb.WantedWeights, talk: _Stream
    ) -> None:
        """In the compute thread: no weights change meanwhile."""
        if talk.left.is_set():
            return
        if not binding.versions.holds(wanted.version, wanted.checksum):
            raise FailedPrecondition(
                f"the devices hold another version of policy {wanted.policy} than {wanted.version}",
                kind="weights_moved_on",
                field="version",
                value=wanted.version,
                remedy="Load the published weights from host memory.",
            )
        binding.learner.send(wanted, self._groups, talk)


class _Stream:
    """A `Conversation` over gRPC: the compute thread talks, the event loop carries."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[trainer_pb.SendWeightsEvent | None] = asyncio.Queue()
        self.left = threading.Event()
        # True for each acknowledgement, False when the caller has left.
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    async def read(self, messages: AsyncIterator[trainer_pb.SendWeightsRequest]) -> None:
        """Take acknowledgements until the caller leaves."""
        try:
            async for message in messages:
                if message.HasField("acknowledged"):
                    self._answers.put(True)
        finally:
            self.left.set()
            self._answers.put(False)

    def tell(self, event: trainer_pb.SendWeightsEvent) -> None:
        """See `Conversation`."""
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def acknowledged(self, seconds: float) -> None:
        """See `Conversation`."""
        try:
            if self._answers.get(timeout=seconds):
                return
            reason = "the rollout service gave the update up"
        except queue.Empty:
            reason = f"nothing was acknowledged within {seconds:.0f} s"
        raise Aborted(f"weights were not sent: {reason}", kind="update_given_up")
