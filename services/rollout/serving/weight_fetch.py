"""Brings published weights to this host, each version once, before any engine is touched.

Engines serve the version before while the next one comes, whatever the link; then every engine of
the host takes it from this host's memory. Only that swap is exposed.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from services.chassis.transfer import HostTransfer
from troupe.rpc.errors import NotFound, TroupeError, Unavailable
from troupe.transfer import Corrupt, KeyNotFound, Transfer, TransferTimeout
from troupe.v1 import common_pb2 as pb

log = structlog.get_logger(__name__)

# Transports of what came from another host.
_REMOTE = ("ucx", "grpc")
# What publishing again can cure: it is nowhere, its bytes are damaged, or who has it is away. In
# the last case its trainer may live and hold it: then publishing again changes nothing.
_GONE = (KeyNotFound, Corrupt, TransferTimeout, Unavailable)


class WeightFetcher:
    """The weights of one policy on their way to this host."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._coming: dict[tuple[str, str], asyncio.Task[float]] = {}

    async def bring(self, ref: pb.WeightsRef) -> float:
        """Have `ref` on this host, whole; returns the seconds that it took from another one.

        0 for what is here. Who asks meanwhile waits for the same one; it goes on to its end when
        a caller is cancelled. Raises `NotFound` of kind "weights_not_found" when nobody has it
        who answers, `StorageFull`.
        """
        key = (ref.key, ref.checksum)
        task = self._coming.get(key)
        if task is None:
            task = asyncio.create_task(self._bring(ref), name=f"bring-{ref.key}")
            self._coming[key] = task
            task.add_done_callback(lambda _: self._coming.pop(key, None))
        return await asyncio.shield(task)

    async def _bring(self, ref: pb.WeightsRef) -> float:
        if isinstance(self.transfer, HostTransfer):
            self.transfer.hint(ref.key, ref.holders)
        began = time.monotonic()
        try:
            _, choice = await asyncio.to_thread(
                self.transfer.fetch, ref.key, expected_checksum=ref.checksum
            )
        except _GONE as error:
            raise gone(ref, error) from error
        if choice.transport not in _REMOTE:
            return 0.0
        seconds = time.monotonic() - began
        log.info(
            "weights are here",
            policy=ref.policy,
            version=ref.version,
            transport=choice.transport,
            reason=choice.reason,
            seconds=round(seconds, 3),
        )
        return seconds


def gone(ref: pb.WeightsRef, error: TroupeError) -> NotFound:
    """The error that has whoever trained `ref` publish it again."""
    return NotFound(
        f"{ref.key}: {error.message}",
        kind="weights_not_found",
        field=ref.policy,
        value=ref.version,
        remedy="Publish the version again.",
    )
