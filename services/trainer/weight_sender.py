"""Sending weights from a worker's device over gRPC, to all servers of a wave together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import structlog

from services.trainer.binding import PolicyBinding
from services.trainer.compute import Compute
from services.trainer.sending import Receiver, SendingRound, UpdateGroups
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError
from troupe.transfer.formats import FORMATS
from troupe.v1 import trainer_pb2 as trainer_pb

log = structlog.get_logger("troupe.trainer")

WAYS: Final = ("ipc", "broadcast")
# How long the first server of a wave waits for the others, serving meanwhile: what they do before
# takes about as long on all hosts.
_ASSEMBLY_SECONDS: Final = 10.0


class WeightSender:
    """Sends weights of this worker's policies to inference servers, in rounds of one wave each."""

    def __init__(self, compute: Compute, host: str) -> None:
        """`host`: the address at which servers reach this one."""
        self._compute = compute
        self._groups = UpdateGroups(host, compute.device)
        # Rounds that wait for further servers, by policy, version and format.
        self._open: dict[tuple[str, ...], _Assembly] = {}
        # The last version of each policy, and how many waves came for it: of the rollout workers
        # that update a policy some may have no server that is sent to.
        self._came: dict[tuple[str, str], tuple[int, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A device sends one version at a time.
        self._sending = asyncio.Lock()

    async def serve(
        self,
        binding: PolicyBinding,
        wanted: trainer_pb.WantedWeights,
        messages: AsyncIterator[trainer_pb.SendWeightsRequest],
    ) -> AsyncGenerator[trainer_pb.SendWeightsEvent, None]:
        """The events of one server's update. Raises as `SendingRound.send` says, FailedPrecondition
        of kind "weights_moved_on", and the transfer layer's errors."""
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
        versions = binding.versions
        published = versions.made and versions.learner.gathers
        own = not (wanted.step_result or published)
        if own and not versions.may_hold(wanted.version, wanted.checksum):
            # Said before the compute thread is free: the server waits for it.
            raise _moved_on(wanted)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[trainer_pb.SendWeightsEvent | None] = asyncio.Queue()
        receiver = Receiver(wanted, lambda e: _put(loop, events, e))
        assembly = self._joined(binding, receiver)
        reading = asyncio.create_task(_read(assembly.round, receiver, messages))
        assembly.ended.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            if receiver.error is not None:  # others may still be sent to
                raise receiver.error
            await assembly.ended
        finally:
            assembly.round.left(receiver)
            reading.cancel()

    def close(self) -> None:
        """End all groups with servers, without waiting for their end."""
        for task in self._tasks:
            task.cancel()
        self._groups.close()

    def _joined(self, binding: PolicyBinding, receiver: Receiver) -> _Assembly:
        """Return the round that a server takes part in."""
        wanted = receiver.wanted
        key = (
            *(wanted.job_id, wanted.policy, str(wanted.version)),
            *(wanted.checksum or wanted.step_result, wanted.format),
        )
        assembly = self._open.get(key)
        if assembly is None:
            assembly = self._open[key] = _Assembly(SendingRound(self._groups))
            task = asyncio.create_task(self._run(key, assembly, binding, wanted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        _, usual = self._came.get((wanted.job_id, wanted.policy), (0, None))
        assembly.add(receiver, usual)
        return assembly

    async def _run(
        self,
        key: tuple[str, ...],
        assembly: _Assembly,
        binding: PolicyBinding,
        wanted: trainer_pb.WantedWeights,
    ) -> None:
        """Wait for the servers of a round, then send."""
        try:
            try:
                async with asyncio.timeout(_ASSEMBLY_SECONDS):
                    await assembly.complete.wait()
            except TimeoutError:
                log.info("a wave is not complete", policy=wanted.policy, waves=assembly.count)
            async with self._sending:  # others may join until it is this round's turn
                del self._open[key]
                self._note(wanted, assembly.count)
                if wanted.step_result:
                    await asyncio.to_thread(self._send_stepped, binding, wanted, assembly.round)
                elif binding.learner.gathers:
                    await asyncio.to_thread(self._send_published, binding, wanted, assembly.round)
                else:
                    await self._compute.hold(self._send_own, binding, wanted, assembly.round)
            assembly.ended.set_result(None)
        except BaseException as error:
            if self._open.get(key) is assembly:
                del self._open[key]
            if isinstance(error, asyncio.CancelledError):
                assembly.ended.cancel()
            else:
                assembly.ended.set_exception(error)
            if not isinstance(error, TroupeError):
                raise

    def _note(self, wanted: trainer_pb.WantedWeights, waves: int) -> None:
        policy = (wanted.job_id, wanted.policy)
        version, before = self._came.get(policy, (wanted.version, 0))
        # Some may have come late, and make a round of their own.
        self._came[policy] = wanted.version, waves + (before if version == wanted.version else 0)

    def _send_own(
        self, binding: PolicyBinding, wanted: trainer_pb.WantedWeights, round_: SendingRound
    ) -> None:
        """Send the learner's tensors. In the compute thread: no weights change meanwhile."""
        if not binding.versions.holds(wanted.version, wanted.checksum):
            raise _moved_on(wanted)
        round_.send(binding.learner.published().items(), self._compute.device)

    def _send_stepped(
        self, binding: PolicyBinding, wanted: trainer_pb.WantedWeights, round_: SendingRound
    ) -> None:
        """Send the weights of a step that is being published in the compute thread."""
        with binding.versions.uncommitted(wanted.step_result) as tensors:
            round_.send(tensors.items(), self._compute.device)

    def _send_published(
        self, binding: PolicyBinding, wanted: trainer_pb.WantedWeights, round_: SendingRound
    ) -> None:
        """Send what was gathered for publication: the ranks of a gang gather a version once, and
        go on training meanwhile."""
        published = binding.versions.published(wanted.version, wanted.checksum)
        round_.send(published.items(), self._compute.device)


class _Assembly:
    """A round, and the waves that have come for it."""

    def __init__(self, round_: SendingRound) -> None:
        self.round = round_
        self.complete = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieved, in case that no caller is left.
        self.ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        # By wave: servers that have not come yet.
        self._missing: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Number of waves: one for each rollout worker."""
        return len(self._missing)

    def add(self, receiver: Receiver, usual: int | None) -> None:
        """Add a server. `usual`: number of waves that came for the version before."""
        wave = receiver.wanted.wave
        self.round.receivers.append(receiver)
        self._missing[wave.wave_id] = self._missing.get(wave.wave_id, wave.servers) - 1
        workers = min(wave.workers, wave.workers if usual is None else usual)
        if len(self._missing) >= workers and max(self._missing.values()) <= 0:
            self.complete.set()


def _moved_on(wanted: trainer_pb.WantedWeights) -> FailedPrecondition:
    return FailedPrecondition(
        f"the devices hold another version of policy {wanted.policy} than {wanted.version}",
        kind="weights_moved_on",
        field="version",
        value=wanted.version,
        remedy="Load the published weights from host memory.",
    )


def _put(
    loop: asyncio.AbstractEventLoop,
    events: asyncio.Queue[trainer_pb.SendWeightsEvent | None],
    event: trainer_pb.SendWeightsEvent | None,
) -> None:
    loop.call_soon_threadsafe(events.put_nowait, event)


async def _read(
    round_: SendingRound,
    receiver: Receiver,
    messages: AsyncIterator[trainer_pb.SendWeightsRequest],
) -> None:
    """Pass on what a rollout service says, until it leaves."""
    try:
        async for message in messages:
            if message.HasField("acknowledged"):
                round_.acknowledged(receiver)
            elif message.HasField("failed"):
                round_.failed(receiver, message.failed.reason)
    finally:
        round_.left(receiver)
