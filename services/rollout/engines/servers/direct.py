"""Weights into a server from the devices that trained them, without a way through host memory.

The trainer sends buckets (`Trainer.SendWeights`), each to all servers of a wave at the same time:
on one host as handles of its device's memory (`ipc`), else in a process group of the trainer and
the servers (`broadcast`). This side has one server, tells it what comes, and acknowledges what it
has loaded. What was published in host memory is the proof as in every other way, and what is loaded
where the direct way fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from typing import Any, Final, Literal

import torch

from services.chassis.heartbeat import host_id
from services.chassis.transfer import HostTransfer
from services.rollout.engines.errors import BrokenReply, Refused, ServerGone
from services.rollout.engines.servers.http import seconds_for
from services.rollout.engines.servers.interface import InferenceServer, ServerDescription
from services.rollout.engines.servers.loaders import Loader, NewWeights, Tensors, UpdateSetting
from services.rollout.engines.servers.verification import update_failed
from troupe.contracts import kinds
from troupe.doctor.interpreters import Environment
from troupe.rpc import Aborted, DataLoss, TroupeError, Unavailable, connect
from troupe.transfer.checksum import dtype_name, dtype_of
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import trainer_pb2_grpc as trainer_grpc

log = logging.getLogger(__name__)

DirectWay = Literal["ipc", "broadcast"]
# The trainer's pass and other waves, and the rest of this one; the server still serves meanwhile.
_TURN_SECONDS: Final = 180.0
# How long the trainer may take to say who is at fault.
_VERDICT_SECONDS: Final = 10.0
_FAILURES: Final = (Refused, BrokenReply, TroupeError, TimeoutError)


class DirectLoader(Loader):
    """Through the trainer's devices where that is possible; else through another loader.

    `auto`: from a GPU to a GPU, by the way that reaches the server.
    """

    def __init__(
        self,
        other: Loader,
        server: InferenceServer,
        described: ServerDescription,
        setting: UpdateSetting,
        *,
        near: bool,
        visible: Collection[str] | None,
        environment: Environment | None,
        refused: set[DirectWay],
    ) -> None:
        """`near`: whether the server's address is this host's. `visible`: UUIDs of the GPUs that
        the server sees; None: unknown. `environment`: the packages of a launched server; None:
        unknown. `refused`: ways that the engine's servers have refused or
        died of, which are not tried again; added to here."""
        self._other, self._server, self._described = other, server, described
        self._setting, self._near, self._visible = setting, near, visible
        self._environment, self._refused = environment, refused
        # The process group that the server has joined last; empty if there is none. A trainer that
        # has dropped it names another.
        self._group = ""
        self._weights: NewWeights | None = None
        self._update: _Update | None = None
        self._direct: DirectWay | None = None

    @property
    def way(self) -> str:
        """`ipc` or `broadcast`, or the other loader's way."""
        return self._direct or self._other.way

    async def prepare(self, weights: NewWeights) -> None:
        """Prepare the other loader: it follows in the same pause if this one fails."""
        self._weights, self._direct = weights, None
        await self._other.prepare(weights)

    async def reserve(self) -> None:
        """Wait until the trainer sends; the server joins its group if need be."""
        assert self._weights is not None  # prepared
        if (way := self.chosen(self._weights.ref)) is None:
            return
        update = _Update(self._server, self._weights, way, self._described.ranks, self._group)
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                self._group = await update.begin()
        except (*_FAILURES, ServerGone) as error:
            await update.close()
            self._failed(way, error)
        except BaseException:
            await update.close()
            raise
        else:
            self._update = update

    async def reserve_ahead(self, weights: NewWeights) -> bool:
        """See `Loader.reserve_ahead`. A trainer that does not send costs nothing: the committed
        version follows, by any way."""
        if (way := self.chosen(weights.ref)) is None:
            return False
        update = _Update(self._server, weights, way, self._described.ranks, self._group)
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                self._group = await update.begin()
        except (*_FAILURES, ServerGone) as error:
            await update.close()
            log.warning("%s: nothing is loaded before its commit: %s", self._server.url, error)
            return False
        except BaseException:
            await update.close()
            raise
        self._update = update
        return True

    async def load_ahead(self) -> None:
        """See `Loader.load_ahead`."""
        update = self._update
        assert update is not None  # reserved
        try:
            await update.run()
        except _FAILURES as error:
            self._failed(update.way, error)
            raise update_failed(update.ref, str(error)) from error
        except ServerGone:
            self._refused.add(update.way)
            raise
        self._direct = update.way

    async def load(self, server: InferenceServer, *, flush: bool) -> bool:
        """Load from the trainer's devices, or by the other loader."""
        update = self._update
        if update is not None:
            try:
                await update.run()
                self._direct = update.way
                return False
            except _FAILURES as error:
                # Every tensor is loaded once more, so that none of a part remains.
                self._failed(update.way, error)
            except ServerGone:
                self._refused.add(update.way)
                raise
            finally:
                await self.release()
        return await self._other.load(server, flush=flush)

    async def loaded(self) -> None:
        """Free what the other loader had prepared."""
        self._weights = None
        await self._other.loaded()

    async def release(self) -> None:
        """Let go of the trainer. Repeatable."""
        update, self._update = self._update, None
        if update is not None:
            await update.close()

    async def put(self, server: InferenceServer, tensors: Tensors, name: str) -> None:
        """By the other loader."""
        await self._other.put(server, tensors, name)

    def takes_from_trainer(self, ref: common_pb.WeightsRef) -> bool:
        """See `Loader.takes_from_trainer`."""
        return self.chosen(ref) is not None

    def chosen(self, ref: common_pb.WeightsRef) -> DirectWay | None:
        """The direct way of `ref` into this server; None if there is none."""
        source, described = ref.trained_on, self._described
        forced = self._setting in ("ipc", "broadcast")
        gpus = source.device == described.device == "cuda"
        if not source.trainer or not (forced or (gpus and self._setting == "auto")):
            return None
        here = self._near and source.host_id == host_id() and self._opens_handles(source)
        way: DirectWay = "ipc" if here and self._setting != "broadcast" else "broadcast"
        able = way in described.ways and described.names_versions
        if not able or self._setting not in ("auto", way) or way in self._refused:
            return None
        packages = self._server.group_packages
        if way == "broadcast" and (why := other_versions(source, self._environment, packages)):
            self._refused.add(way)
            url, other = self._server.url, self._other.way
            log.warning("%s: no weights by broadcast, but by %s: %s", url, other, why)
            return None
        return way

    def _opens_handles(self, source: common_pb.DeviceWeights) -> bool:
        """Whether the server can open handles of the trainer's memory. One that does not see the
        trainer's GPU ends when it tries: CUDA numbers the devices that a process sees."""
        if source.device != "cuda":
            return True  # handles of shared memory
        if self._visible is None or not source.device_uuid:
            return self._setting == "ipc"  # whoever attaches the server and asks for it knows
        return source.device_uuid in self._visible

    def _failed(self, way: DirectWay, error: BaseException) -> None:
        self.fallbacks += 1
        group_failed = isinstance(error, TroupeError) and error.kind == kinds.UPDATE_GROUP_FAILED
        if isinstance(error, Refused) or group_failed:
            self._refused.add(way)
        url, other = self._server.url, self._other.way
        log.warning("%s: no weights by %s, but by %s: %s", url, way, other, error)


