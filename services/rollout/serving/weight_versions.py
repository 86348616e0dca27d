"""Weight versions of one policy on a rollout worker: the version that draws turns, and its bytes.

`TargetVersion` admits versions: it decides whether a newly published version becomes the policy's
target, and whether an engine may take turns with its version. `WeightFetcher` brings a version's
bytes to this host before any engine changes: engines serve the former version during the transfer,
over any link, and then load from this host's memory. Only that load is exposed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import structlog

from services.chassis.transfer import HostTransfer
from services.rollout.engines.base import ServingEngine
from troupe.contracts import kinds
from troupe.rpc.errors import FailedPrecondition, NotFound, TroupeError, Unavailable
from troupe.transfer import Corrupt, KeyNotFound, Transfer, TransferTimeout
from troupe.v1 import common_pb2 as common_pb

log = structlog.get_logger(__name__)

# Transports of weights that come from another host.
_REMOTE: Final = ("ucx", "grpc")
# Failures that publishing the version again can repair: no host has it, its bytes are damaged, or
# its holder does not answer. (A live trainer that still has it does not publish it again.)
_GONE: Final = (KeyNotFound, Corrupt, TransferTimeout, Unavailable)


@dataclass(slots=True)
class TargetVersion:
    """The weights that all engines of one policy should serve.

    While they are rolled out (`rolling`), engines that still have the former version continue to
    serve; afterwards an engine that missed the update takes no turns until it has caught up.
    """

    ref: common_pb.WeightsRef
    rolling: bool = False

    def is_served_by(self, engine: ServingEngine) -> bool:
        """Return whether the engine is healthy and its verified weights are the target's."""
        return engine.state == common_pb.ENGINE_STATE_HEALTHY and (
            engine.version,
            engine.checksum,
        ) == (
            self.ref.version,
            self.ref.checksum,
        )

    def admits(self, engine: ServingEngine) -> bool:
        """Return whether turns may go to the engine now."""
        if self.rolling:
            return engine.state == common_pb.ENGINE_STATE_HEALTHY
        return self.is_served_by(engine)

    def precedes(self, new: common_pb.WeightsRef) -> bool:
        """Return whether `new` is a later version than the target; False for the target itself.

        Raises `FailedPrecondition` for an older version (`version_stale`), or for the same version
        with different content (`version_conflict`): a version has one checksum.
        """
        if new.version == self.ref.version:
            if new.checksum != self.ref.checksum:
                raise FailedPrecondition(
                    f"version {new.version} of policy '{new.policy}' is known with checksum "
                    f"{self.ref.checksum}",
                    kind="version_conflict",
                    field="weights.checksum",
                    value=new.checksum,
                    remedy="Publish changed weights under a new version.",
                )
            return False
        if new.version < self.ref.version:
            raise FailedPrecondition(
                f"policy '{new.policy}' is at version {self.ref.version} already",
                kind="version_stale",
                field="weights.version",
                value=new.version,
                remedy="Ask for the newest version, or prepare the job again.",
            )
        return True


class WeightFetcher:
    """Fetches published weights of one policy to this host, each version once."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._fetching: dict[tuple[str, str], asyncio.Task[float]] = {}

    async def fetch(
        self, ref: common_pb.WeightsRef, former: common_pb.WeightsRef | None = None
    ) -> float:
        """Make `ref` completely available on this host; return the seconds of the transfer, 0 if it
        was already here.

        Content shared with `former`, a version that this host may still have, is not sent again:
        frozen layers, embeddings of tokens that do not occur. Concurrent callers share one
        transfer, which continues if a caller is cancelled. Raises `NotFound` of kind
        "weights_not_found" if no reachable host has it, and `StorageFull`.
        """
        key = (ref.key, ref.checksum)
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.create_task(self._fetch(ref, former), name=f"fetch-{ref.key}")
            self._fetching[key] = task
            task.add_done_callback(lambda _: self._fetching.pop(key, None))
        return await asyncio.shield(task)

    async def _fetch(self, ref: common_pb.WeightsRef, former: common_pb.WeightsRef | None) -> float:
        if isinstance(self.transfer, HostTransfer):
            self.transfer.hint(ref.key, ref.holders)
        began = time.monotonic()
        try:
            _, choice = await asyncio.to_thread(
                self.transfer.fetch,
                ref.key,
                expected_checksum=ref.checksum,
                base=former.key if former is not None and former.key != ref.key else None,
            )
        except _GONE as error:
            raise weights_gone(ref, error) from error
        if choice.transport not in _REMOTE:
            return 0.0
        seconds = time.monotonic() - began
        log.info(
            "weights were fetched",
            policy=ref.policy,
            version=ref.version,
            transport=choice.transport,
            reason=choice.reason,
            seconds=round(seconds, 3),
        )
        return seconds


def weights_gone(ref: common_pb.WeightsRef, error: TroupeError) -> NotFound:
    """Return the error that makes the trainer of `ref` publish it again."""
    return NotFound(
        f"{ref.key}: {error.message}",
        kind=kinds.WEIGHTS_NOT_FOUND,
        field=ref.policy,
        value=ref.version,
        remedy="Publish the version again.",
    )