def other_versions(
    source: common_pb.DeviceWeights, server: Environment | None, packages: Collection[str]
) -> str:
    """Say why a trainer and a server form no process group: some of `packages` ("torch" and, on
    GPUs, "NCCL") have other versions. Empty: they do, or it is unknown."""
    if server is None:
        return ""
    pairs = {"torch": (source.torch, server.packages.get("torch", ""))}
    if source.device == "cuda":
        pairs["NCCL"] = (source.nccl, server.nccl or "")
    pairs = {name: both for name, both in pairs.items() if name in packages}
    # Builds of one version ("2.13.0+cpu") understand each other.
    bare = {what: [one.partition("+")[0] for one in both] for what, both in pairs.items()}
    if not any(all(both) and len(set(both)) > 1 for both in bare.values()):
        return ""
    trainer, engine = (
        " and ".join(f"{what} {both[side] or 'unknown'}" for what, both in pairs.items())
        for side in (0, 1)
    )
    return (
        f"the trainer has {trainer}, the server's environment {engine}, and a process group needs "
        "the same; install the release that docs/gpus.md names"
    )


class _Update:
    """A direct update of one server: the trainer's stream, and the server's calls for it."""

    def __init__(
        self, server: InferenceServer, weights: NewWeights, way: DirectWay, ranks: int, group: str
    ) -> None:
        """`group`: the one that the server has joined; empty if none."""
        self.way, self.ref = way, weights.ref
        self._server, self._weights = server, weights
        self._wanted = trainer_pb.WantedWeights(
            job_id=weights.ref.job_id,
            policy=weights.ref.policy,
            version=weights.ref.version,
            checksum=weights.ref.checksum,
            way=way,
            ranks=ranks,
            group=group,
            format=server.bucket_format,
            step_result=weights.ref.trained_on.step_result if weights.ahead else "",
            wave=trainer_pb.UpdateWave(
                wave_id=weights.wave.wave_id,
                servers=weights.wave.servers,
                workers=weights.wave.workers,
            ),
        )
        settings = weights.source.client if isinstance(weights.source, HostTransfer) else None
        self._channel = connect(weights.ref.trained_on.trainer, settings)
        # None ends them.
        self._messages: asyncio.Queue[trainer_pb.SendWeightsRequest | None] = asyncio.Queue()
        self._call: Any = None
        self._stream: Any = None
        # Names that have not come yet.
        self._missing = set(weights.tensors)

    async def begin(self) -> str:
        """Wait until the trainer is ready; returns the group of trainer and servers."""
        self._messages.put_nowait(trainer_pb.SendWeightsRequest(wanted=self._wanted))
        stub = trainer_grpc.TrainerStub(self._channel)
        self._call = stub.SendWeights(self._outgoing())
        self._stream = aiter(self._call)
        group = self._wanted.group
        while True:
            event = await self._next()
            if event.HasField("ready"):
                return group
            if group:  # the trainer has dropped it, or is another
                with contextlib.suppress(Refused):
                    await self._server.leave_group(group)
            group = self._wanted.group = event.group.name
            await self._server.join_group(event.group)

    async def run(self) -> None:
        """Have the server load all buckets; it is paused."""
        async with self._server.updating():
            self._acknowledge()
            async with asyncio.timeout(seconds_for(self._weights.num_bytes)):
                while self._missing:
                    event = await self._next()
                    self._check(event.bucket)
                    try:
                        await self._load(event.bucket)
                    except (Refused, BrokenReply) as error:
                        if self.way == "broadcast":
                            await self._ask_whose_fault(error)
                        raise
                    self._acknowledge()
                await self._end()

    async def close(self) -> None:
        """Leave the trainer. Repeatable."""
        self._messages.put_nowait(None)
        if self._call is not None:
            self._call.cancel()
        await self._channel.close(None)

    async def _load(self, bucket: trainer_pb.WeightBucket) -> None:
        size = _num_bytes(bucket)
        if self.way == "ipc":
            await self._server.load_handles(bucket, size)
        else:
            await self._server.load_broadcast(self._wanted.group, bucket, size)

    async def _ask_whose_fault(self, error: Refused | BrokenReply) -> None:
        """Raise the trainer's error, which says whether this server is at fault or another one of
        its group. Return if it says nothing."""
        failed = trainer_pb.WeightsFailed(reason=str(error))
        self._messages.put_nowait(trainer_pb.SendWeightsRequest(failed=failed))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VERDICT_SECONDS):
                await self._next()

    def _check(self, bucket: trainer_pb.WeightBucket) -> None:
        """Raise DataLoss unless just these tensors were published and have not come yet."""
        published = self._weights.tensors
        for one in bucket.tensors:
            known = one.name in self._missing
            if known:
                tensor = published[one.name]
                dtype = dtype_name(tensor.dtype)
                known = (list(tensor.shape), dtype) == (list(one.shape), bucket.dtype)
            if not known:
                raise DataLoss(
                    f"the trainer sent {one.name} as {bucket.dtype} {list(one.shape)}, which is "
                    "not what it has published",
                    kind="weights_mismatch",
                )
            self._missing.discard(one.name)

    def _acknowledge(self) -> None:
        message = trainer_pb.SendWeightsRequest(acknowledged=trainer_pb.WeightsAcknowledged())
        self._messages.put_nowait(message)

    async def _next(self) -> trainer_pb.SendWeightsEvent:
        try:
            event: trainer_pb.SendWeightsEvent = await anext(self._stream)
        except StopAsyncIteration as error:
            raise Aborted("the trainer sent less than it has published") from error
        return event

    async def _end(self) -> None:
        """Raise unless the trainer has no more to send."""
        with contextlib.suppress(StopAsyncIteration):
            await anext(self._stream)
            raise Unavailable("the trainer sent more than it has published")

    async def _outgoing(self) -> AsyncIterator[trainer_pb.SendWeightsRequest]:
        while (message := await self._messages.get()) is not None:
            yield message


def _num_bytes(bucket: trainer_pb.WeightBucket) -> int:
    size = dtype_of(bucket.dtype).itemsize
    return sum(int(torch.Size(one.shape).numel()) * size for one in bucket.tensors)
